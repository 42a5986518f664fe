"""Time that a piece of work may take, and that stands still while something that is not its doing holds it up.

It owns a cancel scope and its deadline. Whoever holds it says so by ``hold`` and ``let_go``, from any task.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import trio

__all__ = ["Allowance"]


class Allowance:
    """``scope`` is to be entered by the work; its deadline is ``seconds`` of time in which nobody held it up."""

    def __init__(self, seconds: float) -> None:
        self.scope = trio.CancelScope(deadline=trio.current_time() + seconds)
        self._holds = 0
        self._held_since = 0.0
        self._held_s = 0.0
        self._left = 0.0

    def __repr__(self) -> str:
        return f"<Allowance held by {self._holds}>"

    @property
    def held_s(self) -> float:
        """How long it has been held up so far."""
        return self._held_s + (trio.current_time() - self._held_since if self._holds else 0.0)

    def hold(self) -> None:
        """The time stands still from now on. A deadline that has passed has passed."""
        self._holds += 1
        if self._holds == 1:
            self._held_since = trio.current_time()
            self._left = self.scope.deadline - self._held_since
            self.scope.deadline = math.inf

    def let_go(self) -> None:
        """The time goes on when the last one has let go."""
        assert self._holds > 0, "nobody holds it"
        self._holds -= 1
        if self._holds == 0:
            now = trio.current_time()
            self._held_s += now - self._held_since
            self.scope.deadline = now + self._left

    @contextmanager
    def held(self) -> Iterator[None]:
        """Held up for the length of the block."""
        self.hold()
        try:
            yield
        finally:
            self.let_go()
