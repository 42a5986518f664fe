"""Held requests: a request that waits for something, and can be told to stop waiting because the room closes.

It owns the set of waits and never what they wait for.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from prorld.errors import Overloaded

__all__ = ["LONGEST_S", "Holds"]

T = TypeVar("T")

RETRY_AFTER_CLOSE_S = 2.0
# Longer than any route offers; a bound for those who want to see less.
LONGEST_S = 60.0


class Holds:
    """All waits of held requests. One that waits costs no task of its own."""

    def __init__(self, *, longest_s: float = LONGEST_S) -> None:
        self._longest_s = longest_s
        self._waits: set[trio.CancelScope] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._waits)

    async def hold(self, seconds: float, wait: Callable[[], Awaitable[T]]) -> T | None:
        """What ``wait`` gives, or ``None`` after ``seconds``; ``Overloaded`` when the room closes meanwhile."""
        return await self._wait(wait, trio.current_time() + min(seconds, self._longest_s))

    async def work(self, do: Callable[[], Awaitable[T]]) -> T:
        """What ``do`` gives, which has a deadline of its own; ``Overloaded`` when the room closes meanwhile."""
        done = await self._wait(do, math.inf)
        assert done is not None
        return done

    async def _wait(self, wait: Callable[[], Awaitable[T]], deadline: float) -> T | None:
        if self._closed:
            raise _closing()
        scope = trio.CancelScope(deadline=deadline)
        self._waits.add(scope)
        try:
            with scope:
                return await wait()
        finally:
            self._waits.discard(scope)
        if self._closed:
            raise _closing()
        return None

    def close(self) -> None:
        """Let every held request be answered with 503 now, and every later one, too."""
        self._closed = True
        for scope in self._waits:
            scope.cancel("the HTTP room closes")


def _closing() -> Overloaded:
    return Overloaded("the daemon is going away", code="closing", retry_after_s=RETRY_AFTER_CLOSE_S)
