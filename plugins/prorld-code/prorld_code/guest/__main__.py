"""Run as a zip file: ``python3 FILE JOB RESULT``."""

import sys

from prorld_code.guest.runner import main

sys.exit(main(*sys.argv[1:]))
