"""What tells whether a file of weights is still what it was when an update named it."""

from __future__ import annotations

import os
import stat

import trio

from prorld.inference.embedded_child import seal

__all__ = ["seal_of"]

# A directory of a network that does not answer must not hold an update up.
LOOK_SECONDS_MAX = 10.0


async def seal_of(path: str) -> str | None:
    """The seal of a regular file that this machine has; ``None`` for all else."""
    with trio.move_on_after(LOOK_SECONDS_MAX):
        return await trio.to_thread.run_sync(_look, path, abandon_on_cancel=True)
    return None


def _look(path: str) -> str | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - a pathlib.Path says no more
    except OSError:
        return None
    return seal(found) if stat.S_ISREG(found.st_mode) else None
