"""A group: n samples of one instance, and what it is worth to training once they have ended. Pure.

A sample that is masked or dropped is never part of a group's spread, mean or advantages. Trouble is never a zero.

What counts, in one place: a sample is *usable* if its verdict is ``use``, its reward is a number, and it has the
metric that the rule names. A sample without that metric does not count: nobody can say what it is to the rule, and a
group that has too few others fails and says so. Under ``on_timeout = zero`` a sample that ran out of time while the
policy worked is usable with 0; a time-out of INIT or EVAL is infrastructure's and never a zero.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from prorld.domain.outcome import OutcomeKind, Stage, Verdict
from prorld.domain.versions import PolicyVersion

__all__ = [
    "ADVANTAGE_FORMULA",
    "REWARD_MAX",
    "GroupEnd",
    "Informative",
    "OnError",
    "OnTimeout",
    "Quorum",
    "SampleEnd",
    "Usable",
    "advantages",
    "causes",
    "is_informative",
    "mean_of",
    "rewards",
    "usable_sample",
    "usable_samples",
    "why_not_usable",
]

OnError = Literal["retry", "exclude"]
OnTimeout = Literal["mask", "zero", "drop"]

ADVANTAGE_FORMULA = "(reward - mean) / (std + 1e-6), population std, over the usable samples"
_EPSILON = 1e-6

# A reward or metric beyond this is no number to compute with: its square would not be one.
REWARD_MAX = 1e100

# Different causes that the reason of a failed group names.
_CAUSES_TOLD = 6


class Informative(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which groups training can learn from. ``metric`` is ``reward`` or the name of a part of it."""

    rule: Literal["spread", "mean_between", "all"] = "spread"
    metric: Annotated[str, Meta(min_length=1, max_length=128)] = "reward"
    min_spread: Annotated[float, Meta(ge=0, le=1e9)] = 1e-6
    low: float | None = None
    high: float | None = None


class Quorum(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many samples make a group count, and how long its stragglers have from then on. Unset: all of them."""

    min_usable: Annotated[int, Meta(ge=1, le=4096)] | None = None
    grace_s: Annotated[float, Meta(ge=0, le=7 * 86400)] = 0.0


class SampleEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a sample ended, as far as its group is concerned. ``metrics`` are the reward's parts by name.

    ``stage`` is where it ended. ``sampled`` are the versions that decide how old it is (the oldest of each epoch, and
    the newest); where they are not given, ``oldest`` alone does.
    """

    sample_index: int
    kind: OutcomeKind
    verdict: Verdict
    stage: Stage | None = None
    code: str = ""
    reward: float | None = None
    metrics: dict[str, float] = {}
    duration_s: float = 0.0
    sampled_tokens: int = 0
    oldest: PolicyVersion | None = None
    sampled: tuple[PolicyVersion, ...] = ()
    policy_versions: list[int] = []


class GroupEnd(StrEnum):
    """The six ends of a group in a batch."""

    DONE = "done"
    FILTERED = "filtered"
    FAILED = "failed"
    STALE = "stale"
    CANCELLED = "cancelled"
    CARRIED = "carried"


class Usable(msgspec.Struct, frozen=True, kw_only=True):
    """A sample that counts, with the reward that it has in its group: ``on_timeout = zero`` may give it one."""

    sample_index: int
    reward: float
    metric: float
    oldest: PolicyVersion | None
    sampled: tuple[PolicyVersion, ...] = ()


def usable_sample(end: SampleEnd, rule: Informative, on_timeout: OnTimeout) -> Usable | None:
    """The sample as one that counts, or ``None``."""
    found = _judged(end, rule, on_timeout)
    return None if isinstance(found, str) else found


def why_not_usable(end: SampleEnd, rule: Informative, on_timeout: OnTimeout) -> str | None:
    """In words, as in "2 {timeout in run, mask}"; ``None`` for a sample that counts."""
    found = _judged(end, rule, on_timeout)
    return found if isinstance(found, str) else None


def _judged(end: SampleEnd, rule: Informative, on_timeout: OnTimeout) -> Usable | str:
    if end.kind is OutcomeKind.TIMEOUT:
        if on_timeout == "zero" and _is_the_policys(end):
            return _counted(end, 0.0, 0.0)
        return _words(end, "drop" if on_timeout == "drop" else "mask")
    if end.verdict is not Verdict.USE or end.reward is None:
        return _words(end, "no reward" if end.verdict is Verdict.USE else end.verdict.value)
    metric = end.reward if _needs_no_part(rule) else end.metrics.get(rule.metric)
    if metric is None:
        return f"without the metric {rule.metric!r}"
    if not (_is_sound(end.reward) and _is_sound(metric)):
        return _words(end, "the reward is no usable number")
    return _counted(end, end.reward, metric)


def _counted(end: SampleEnd, reward: float, metric: float) -> Usable:
    sampled = end.sampled or (() if end.oldest is None else (end.oldest,))
    oldest = min(sampled, default=None)
    return Usable(sample_index=end.sample_index, reward=reward, metric=metric, oldest=oldest, sampled=sampled)


def _is_the_policys(end: SampleEnd) -> bool:
    """Whether the policy had the time that was over. Making a sandbox and grading are not its doing."""
    return end.stage not in {"init", "eval"} and end.code not in {"init_timeout", "eval_timeout"}


def _needs_no_part(rule: Informative) -> bool:
    return rule.metric == "reward" or rule.rule == "all"


def _is_sound(number: float) -> bool:
    return math.isfinite(number) and abs(number) <= REWARD_MAX


def _words(end: SampleEnd, why: str) -> str:
    where = "" if end.stage is None else f" in {end.stage}"
    what = end.kind.value if end.code in {"", end.kind.value} else f"{end.kind.value} ({end.code})"
    return f"{what}{where}: {why}"


def usable_samples(ends: Iterable[SampleEnd], rule: Informative, on_timeout: OnTimeout) -> list[Usable]:
    """Those that count, by sample index."""
    found = (usable_sample(end, rule, on_timeout) for end in ends)
    return sorted((usable for usable in found if usable is not None), key=lambda usable: usable.sample_index)


def causes(ends: Iterable[SampleEnd], rule: Informative, on_timeout: OnTimeout) -> str:
    """Why samples of a group do not count, counted, the most frequent first."""
    seen = Counter(why for end in ends if (why := why_not_usable(end, rule, on_timeout)) is not None)
    told = sorted(seen.items(), key=lambda item: (-item[1], item[0]))
    more = [f"{sum(count for _, count in told[_CAUSES_TOLD:])} others"] if len(told) > _CAUSES_TOLD else []
    return ", ".join([f"{count} {why}" for why, count in told[:_CAUSES_TOLD]] + more)


def is_informative(usable: Sequence[Usable], rule: Informative) -> bool:
    """Whether training can learn from them."""
    if rule.rule == "all":
        return True
    values = [sample.metric for sample in usable]
    if not values:
        return False
    if rule.rule == "spread":
        return max(values) - min(values) > rule.min_spread
    assert rule.low is not None, rule
    assert rule.high is not None, rule
    return rule.low <= mean_of(values) <= rule.high


def rewards(ends: Iterable[SampleEnd], usable: Iterable[Usable], n: int) -> tuple[float | None, ...]:
    """By sample index: what the group says of each, which is the sample's own reward but for a time-out made zero."""
    found: list[float | None] = [None] * n
    for end in ends:
        found[end.sample_index] = end.reward if end.reward is not None and math.isfinite(end.reward) else None
    for sample in usable:
        found[sample.sample_index] = sample.reward
    return tuple(found)


def advantages(usable: Sequence[Usable], n: int) -> list[float | None]:
    """By sample index, ``ADVANTAGE_FORMULA``; null for those that do not count."""
    found: list[float | None] = [None] * n
    if not usable:
        return found
    mean = mean_of([sample.reward for sample in usable])
    std = math.sqrt(mean_of([(sample.reward - mean) ** 2 for sample in usable]))
    for sample in usable:
        found[sample.sample_index] = (sample.reward - mean) / (std + _EPSILON)
    return found


def mean_of(values: Sequence[float]) -> float:
    """The mean, exact enough that equal values have themselves for it; there is at least one."""
    first = values[0]
    return first + math.fsum(value - first for value in values) / len(values)
