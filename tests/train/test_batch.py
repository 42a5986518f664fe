"""What each token weighs, and which rows are refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorld.train.batch import strands_of
from prorld.train.errors import NothingToLearn, WrongRow
from prorld.train.shapes import LearnSettings
from tests.train.support import group, row, sample

TOKEN, SAMPLE = LearnSettings(loss="token"), LearnSettings(loss="sample")

# The responses' lengths of the rows of rollouts.
SHAPES = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=6)


def groups_of(shapes):
    """One group with a rollout of such rows each."""
    rows = [[row([7], [1] * size, branch=branch) for branch, size in enumerate(shape)] for shape in shapes]
    return [group(*(sample(1.0, *given, index=index) for index, given in enumerate(rows)))]


@given(SHAPES)
def test_all_tokens_weigh_the_same_by_token(shapes):
    """The token-level loss is a mean over all tokens of the step."""
    strands = strands_of(groups_of(shapes), TOKEN)[0]
    assert len({strand.weight for strand in strands}) == 1
    assert sum(strand.weight * len(strand.trained) for strand in strands) == pytest.approx(1)


@given(SHAPES)
def test_all_rollouts_weigh_the_same_by_sample(shapes):
    """A rollout that was forked into several rows has no more to say than one that was not."""
    strands = iter(strands_of(groups_of(shapes), SAMPLE)[0])
    for shape in shapes:
        mine = [next(strands) for _ in shape]
        assert sum(strand.weight * len(strand.trained) for strand in mine) == pytest.approx(1 / len(shapes))
        assert len({strand.weight for strand in mine}) == 1


@pytest.mark.parametrize("settings", [TOKEN, SAMPLE], ids=["token", "sample"])
def test_a_rollout_without_an_advantage_counts_and_is_not_computed(settings):
    """The mean is over all rollouts that were given, also those that pull in no direction."""
    both = [group(sample(1.0, row([7], [1, 2])), sample(0.0, row([7], [3, 4]), index=1))]
    made = strands_of(both, settings)
    assert [[strand.ids for strand in strands] for strands in made] == [[[7, 1, 2]]]
    assert made[0][0].weight == pytest.approx(1 / 4)


def test_only_sampled_tokens_are_trained():
    """What the environment said is context."""
    made = strands_of([group(sample(1.0, row([7], [1, 2, 3], [1, 0, 1], [-0.5, 0.0, -0.25])))], TOKEN)
    assert (made[0][0].trained, made[0][0].logprobs) == ([1, 3], [-0.5, -0.25])


@pytest.mark.parametrize(
    "given",
    [
        [],
        [group()],
        [group(sample(0.0, row([7], [1])))],
        [group(sample(1.0))],
        [group(sample(1.0, row([7], [1], [0])))],
    ],
    ids=["no group", "no sample", "no advantage", "no row", "nothing sampled"],
)
def test_a_step_with_nothing_to_learn_says_so(given):
    """Rather than dividing by zero, or moving on by momentum alone."""
    with pytest.raises(NothingToLearn):
        strands_of(given, TOKEN)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (row([], [1]), "nothing comes before"),
        (row([7], [1, 2], [1]), "differ in length"),
        (row([7], [1], logprobs=[math.nan]), "positive or no number"),
        (row([7], [1], logprobs=[-math.inf]), "positive or no number"),
        (row([7], [1], logprobs=[0.5]), "positive or no number"),
        (row([7], [1], temperature=0.0, logprobs_mode="processed"), "temperature 0.0"),
        (row([7], [1], temperature=0.7), "processed_logprobs"),
        (row([7], [1], logprobs_mode="none"), "are none"),
        (row([7], [1], logprobs_mode="mixed"), "are mixed"),
    ],
)
def test_rows_that_would_teach_something_else_are_refused(wrong, words):
    """By name, and with what to do where something can be done."""
    with pytest.raises(WrongRow, match=words) as caught:
        strands_of([group(sample(1.0, wrong))], TOKEN)
    assert "job, branch 0" in caught.value.message


def test_an_advantage_that_is_no_number_is_refused():
    """One of them would make all weights no numbers."""
    with pytest.raises(WrongRow, match="advantage of sample 3 is nan"):
        strands_of([group(sample(math.nan, row([7], [1]), index=3))], TOKEN)


def test_processed_logprobs_are_learnt_from_at_their_temperature():
    """The strand says at which."""
    given = row([7], [1], temperature=0.7, logprobs_mode="processed")
    assert strands_of([group(sample(1.0, given))], TOKEN)[0][0].temperature == 0.7
