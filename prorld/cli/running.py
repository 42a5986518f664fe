"""``trio.run``, with errors of the project out of their groups so that they can be told in one line."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from prorld.errors import ProrldError, leaves

T = TypeVar("T")


def run_trio(main: Callable[[], Awaitable[T]]) -> T:
    """Run to the end. Errors that are all ours are raised as the first of them; a bug keeps its whole group."""
    try:
        return trio.run(main)
    except BaseExceptionGroup as group:
        found = [*leaves(group)]
        if not all(isinstance(leaf, ProrldError | KeyboardInterrupt) for leaf in found):
            raise
        raise next((leaf for leaf in found if isinstance(leaf, KeyboardInterrupt)), found[0]) from group
