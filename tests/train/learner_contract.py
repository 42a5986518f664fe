"""What the loop relies on in a learner, whoever it is: the one without weights in its tests, and the real one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from prorld.train.errors import NothingToLearn
from prorld.train.shapes import Form, Learner, TrainGroup
from tests.train.support import group, row, sample

Open = Callable[[], Learner]


def groups(seed: int = 0) -> Sequence[TrainGroup]:
    """Two groups of two rollouts, one better than the other."""
    return [
        group(
            sample(1.0, row([3, 4 + seed, 5 + n], [6, 7, 8])), sample(-1.0, row([3, 4 + seed, 5 + n], [9, 10]), index=1)
        )
        for n in range(2)
    ]


def steps_are_counted(open_learner: Open) -> None:
    """From zero, one for each step, with figures of all sampled tokens."""
    learner = open_learner()
    assert learner.step_count == 0
    figures = learner.step(groups())
    assert (learner.step_count, figures.tokens_trained) == (1, 10)


def nothing_to_learn_is_no_step(open_learner: Open) -> None:
    """It says so, counts nothing, and goes on."""
    learner = open_learner()
    with pytest.raises(NothingToLearn):
        learner.step([group(sample(0.0, row([3, 4], [5])), sample(0.0, row([3, 4], [6]), index=1))])
    assert learner.step_count == 0
    learner.step(groups())
    assert learner.step_count == 1


def a_checkpoint_brings_all_of_it_back(open_learner: Open, place: Path, form: Form) -> None:
    """What another life hands over after the same further steps is the same, byte for byte."""
    one = open_learner()
    one.step(groups(0))
    one.save(place / "kept")
    one.step(groups(1))
    other = open_learner()
    other.load(place / "kept")
    assert other.step_count == 1
    other.step(groups(1))
    assert other.step_count == one.step_count == 2
    first, second = one.hand_over(place / "one", form), other.hand_over(place / "other", form)
    assert bytes_of(first) == bytes_of(second)


def a_hand_over_takes_the_place_of_the_last(open_learner: Open, place: Path, form: Form) -> None:
    """Below the directory that was named, as an absolute path, whole, and without what was there before."""
    learner = open_learner()
    path = learner.hand_over(place / "v1", form)
    assert path.is_absolute()
    assert path.is_relative_to(place / "v1")
    before = bytes_of(path)
    learner.step(groups())
    assert learner.hand_over(place / "v1", form) == path
    assert bytes_of(path).keys() == before.keys()
    assert bytes_of(path) != before
    assert [item.name for item in place.iterdir()] == ["v1"]


def bytes_of(path: Path) -> dict[str, bytes]:
    """The files of a directory, or the one file."""
    files = [path] if path.is_file() else [item for item in path.rglob("*") if item.is_file()]
    return {str(item.relative_to(path.parent)).partition("/")[2] or item.name: item.read_bytes() for item in files}
