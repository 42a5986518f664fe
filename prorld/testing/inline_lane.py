"""Blocking calls on the loop itself, for tests that own the clock: to such a clock a thread looks like idleness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import trio

__all__ = ["InlineLane"]

T = TypeVar("T")


class InlineLane:
    """A ``prorld.store.journal.Runner`` without a thread."""

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        """Call it after a checkpoint that can't be cancelled, as a thread would be waited for."""
        await trio.lowlevel.cancel_shielded_checkpoint()
        return fn(*args)
