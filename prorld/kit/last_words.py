"""What has to be said before a task may end: shielded for as long as it takes, until everything ends; then bounded.

It owns the shields, and neither what is said in them nor when the end has come.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import trio

__all__ = ["LastWords"]


class LastWords:
    """Shields of many tasks. From ``hurry`` on each of them holds for ``seconds``, those that are held already, too."""

    def __init__(self, seconds: float) -> None:
        assert 0 <= seconds < math.inf, seconds
        self._seconds = seconds
        self._held: dict[trio.CancelScope, None] = {}
        self._ends_at = math.inf

    @contextmanager
    def shield(self) -> Iterator[trio.CancelScope]:
        """No cancellation reaches the block but the one of the scope itself, when its time is up."""
        with trio.CancelScope(shield=True, deadline=self._ends_at) as scope:
            self._held[scope] = None
            try:
                yield scope
            finally:
                del self._held[scope]

    def hurry(self) -> None:
        """The end has come. Called again, it changes nothing."""
        if self._ends_at < math.inf:
            return
        self._ends_at = trio.current_time() + self._seconds
        for scope in self._held:
            scope.deadline = self._ends_at
