"""Figures: quantiles, the histogram's quantile, and aims that can be missed."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorld.bench.crowd import lag_buckets
from prorld.bench.figures import AIMS, Aim, Figures, Plan, missed, quantile, quantile_of_buckets
from prorld.metrics import Metrics

PLAN = Plan(concurrent=200)


def figures(**changes):
    """Figures of a run in which every aim was reached."""
    names = {field.name: 0 for field in msgspec.structs.fields(Figures)}
    return msgspec.convert({**names, "concurrent_seen": 200, **changes}, Figures)


def test_good_figures_miss_nothing():
    """Nothing to say where every aim is reached."""
    assert missed(figures(), PLAN) == []


@pytest.mark.parametrize("aim", AIMS, ids=lambda aim: aim.figure)
def test_every_aim_can_be_missed(aim):
    """Above its bound each aim gives one line that names the figure, its value and the bound."""
    worse = msgspec.structs.replace(figures(), **{aim.figure: aim.bound + 1})
    (line,) = missed(worse, PLAN)
    assert line == f"{aim.figure} is {aim.bound + 1:.4g}, not {aim.how} {aim.bound:g}"


def test_a_crowd_that_never_came_together_is_a_miss():
    """Latency of a thousand rollouts says nothing about two thousand."""
    (line,) = missed(figures(concurrent_seen=199), PLAN)
    assert line.startswith("concurrent_seen is 199")


@pytest.mark.parametrize("how", ["under", "at most", "at least"])
def test_what_could_not_be_measured_holds_no_aim(how):
    """A figure that is no number is a miss, whichever way the aim points."""
    assert not Aim(figure="lag_p99_ms", bound=50, how=how).holds(math.nan)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1))
def test_a_quantile_is_a_sample_with_that_share_at_or_below_it(samples, share):
    """Nearest rank: it was seen, and it is the least that has so many at or below it."""
    found = quantile(samples, share)
    assert found in samples
    assert sum(sample <= found for sample in samples) >= share * len(samples) - 1e-9
    assert sum(sample < found for sample in samples) < share * len(samples)


def test_no_samples_have_no_quantile():
    """Nothing measured is not zero."""
    assert math.isnan(quantile([], 0.5))
    assert math.isnan(quantile_of_buckets({}, 0.5))
    assert math.isnan(quantile_of_buckets({0.1: 0.0, math.inf: 0.0}, 0.5))


@pytest.mark.parametrize(
    ("buckets", "share", "expected"),
    [
        ({0.1: 10, 0.2: 10, math.inf: 10}, 0.5, 0.05),
        ({0.1: 0, 0.2: 10, math.inf: 10}, 0.5, 0.15),
        ({0.1: 90, 0.2: 100, math.inf: 100}, 0.99, 0.19),
        ({0.1: 90, 0.2: 98, math.inf: 100}, 0.99, math.inf),
    ],
)
def test_the_quantile_of_a_histogram(buckets, share, expected):
    """On a straight line inside its bucket; beyond the last bound nobody knows how much."""
    assert quantile_of_buckets(buckets, share) == pytest.approx(expected)


def test_the_lag_is_read_from_the_page_of_metrics():
    """What the daemon's own histogram counts is what the bench finds on its page."""
    metrics = Metrics()
    for seconds in (0.0001, 0.02, 0.02, 7.0):
        metrics.loop_lagged(seconds)
    buckets = lag_buckets(metrics.page())
    assert buckets[0.01] == 1
    assert buckets[0.025] == 3
    assert buckets[math.inf] == 4
