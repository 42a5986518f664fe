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
        self._millisecond = -1
        self._text = ""

    def wall(self) -> str:
        """Now, RFC 3339 in UTC with milliseconds."""
        # A rollout asks some fifteen times, mostly within one millisecond, and writing it out is what costs.
        now = time.time_ns() // 1_000_000
        if now != self._millisecond:
            seconds, rest = divmod(now, 1000)
            self._text = f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:03}Z"
            self._millisecond = now
        return self._text

    def monotonic(self) -> float:
        """Trio's clock, which tests may drive."""
        return trio.current_time()
