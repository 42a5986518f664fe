"""What is counted of the calls of one engine, for its row in the list and for Prometheus."""

from __future__ import annotations

__all__ = ["CallCounts"]


class CallCounts:
    """Since the engine came. ``errors`` is by stable code, ``busy_s`` is time with at least one call in it."""

    def __init__(self) -> None:
        self.calls = 0
        self.errors: dict[str, int] = {}
        self.prompted = 0
        self.sampled = 0
        self.cached = 0
        self.migrated_in = 0
        self.migrated_away = 0
        # Since the last look at its load.
        self.peak = 0
        self.served = 0
        self.refused = 0
        self.inflight = 0
        self._busy_s = 0.0
        self._busy_since = 0.0

    @property
    def errors_total(self) -> int:
        """Calls that ended with an error."""
        return sum(self.errors.values())

    def busy_s(self, now: float) -> float:
        """Seconds with at least one call in the engine, up to now."""
        return self._busy_s + (now - self._busy_since if self.inflight else 0.0)

    def began(self, now: float) -> None:
        """A call is in the engine."""
        if not self.inflight:
            self._busy_since = now
        self.calls += 1
        self.inflight += 1
        self.peak = max(self.peak, self.inflight)

    def ended(self, now: float, *, prompted: int, sampled: int, cached: int) -> None:
        """It is out again."""
        self.inflight -= 1
        if not self.inflight:
            self._busy_s += now - self._busy_since
        self.prompted += prompted
        self.sampled += sampled
        self.cached += cached

    def failed(self, code: str) -> None:
        """It ended with an error."""
        self.errors[code] = self.errors.get(code, 0) + 1

    def look(self) -> None:
        """The next look at the load counts from here."""
        self.peak, self.served, self.refused = self.inflight, 0, 0
