"""How an optional part of prorld is installed, in the words that work where this prorld is installed."""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

__all__ = ["cure"]


def cure(extra: str) -> str:
    """A command in backquotes that installs this extra beside this very prorld."""
    root = Path(__file__).parents[2]
    if Path(sys.prefix).resolve() == root / ".venv" and (root / "scripts" / "extra").is_file():
        # The environment that `./just` made has no pip.
        where = "." if root == Path.cwd() else shlex.quote(str(root))
        return f"`{where}/just extra {extra}`"
    python = shlex.quote(sys.executable)
    if find_spec("pip") is None:
        return f"`uv pip install --python {python} 'prorld[{extra}]'`"
    return f"`{python} -m pip install 'prorld[{extra}]'`"
