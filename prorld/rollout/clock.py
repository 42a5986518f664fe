"""The two clocks of the rollout room: trio's for durations, the wall's for records."""

from __future__ import annotations

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

    def wall(self) -> str:
        """Now, RFC 3339 in UTC with milliseconds."""
        return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def monotonic(self) -> float:
        """Trio's clock, which tests may drive."""
        return trio.current_time()
