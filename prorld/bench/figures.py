"""The figures of a run, what they should be, and how they read. Pure: nothing here measures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

__all__ = ["AIMS", "Aim", "Figures", "Plan", "Some", "lines_of", "missed", "quantile", "quantile_of_buckets"]

Some = Annotated[int, Meta(ge=1)]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is done."""

    rollouts: Some = 2000
    clients: Some = 32
    turns: Some = 20
    concurrent: Some = 2000
    slow_call_s: float = 5.0
    held: Some = 5000
    abandoned: Some = 3000
    malformed: Some = 500


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is measured. CPU is the daemon's own unless its name says otherwise; an MB is 10**6 bytes."""

    # One-turn rollouts, one after the other from each of so many clients; each one request (submit with ``wait_s``).
    rollouts: int
    clients: int
    rollouts_per_s: float
    cpu_ms_per_rollout: float
    cpu_ms_per_rollout_in_two_requests: float
    requests_per_rollout: float
    cpu_ms_per_request: float
    bare_calls_per_s: float
    bare_cpu_ms_per_call: float
    engine_cpu_ms_per_call: float
    # One engine call as the handler sees it, beside the same call without the daemon.
    calls: int
    call_p50_ms: float
    call_p99_ms: float
    bare_call_p50_ms: float
    bare_call_p99_ms: float
    added_p50_ms: float
    added_p99_ms: float
    call_ratio_p50: float
    # Many rollouts at once, each with an engine that takes its time.
    concurrent: int
    concurrent_seen: int
    turns_per_s: float
    lag_p50_ms: float
    lag_p99_ms: float
    lag_samples: int
    cpu_share: float
    queued_share: float
    memory_kb_per_rollout: float
    # All of them cancelled in one call, while the engine holds their calls.
    cancelled: int
    cancel_p50_ms: float
    cancel_p99_ms: float
    cancel_all_ms: float
    cancel_engine_ms: float
    cancel_answer_ms: float
    cancel_cpu_ms: float
    cancel_queued_ms: float
    # Held, abandoned and malformed requests, in rounds; ``rss_growth_mb`` is of the last one.
    held: int
    abandoned: int
    malformed: int
    malformed_unanswered: int
    held_unanswered: int
    held_kb_each: float
    get_p50_ms: float
    get_held_p50_ms: float
    get_after_p50_ms: float
    get_after_ratio: float
    fds_leaked: int
    tasks_leaked: int
    rss_growth_mb: float
    # The machine, while all this went on.
    cores: int
    load_1m_before: float
    load_1m_after: float
    seconds: float


class Aim(msgspec.Struct, frozen=True, kw_only=True):
    """What a figure should be, and why anybody cares."""

    figure: str
    bound: float
    how: Literal["under", "at most", "at least"] = "under"

    def holds(self, value: float) -> bool:
        """Whether the figure is as it should be; one that is no number is not."""
        if self.how == "under":
            return value < self.bound
        return value <= self.bound if self.how == "at most" else value >= self.bound


AIMS: tuple[Aim, ...] = (
    Aim(figure="cpu_ms_per_rollout", bound=3.0),
    Aim(figure="lag_p99_ms", bound=50.0),
    Aim(figure="cancel_all_ms", bound=1000.0),
    Aim(figure="malformed_unanswered", bound=0, how="at most"),
    Aim(figure="held_unanswered", bound=0, how="at most"),
    Aim(figure="fds_leaked", bound=0, how="at most"),
    Aim(figure="tasks_leaked", bound=0, how="at most"),
    # A heap full of holes still grows a little; 5,000 held requests take 170 MB, and a leak of a fifth of them shows.
    Aim(figure="rss_growth_mb", bound=32.0),
    # Of two medians minutes apart on a machine with other work; a leak shows as a multiple.
    Aim(figure="get_after_ratio", bound=2.0),
)


def missed(figures: Figures, plan: Plan, aims: Sequence[Aim] = AIMS) -> list[str]:
    """One line per aim that the figures miss."""
    full = Aim(figure="concurrent_seen", bound=plan.concurrent, how="at least")
    return lines_of(figures, (*aims, full))


def lines_of(figures: msgspec.Struct, aims: Sequence[Aim]) -> list[str]:
    """The same for any figures; one that could not be measured is ``None`` and misses its aim."""
    lines: list[str] = []
    for aim in aims:
        found = getattr(figures, aim.figure)
        value = math.nan if found is None else float(found)
        if not aim.holds(value):
            lines.append(f"{aim.figure} is {value:.4g}, not {aim.how} {aim.bound:g}")
    return lines


def quantile(samples: Sequence[float], share: float) -> float:
    """By nearest rank; not a number where there are no samples."""
    ordered = sorted(samples)
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else math.nan


def quantile_of_buckets(buckets: Mapping[float, float], share: float) -> float:
    """From counts by upper bound, each with all below it; on a straight line inside a bucket, as Prometheus does it.

    In the last bucket, which has no end, it is infinite: nobody knows how late that was.
    """
    bounds = sorted(buckets)
    if not bounds or not buckets[bounds[-1]]:
        return math.nan
    wanted = share * buckets[bounds[-1]]
    below, start = 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= wanted:
            inside = buckets[bound] - below
            return bound if math.isinf(bound) or not inside else start + (bound - start) * (wanted - below) / inside
        below, start = buckets[bound], bound
    return math.nan
