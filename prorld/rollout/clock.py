"""The two clocks of the rollout room: trio's for durations, the wall's for records."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol

import trio


class Clock(Protocol):
    """Where times come from; tests pass their own."""

    def wall(self) -> str:
        """Now, RFC 3339 in UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds that only grow."""
        ...


class SystemClock:
    """The real ones."""

    def __init__(self) -> None:
        self._second = -1
        self._text = ""

    def wall(self) -> str:
        """Now, RFC 3339 in UTC with milliseconds."""
        # A rollout asks some fifteen times, many of them do so within a second, and writing that out is what costs.
        second, rest = divmod(time.time_ns() // 1_000_000, 1000)
        if second != self._second:
            self._text = f"{datetime.fromtimestamp(second, UTC):%Y-%m-%dT%H:%M:%S}"
            self._second = second
        return f"{self._text}.{rest:03}Z"

    def monotonic(self) -> float:
        """Trio's clock, which tests may drive."""
        return trio.current_time()
