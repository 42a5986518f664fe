"""What a batch tells of itself: before the filter, what was wasted, and whether speed decided."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from prorld.domain.batch import Settle
from prorld.domain.batch_stats import HISTOGRAM_REWARDS, OTHER_REWARDS, BatchStatistics
from prorld.domain.group import GroupEnd, SampleEnd
from prorld.domain.outcome import OutcomeKind
from tests.domain.batch_world import World, lost, rules, used

RULES = rules()


def settle(end: GroupEnd, *ends: SampleEnd, informative: bool | None = None, staleness: int | None = None) -> Settle:
    return Settle(group_id="g", index=0, end=end, ends=ends, informative=informative, staleness=staleness)


def test_rewards_are_those_before_the_filter():
    """Accepted and filtered groups count alike; a sample that does not count is in no mean."""
    seen = BatchStatistics()
    seen.settled(settle(GroupEnd.DONE, used(0, 1.0), used(1, 0.0), informative=True), RULES)
    seen.settled(settle(GroupEnd.FILTERED, used(0, 0.0), used(1, 0.0), informative=False), RULES)
    seen.settled(settle(GroupEnd.FILTERED, used(0, 1.0), used(1, 1.0), informative=False), RULES)
    masked = lost(2, OutcomeKind.TIMEOUT, reward=100.0)
    seen.settled(settle(GroupEnd.STALE, used(0, 1.0), used(1, 0.0), masked, informative=True), RULES)
    assert (seen.groups, seen.kept, seen.kept_fraction) == (4, 2, 0.5)
    assert seen.rewards.value == 0.5
    assert seen.histogram == {"1": 4, "0": 4}
    assert (seen.solved_none, seen.solved_all) == (1, 1)


def test_what_did_not_run_to_its_end_has_no_say_in_rewards():
    """A group that failed or was cancelled half way is waste and nothing else."""
    seen = BatchStatistics()
    seen.settled(settle(GroupEnd.FAILED, used(0, 1.0), lost(1)), RULES)
    seen.settled(settle(GroupEnd.CANCELLED, used(0, 1.0)), RULES)
    assert (seen.groups, seen.rewards.value, seen.kept_fraction) == (0, None, None)
    assert (seen.wasted_jobs, seen.wasted_tokens, seen.wasted_s) == (3, 20, 3.0)


def test_waste_is_what_no_trainer_gets():
    """Accepted and carried groups are none; samples that end after their group are; so is what nobody claims."""
    seen = BatchStatistics()
    seen.settled(settle(GroupEnd.DONE, used(0, 1.0), used(1, 0.0), informative=True), RULES)
    seen.settled(settle(GroupEnd.CARRIED, used(0, 1.0)), RULES)
    seen.sample_ended_late(GroupEnd.CARRIED, used(1, 1.0))
    seen.sample_ended_late(GroupEnd.DONE, lost(1, OutcomeKind.CANCELLED))
    assert (seen.wasted_jobs, seen.groups) == (0, 1)
    seen.sample_ended_late(GroupEnd.STALE, lost(1, OutcomeKind.CANCELLED, duration_s=2.0, sampled_tokens=5))
    seen.thrown_away(used(0, 1.0))
    assert (seen.wasted_jobs, seen.wasted_tokens, seen.wasted_s) == (2, 15, 3.0)


def test_bias_is_of_trained_against_all_informative():
    """Long groups that were informative and thrown away show; those that teach nothing do not matter to it."""
    seen = BatchStatistics()
    short: dict[str, Any] = {"duration_s": 10.0}
    long: dict[str, Any] = {"duration_s": 30.0}
    seen.settled(settle(GroupEnd.DONE, used(0, 1.0, **short), used(1, 0.0, **short), informative=True), RULES)
    assert seen.bias == 0.0
    seen.settled(settle(GroupEnd.CANCELLED, used(0, 1.0, **long), used(1, 0.0, **long), informative=True), RULES)
    seen.settled(settle(GroupEnd.FILTERED, used(0, 1.0, duration_s=900.0), informative=False), RULES)
    assert seen.bias == pytest.approx(-0.5)
    assert (seen.accepted_s.value, seen.informative_s.value, seen.all_s.value) == (10.0, 20.0, 980 / 5)


def test_the_histogram_is_bounded():
    """Rewards of any number of values take a bounded number of names, and none is lost."""
    seen = BatchStatistics()
    for number in range(200):
        seen.settled(settle(GroupEnd.FILTERED, used(0, number / 7), used(1, -0.0), informative=False), RULES)
    assert len(seen.histogram) == HISTOGRAM_REWARDS + 1
    assert seen.histogram[OTHER_REWARDS] > 0
    assert seen.histogram["0"] == 201
    assert sum(seen.histogram.values()) == 400


def test_it_goes_on_after_a_restart():
    """Written down in the middle and read again, it ends with the same figures."""
    whole, halves = BatchStatistics(), BatchStatistics()
    for number in range(10):
        one = settle(GroupEnd.DONE, used(0, 1.0), used(1, number / 10), informative=True, staleness=number % 3)
        whole.settled(one, RULES)
        halves.settled(one, RULES)
        halves = msgspec.msgpack.decode(msgspec.msgpack.encode(halves), type=BatchStatistics)
    assert halves == whole
    assert (whole.staleness.value, whole.staleness_max) == (0.9, 2)
    assert BatchStatistics().staleness_max is None


def test_the_books_decisions_are_enough_for_it():
    """What the book says of each group at its end is all that is needed."""
    world, seen = World(rules(target_groups=1, leftovers="cancel")), BatchStatistics()
    world.append(3)
    world.step()
    world.sample_ends("g1", used(0, 0.0))
    world.sample_ends("g0", used(0, 0.0))
    world.sample_ends("g0", used(1, 0.0))
    world.step()
    world.sample_ends("g1", used(1, 1.0, version=0))
    world.step()
    for decision in world.told:
        if isinstance(decision, Settle):
            seen.settled(decision, world.rules)
    assert (seen.groups, seen.kept, seen.solved_none, seen.wasted_jobs) == (2, 1, 1, 2)
    assert (seen.accepted_s.count, seen.staleness.value) == (2, 0.0)
