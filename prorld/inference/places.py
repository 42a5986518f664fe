"""The places in one engine: so many calls at once, the others in line, and all in reach when the engine is lost.

Who goes next is decided in ``prorld.kit.turns``: a higher priority first, then whoever came first.
"""

from __future__ import annotations

import trio

from prorld.errors import BackendError
from prorld.kit.turns import Turn, Turns

__all__ = ["Place", "Places"]

# Whose turn it is between tenants has been decided at the gate of the stage.
_ALL = "all"


class Place:
    """One call: first in line, then in the engine. Its scope is around both."""

    __slots__ = ("admitted", "lost", "scope", "turn")

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self.scope = trio.CancelScope()
        self.admitted: trio.Event | None = None
        self.lost: BackendError | None = None

    @property
    def is_inside(self) -> bool:
        """Whether it is in the engine."""
        return self.turn.state == "active"

    def lose(self, error: BackendError) -> None:
        """End the call, which then fails with this error."""
        if self.lost is None:
            self.lost = error
            self.scope.cancel(error.message)


class Places:
    """Everything changes between two awaits. ``ask`` and ``leave`` belong together."""

    def __init__(self, limit: int) -> None:
        self._turns = Turns(limit)
        self._places: dict[Turn, Place] = {}

    @property
    def limit(self) -> int:
        """How many calls may be in the engine."""
        return self._turns.workers

    @property
    def inside(self) -> int:
        """How many are; more than the limit for a while after it shrank."""
        return self._turns.active

    @property
    def waiting(self) -> int:
        """How many stand in line."""
        return self._turns.waiting

    def set_limit(self, limit: int) -> None:
        """Change the number of places; whoever is inside when it shrinks may finish."""
        self._turns.set_workers(limit)
        self._admit()

    def ask(self, priority: int) -> Place:
        """Stand in line; where there is room, the place is inside at once, else its event tells when."""
        place = Place(self._turns.ask(priority, _ALL))
        self._places[place.turn] = place
        self._admit()
        if not place.is_inside:
            place.admitted = trio.Event()
        return place

    def leave(self, place: Place) -> None:
        """Give the place up, in line or inside."""
        self._places.pop(place.turn, None)
        self._turns.leave(place.turn)
        self._admit()

    def lose_all(self, error: BackendError) -> None:
        """Every call fails with this error now: the engine will not answer any more."""
        for place in tuple(self._places.values()):
            place.lose(error)

    def lose_waiting(self, error: BackendError) -> None:
        """Those in line fail with this error now; those inside run to their end."""
        for place in tuple(self._places.values()):
            if not place.is_inside:
                place.lose(error)

    def _admit(self) -> None:
        while (turn := self._turns.admit()) is not None:
            admitted = self._places[turn].admitted
            if admitted is not None:
                admitted.set()
