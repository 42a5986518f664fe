"""Which libraries the Python of a sandbox has: asked once, so that a prompt promises nothing that is not there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from prorld.handlers import CommandResult, Sandbox

__all__ = ["LIBRARIES", "find_libraries", "words_for"]

LIBRARIES: Final = ("numpy", "scipy", "sympy")
FIND_S: Final = 30.0
_MARK: Final = "libraries:"


async def find_libraries(sandbox: Sandbox) -> tuple[str, ...]:
    """Those of ``LIBRARIES`` that can be imported; none where the sandbox does not say."""
    code = (
        "import importlib.util as _u\n"
        f"print({_MARK!r}, *[_n for _n in {LIBRARIES!r} if _u.find_spec(_n) is not None])\n"
        "del _u\n"
    )
    result: CommandResult = await sandbox.python(code, limit_s=FIND_S)
    if result.exit_code != 0 or result.timed_out:
        return ()
    lines = [line for line in result.text.splitlines() if line.startswith(_MARK)]
    named = set(lines[0].removeprefix(_MARK).split()) if lines else set[str]()
    return tuple(name for name in LIBRARIES if name in named)


def words_for(libraries: Sequence[str]) -> str:
    """What the policy is told of them."""
    last = libraries[-1]
    listed = last if len(libraries) == 1 else f"{', '.join(libraries[:-1])} and {last}"
    return f"Python can import {listed}."
