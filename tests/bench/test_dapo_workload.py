"""The stream of prompts: what follows from the seed, and that it is the setting that it says it is."""

from __future__ import annotations

import statistics

import pytest

from prorld.bench.dapo_workload import GroupPlan, Mix, Workload, mix_of
from prorld.bench.handler import BenchSample


def group(number: int, *samples: tuple[int, float], draw: int = 0) -> GroupPlan:
    """A group of these samples."""
    made = tuple(BenchSample(tokens=tokens, reward=reward) for tokens, reward in samples)
    return GroupPlan(number=number, draw=draw, difficulty=float(number), samples=made)


def test_the_same_seed_gives_the_same_prompts():
    """Everything about a group follows from seed, number and draw."""
    first, second = Workload(3, 8), Workload(3, 8)
    assert [first.group(number) for number in range(20)] == [second.group(number) for number in range(20)]
    assert first.group(1) != Workload(4, 8).group(1)


def test_a_prompt_that_is_drawn_again_has_other_samples_of_the_same_difficulty():
    """As a real policy would sample anew."""
    workload = Workload(0, 8)
    once, again = workload.group(7), workload.group(7, draw=1)
    assert once.difficulty == again.difficulty
    assert once.samples != again.samples


def test_hard_prompts_take_longer_and_are_solved_less():
    """The correlation that makes a choice by speed a choice by difficulty."""
    groups = Workload(0, 8).first(2000)
    hard = [one for one in groups if one.difficulty > 1]
    easy = [one for one in groups if one.difficulty < -1]
    assert statistics.mean(one.longest for one in hard) > 3 * statistics.mean(one.longest for one in easy)
    solved = [statistics.mean(sample.reward for one in some for sample in one.samples) for some in (hard, easy)]
    assert solved[0] < 0.4 < 0.6 < solved[1]


def test_about_a_fifth_of_the_work_is_in_groups_of_no_use():
    """Nobody can know before which those are."""
    informative, wasted = mix_of(Workload(0, 8).first(4000))
    assert 0.19 < wasted < 0.24
    assert informative.groups < 4000


def test_a_mix_is_of_the_informative_groups():
    """Means over them, and which share of all tokens is in the others."""
    groups = [group(0, (10, 0.0), (30, 1.0)), group(1, (100, 1.0), (100, 1.0)), group(2, (5, 1.0), (55, 0.0))]
    mix, wasted = mix_of(groups)
    assert mix == Mix(groups=2, longest=42.5, difficulty=1.0, tokens=100)
    assert wasted == pytest.approx(200 / 300)
