"""Thread lanes: one named, bounded set of worker threads per blocking library.

A lane keeps a slow library from taking the threads of the others. It owns how many calls run at once. It never leaves
a call behind unless told to: a thread can't be stopped, so a cancelled caller waits for it. Calls should be short; what
is long belongs in a child process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

import msgspec
import trio

from prorld.errors import ProrldError

__all__ = ["Lane", "LaneStatistics", "LibraryExit"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class LibraryExit(ProrldError):
    """A library called ``sys.exit()``. Unwrapped, that would pass ``except Exception`` and end the process."""

    code = "library_exit"


class LaneStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A lane at one moment. ``runs_total`` counts calls that got a thread."""

    name: str
    threads: int
    busy: int
    waiting: int
    runs_total: int


class Lane:
    """At most ``threads`` calls at once; the others wait in line and can be cancelled there."""

    def __init__(self, name: str, threads: int) -> None:
        assert threads >= 1, f"lane {name}: {threads} threads"
        self.name = name
        self._limiter = trio.CapacityLimiter(threads)
        self._runs = 0

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts, abandon_on_cancel: bool = False) -> T:
        """Call ``fn(*args)`` in a thread. ``SystemExit`` comes out as ``LibraryExit``.

        Cancelled while the call runs, it returns the result all the same and the cancellation comes at the next
        checkpoint, so nothing that the call made is lost. ``abandon_on_cancel`` is for pure reads alone; an abandoned
        call keeps its place in the lane until it ends.
        """
        ran = False

        def call() -> T:
            nonlocal ran
            ran = True
            try:
                return fn(*args)
            except SystemExit as exc:
                raise LibraryExit(f"a call in lane {self.name} tried to end the process") from exc

        try:
            return await trio.to_thread.run_sync(
                call,
                abandon_on_cancel=abandon_on_cancel,
                limiter=self._limiter,
                thread_name=f"lane {self.name}",
            )
        finally:
            # Counted here and not in the thread: only this task writes the count.
            self._runs += ran

    def statistics(self) -> LaneStatistics:
        """How busy it is and what it has done."""
        seen = self._limiter.statistics()
        return LaneStatistics(
            name=self.name,
            threads=int(seen.total_tokens),
            busy=seen.borrowed_tokens,
            waiting=seen.tasks_waiting,
            runs_total=self._runs,
        )
