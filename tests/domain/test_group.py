"""What of a group counts: trouble is never a zero, and what does not count is in no spread, mean or advantage."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorld.domain.group import (
    REWARD_MAX,
    Informative,
    OnTimeout,
    SampleEnd,
    advantages,
    causes,
    is_informative,
    mean_of,
    rewards,
    usable_samples,
    why_not_usable,
)
from prorld.domain.outcome import OutcomeKind, Verdict
from tests.domain.batch_world import lost, used

SPREAD = Informative()
REWARDS = st.floats(-1e6, 1e6)


def indices(*ends: SampleEnd, rule: Informative = SPREAD, on_timeout: OnTimeout = "mask") -> list[int]:
    return [sample.sample_index for sample in usable_samples(ends, rule, on_timeout)]


def test_only_what_may_be_used_counts():
    """A masked or dropped sample does not, whatever reward it has; one without a reward does not, either."""
    none = lost(4, OutcomeKind.OK, verdict=Verdict.USE)
    masked, dropped = used(1, 9.0, verdict=Verdict.MASK), used(2, 9.0, verdict=Verdict.DROP)
    assert indices(used(3, 1.0), used(0, 0.0), masked, dropped, none) == [0, 3]


@pytest.mark.parametrize(("on_timeout", "counts"), [("mask", False), ("drop", False), ("zero", True)])
def test_a_time_out_of_the_policy(on_timeout: OnTimeout, counts: bool):
    """It is out, or zero: for the group alone, and only where the policy had the time."""
    late = lost(0, OutcomeKind.TIMEOUT, stage="run", code="run_timeout", reward=0.7)
    assert (indices(late, on_timeout=on_timeout) == [0]) is counts
    for stage in ("init", "eval"):
        assert indices(lost(0, OutcomeKind.TIMEOUT, stage=stage), on_timeout=on_timeout) == []
        assert indices(lost(0, OutcomeKind.TIMEOUT, code=f"{stage}_timeout"), on_timeout=on_timeout) == []
    usable = usable_samples([late], SPREAD, on_timeout)
    assert rewards([late], usable, 2) == (0.0 if counts else 0.7, None)


def test_a_sample_without_the_metric_does_not_count():
    """Where the rule needs it; what is said of it names the metric."""
    rule = Informative(metric="resolved")
    with_it, without = used(0, 1.0, metrics={"resolved": 1.0}), used(1, 1.0)
    assert indices(with_it, without, rule=rule) == [0]
    assert why_not_usable(without, rule, "mask") == "without the metric 'resolved'"
    assert indices(with_it, without, rule=Informative(rule="all", metric="resolved")) == [0, 1]


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, 1e308])
def test_numbers_that_nobody_can_compute_with_do_not_count(reward: float):
    """They are no rewards of the group, and break nothing."""
    ends = [used(0, reward), used(1, 0.0)]
    assert indices(*ends) == [1]
    assert "no usable number" in (why_not_usable(ends[0], SPREAD, "mask") or "")
    assert indices(used(0, REWARD_MAX), used(1, -REWARD_MAX)) == [0, 1]
    assert all(value is None or math.isfinite(value) for value in rewards(ends, [], 2))


def test_the_rules():
    """Spread over a tolerance, a mean within bounds, or anything."""

    def holds(rule: Informative, *values: float) -> bool:
        return is_informative(usable_samples([used(i, value) for i, value in enumerate(values)], rule, "mask"), rule)

    assert holds(SPREAD, 0.0, 1.0)
    assert not holds(SPREAD, 0.5, 0.5 + 1e-9)
    assert holds(Informative(min_spread=0.0), 0.5, 0.5 + 1e-9)
    assert not holds(SPREAD)
    between = Informative(rule="mean_between", low=0.25, high=0.75)
    assert holds(between, 0.25, 0.25)
    assert holds(between, 0.0, 1.0)
    assert not holds(between, 0.0, 0.1)
    assert not holds(between)
    assert holds(Informative(rule="all"))


def test_the_reason_counts_the_causes():
    """The most frequent first; many kinds do not make it long."""
    ends = [lost(0), lost(1, stage="run", code="disk_full"), lost(2), used(3, 1.0)]
    ends.append(lost(4, OutcomeKind.TIMEOUT, stage="run"))
    assert causes(ends, SPREAD, "mask") == (
        "2 env_error: drop, 1 env_error (disk_full) in run: drop, 1 timeout in run: mask"
    )
    many = [lost(number, code=f"c{number}") for number in range(50)]
    assert causes(many, SPREAD, "mask").endswith("44 others")


@given(st.lists(REWARDS, min_size=1, max_size=12), st.lists(REWARDS, max_size=5))
def test_advantages_are_of_what_counts(values: list[float], others: list[float]):
    """By the formula, over the usable ones alone, in their places; equal rewards have none at all."""
    n = len(values) + len(others)
    ends = [used(2 * i if i < len(others) else i + len(others), value) for i, value in enumerate(values)]
    free = sorted(set(range(n)) - {end.sample_index for end in ends})
    ends += [used(i, value, verdict=Verdict.MASK) for i, value in zip(free, others, strict=False)]
    found = advantages(usable_samples(ends, SPREAD, "mask"), n)
    mean, std = statistics.mean(values), statistics.pstdev(values)
    for end in ends:
        value = found[end.sample_index]
        if end.verdict is Verdict.MASK:
            assert value is None
        else:
            assert value == pytest.approx(((end.reward or 0.0) - mean) / (std + 1e-6), abs=1e-6, rel=1e-6)


@given(REWARDS, st.integers(1, 50))
def test_equal_rewards_have_an_exact_mean(value: float, count: int):
    """No rounding makes a difference where there is none."""
    assert mean_of([value] * count) == value
    assert advantages(usable_samples([used(i, value) for i in range(count)], SPREAD, "mask"), count) == [0.0] * count
