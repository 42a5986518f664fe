"""How many sandboxes may start at once on this node, and who starts next.

A start is a burst of work for the processor, the disk and the warden; a hundred at once are each a hundred times as
slow. A start that a job waits for goes before one that is made in advance; those of one rank take turns by what is
started, so that a crowd with one image does not keep a single job with another one waiting.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import trio

from prorld.kit.turns import Turn, Turns

__all__ = ["Admission", "AdmissionStatistics", "default_starts"]

STARTS_MIN = 4
STARTS_PER_CORE = 2


def default_starts() -> int:
    """As many as keep the usable cores busy while some of them wait for the disk."""
    return max(STARTS_MIN, STARTS_PER_CORE * len(os.sched_getaffinity(0)))


class AdmissionStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The starts at one moment; ``peak`` is the most there were at once, ``admitted_total`` counts those let in."""

    limit: int
    starting: int
    waiting: int
    peak: int
    admitted_total: int


def _nothing() -> None:
    pass


class Admission:
    """At most ``limit`` starts at once. ``changed`` is called whenever a start begins to wait, is let in, or ends."""

    def __init__(self, limit: int, changed: Callable[[], None] = _nothing) -> None:
        assert limit >= 1, limit
        self.changed = changed
        self._turns = Turns(limit)
        self._opened: dict[Turn, trio.Event] = {}
        self._peak = 0
        self._admitted = 0

    @asynccontextmanager
    async def enter(self, what: str, *, urgent: bool) -> AsyncIterator[Callable[[], None]]:
        """Wait for a place and hold it for the block, or until what it yields is called, which may happen twice.

        ``what`` names what is started: nobody waits for ever behind others of one name.
        """
        turn = self._turns.ask(int(urgent), what)
        self._opened[turn] = opened = trio.Event()

        def leave() -> None:
            # The state of the turn says which place it is, so one that was let in and cancelled before it ran gives
            # back the place inside and not the one in the line.
            self._opened.pop(turn, None)
            self._turns.leave(turn)
            self._admit()

        try:
            self._admit()
            await opened.wait()
            yield leave
        finally:
            leave()

    def statistics(self) -> AdmissionStatistics:
        """How full it is and what it has seen."""
        return AdmissionStatistics(
            limit=self._turns.workers,
            starting=self._turns.active,
            waiting=self._turns.waiting,
            peak=self._peak,
            admitted_total=self._admitted,
        )

    def _admit(self) -> None:
        while (turn := self._turns.admit()) is not None:
            self._admitted += 1
            self._peak = max(self._peak, self._turns.active)
            self._opened.pop(turn).set()
        self.changed()
