"""``python -m prorld.cli``."""

from __future__ import annotations

from prorld.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
