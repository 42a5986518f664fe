"""How many calls an engine is given at once: a limit that follows what the engine shows of its load. Pure.

The rule is that of a sender on a line whose width nobody knows. A new engine starts low, because its cache is cold, and
the limit doubles as long as it is used up and nothing speaks against it. The first sign of pressure makes it smaller by
a factor, and from then on it grows by a fixed step. So the limits of daemons that share an engine come together, and
one that was once too large does not swing between too much and nothing.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

__all__ = [
    "CALLS_MAX",
    "Admission",
    "AdmissionRules",
    "Pressure",
    "Sight",
    "bounded",
    "followed",
    "opening",
    "pressure_of",
]

# The limit of an engine that nobody gave one: more calls at once than any engine works on.
CALLS_MAX = 65_536

# What waits in an engine between two of its steps says nothing.
WAITING_MIN = 2

# What speaks against more calls: a full cache, a queue in the engine, work thrown away, calls turned away.
Pressure = Literal["kv_usage", "waiting", "preempted", "refused"]


class AdmissionRules(msgspec.Struct, frozen=True, kw_only=True):
    """``shrink`` is the factor under pressure, ``step`` what is added without; shares are between 0 and 1."""

    enabled: bool = True
    start: int = 32
    floor: int = 4
    step: int = 4
    shrink: float = 0.7
    kv_high: float = 0.95
    waiting_share: float = 0.25


class Sight(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of an engine since the decision before: our calls, and its own word where it gives one.

    ``peak`` is the most calls that were in it at once, ``queued`` those that wait for a place now.
    """

    inflight: int
    peak: int
    queued: int = 0
    served: int = 0
    refused: int = 0
    preempted: int = 0
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """How many calls at once, and whether no pressure has been met yet."""

    limit: int
    slow_start: bool = True


def opening(rules: AdmissionRules, max_inflight: int | None) -> Admission:
    """For an engine that has just come, or come back: its cache is cold."""
    ceiling = _ceiling(max_inflight)
    return Admission(limit=min(rules.start, ceiling) if rules.enabled else ceiling)


def bounded(before: Admission, rules: AdmissionRules, max_inflight: int | None) -> Admission:
    """The same within another bound."""
    ceiling = _ceiling(max_inflight)
    limit = before.limit if rules.enabled else ceiling
    return _between(min(rules.floor, ceiling), limit, ceiling, slow_start=before.slow_start)


def followed(before: Admission, seen: Sight, rules: AdmissionRules, max_inflight: int | None) -> Admission:
    """The limit from now on."""
    ceiling = _ceiling(max_inflight)
    floor = min(rules.floor, ceiling)
    if not rules.enabled:
        return Admission(limit=ceiling)
    if pressure_of(seen, rules) is not None:
        if seen.inflight > before.limit:
            # The limit before has not taken effect yet; pressure seen meanwhile is what it was made smaller for.
            return _between(floor, before.limit, ceiling, slow_start=False)
        # An unused limit says nothing of what the engine bears; what was in it does.
        borne = min(before.limit, max(seen.peak, seen.inflight))
        return _between(floor, math.floor(borne * rules.shrink), ceiling, slow_start=False)
    if seen.queued or seen.peak >= before.limit:
        grown = 2 * before.limit if before.slow_start else before.limit + rules.step
        return _between(floor, grown, ceiling, slow_start=before.slow_start)
    return _between(floor, before.limit, ceiling, slow_start=before.slow_start)


def pressure_of(seen: Sight, rules: AdmissionRules) -> Pressure | None:
    """What speaks against more calls, if anything does.

    An engine that turns every call away is paused or asleep, and how much it bears can't be learned from that.
    """
    if seen.kv_usage is not None and seen.kv_usage >= rules.kv_high:
        return "kv_usage"
    waiting = seen.waiting or 0
    if waiting >= WAITING_MIN and waiting > rules.waiting_share * (seen.running or 0):
        return "waiting"
    if seen.preempted:
        return "preempted"
    return "refused" if seen.refused and seen.served else None


def _ceiling(max_inflight: int | None) -> int:
    return CALLS_MAX if max_inflight is None else min(max_inflight, CALLS_MAX)


def _between(floor: int, limit: int, ceiling: int, *, slow_start: bool) -> Admission:
    return Admission(limit=max(floor, min(limit, ceiling)), slow_start=slow_start)
