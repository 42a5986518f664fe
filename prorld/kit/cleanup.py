"""Clean-up that awaits: shielded from cancellation, and never without a deadline.

It owns the one shape that such clean-up has in this project. When a clean-up runs out of time it says so in the
log and decides nothing: what is left behind is a reaper's business.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import structlog
import trio
from structlog.typing import FilteringBoundLogger

__all__ = ["afterwards", "shielded"]

log: FilteringBoundLogger = structlog.get_logger()


@contextmanager
def shielded(seconds: float, what: str) -> Iterator[trio.CancelScope]:
    """Shield the block for at most ``seconds``; logs ``cleanup.expired`` when they did not suffice."""
    assert 0 <= seconds < math.inf, seconds
    with trio.move_on_after(seconds, shield=True) as scope:
        yield scope
    _say_if_expired(scope, seconds, what)


@asynccontextmanager
async def afterwards(seconds: float, what: str, clean: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Run ``clean`` when the block is left, however it is left, ``shielded`` for ``seconds``.

    Entering awaits nothing, so ``thing = await make()`` followed by ``async with afterwards(...)`` leaves no gap.
    """
    assert 0 <= seconds < math.inf, seconds
    try:
        yield
    finally:
        # Not through `shielded`: the linter that finds unshielded awaits does not know it.
        with trio.move_on_after(seconds, shield=True) as scope:
            await clean()
        _say_if_expired(scope, seconds, what)


def _say_if_expired(scope: trio.CancelScope, seconds: float, what: str) -> None:
    # Not `cancel_called`: clean-up that ended by itself a moment late has left nothing undone.
    if scope.cancelled_caught:
        log.warning("cleanup.expired", what=what, seconds=seconds)
