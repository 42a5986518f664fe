"""A stream of prompts as reinforcement learning meets them: some hard and long, and none known before it is tried.

One token stands for a second of the setting, so what an engine sampled is what a rollout cost. Everything follows from
the seed, the number of the prompt and how often it was drawn: all strategies meet the same prompts and the same samples
of them, and one that draws a prompt again gets other samples, as it would of a real policy. Pure.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from prorld.bench.handler import BenchSample

__all__ = ["GroupPlan", "Mix", "Workload", "mix_of"]

# Seconds of a rollout of middling difficulty, and the longest there is.
MIDDLE_S = 60.0
LONGEST_S = 1800
# How far difficulty (a standard normal) reaches into duration, and what is left to chance.
BY_DIFFICULTY, BY_CHANCE = 0.7, 0.5
# The same for the chance of success, whose logit has this slope and this spread.
SLOPE, SPREAD = 1.2, 0.9
SOLVED_MIN, SOLVED_MAX = 0.001, 0.999


class GroupPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and the samples that are drawn of it."""

    number: int
    draw: int
    difficulty: float
    samples: tuple[BenchSample, ...]

    @property
    def is_informative(self) -> bool:
        """Whether some samples are solved and others are not."""
        return len({sample.reward for sample in self.samples}) > 1

    @property
    def tokens(self) -> int:
        """All of them together."""
        return sum(sample.tokens for sample in self.samples)

    @property
    def longest(self) -> int:
        """Its longest sample: how long the group takes where every sample has a place."""
        return max(sample.tokens for sample in self.samples)

    def instance(self, turns: int) -> dict[str, Any]:
        """What the handler of the bench is given."""
        return {
            "turns": turns,
            "samples": [{"tokens": sample.tokens, "reward": sample.reward} for sample in self.samples],
        }


class Workload:
    """The prompts by number."""

    def __init__(self, seed: int, group_size: int) -> None:
        self._seed = seed
        self._group_size = group_size

    def group(self, number: int, draw: int = 0) -> GroupPlan:
        """A prompt with the samples of its so-manieth draw."""
        prompt = random.Random(f"{self._seed}:{number}")  # noqa: S311 - no secret
        difficulty = prompt.gauss(0, 1)
        solved = 1 / (1 + math.exp(SLOPE * difficulty + SPREAD * prompt.gauss(0, 1)))
        solved = min(SOLVED_MAX, max(SOLVED_MIN, solved))
        chance = random.Random(f"{self._seed}:{number}:{draw}")  # noqa: S311 - no secret
        middle = math.log(MIDDLE_S) + BY_DIFFICULTY * difficulty
        samples = tuple(
            BenchSample(
                tokens=max(1, min(LONGEST_S, round(chance.lognormvariate(middle, BY_CHANCE)))),
                reward=1.0 if chance.random() < solved else 0.0,
            )
            for _ in range(self._group_size)
        )
        return GroupPlan(number=number, draw=draw, difficulty=difficulty, samples=samples)

    def first(self, count: int) -> list[GroupPlan]:
        """The beginning of the stream."""
        return [self.group(number) for number in range(count)]


class Mix(msgspec.Struct, frozen=True, kw_only=True):
    """What some groups are like: means over them."""

    groups: int
    longest: float
    difficulty: float
    tokens: int

    @classmethod
    def of(cls, groups: Sequence[GroupPlan]) -> Mix:
        """Not a number where there are none."""
        count = len(groups)
        return cls(
            groups=count,
            longest=sum(group.longest for group in groups) / count if count else math.nan,
            difficulty=sum(group.difficulty for group in groups) / count if count else math.nan,
            tokens=sum(group.tokens for group in groups),
        )


def mix_of(groups: Iterable[GroupPlan]) -> tuple[Mix, float]:
    """The informative ones of them, and which share of all tokens goes into the others."""
    there = list(groups)
    informative = Mix.of([group for group in there if group.is_informative])
    tokens = sum(group.tokens for group in there)
    return informative, 1 - informative.tokens / tokens if tokens else math.nan
