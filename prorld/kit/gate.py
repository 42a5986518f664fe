"""The gate of a stage: so many inside at once, the others in a line that is fair.

It owns the waiting; who goes next is decided in ``turns``. It bounds how many are inside and never how long: deadlines
start when the gate has opened, and belong to whoever entered.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import msgspec
import trio

from prorld.kit.turns import Turn, Turns

__all__ = ["Gate", "GateStatistics"]


class GateStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A gate at one moment. ``waited_s_total`` is the queueing time of those who entered, not of those who gave up."""

    workers: int
    active: int
    waiting: int
    entered_total: int
    waited_s_total: float


class Gate:
    """At most ``workers`` inside; priority first, then fair between tenants and their flows; see ``turns``."""

    def __init__(self, name: str, workers: int, weights: Mapping[str, float] | None = None) -> None:
        self.name = name
        self._turns = Turns(workers, weights)
        self._opened: dict[Turn, trio.Event] = {}
        self._entered = 0
        self._waited_s = 0.0

    @asynccontextmanager
    async def enter(self, *, priority: int = 0, tenant: str = "default", flow: str = "") -> AsyncIterator[None]:
        """Wait for a place, hold it for the block, give it back however the block ends."""
        asked_at = trio.current_time()
        turn = self._turns.ask(priority, tenant, flow)
        self._opened[turn] = opened = trio.Event()
        try:
            self._admit()
            await opened.wait()
            self._entered += 1
            self._waited_s += trio.current_time() - asked_at
            yield
        finally:
            # The state of the turn says which place it is, so a cancel that falls between the decision and the wake-up
            # gives back the place inside and not the one in the line.
            self._opened.pop(turn, None)
            self._turns.leave(turn)
            self._admit()

    def set_workers(self, workers: int) -> None:
        """Change the number of places now. Zero pauses the gate; whoever is inside when it shrinks may finish."""
        self._turns.set_workers(workers)
        self._admit()

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Change what tenants weigh, from the next admission on."""
        self._turns.set_weights(weights)

    def statistics(self) -> GateStatistics:
        """How full it is and what it has seen."""
        return GateStatistics(
            workers=self._turns.workers,
            active=self._turns.active,
            waiting=self._turns.waiting,
            entered_total=self._entered,
            waited_s_total=self._waited_s,
        )

    def _admit(self) -> None:
        while (turn := self._turns.admit()) is not None:
            self._opened.pop(turn).set()
