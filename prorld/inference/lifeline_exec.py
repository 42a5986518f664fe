"""Becomes the program in its arguments, which then ends, with its process group, when whoever started it has gone.

It runs alone with the standard library, so that any Python can run it. The kernel keeps watch: the pipe of the lifeline
raises SIGIO for the whole group when its other end closes, and the default of that signal is to end a process.
"""

from __future__ import annotations

import fcntl
import os
import select
import sys


def main() -> None:
    """Tie the group to the lifeline, and go."""
    lifeline = int(os.environ["LIFELINE_FD"])
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    # Gone already, before the signal was asked for.
    if select.select([lifeline], [], [], 0)[0]:
        sys.exit(1)
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - that is what it is for


if __name__ == "__main__":
    main()
