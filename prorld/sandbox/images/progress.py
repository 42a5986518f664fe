"""How making an image says where it stands."""

from __future__ import annotations

from typing import Protocol

import trio

from prorld.sandbox.images.tree import Tick

__all__ = ["Progress", "Silence", "tick_of"]


class Progress(Protocol):
    """Told what goes on. ``advance`` comes from a worker thread."""

    def step(self, what: str, *, total_bytes: int | None = None) -> None:
        """A new piece of work begins; what came before it is done."""
        ...

    def advance(self, done_bytes: int) -> None:
        """So much more of it is done."""
        ...

    def said(self, line: str) -> None:
        """A line of a program that does the work."""
        ...


class Silence:
    """Nobody listens."""

    def step(self, what: str, *, total_bytes: int | None = None) -> None:
        """Nothing."""

    def advance(self, done_bytes: int) -> None:
        """Nothing."""

    def said(self, line: str) -> None:
        """Nothing."""


def tick_of(progress: Progress) -> Tick:
    """For work in a lane: tells the progress, and ends the work when its caller was cancelled."""

    def tick(done_bytes: int) -> None:
        trio.from_thread.check_cancelled()
        if done_bytes:
            progress.advance(done_bytes)

    return tick
