"""Why a run is over is decided from what is kept, and told with what may be done about it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from prorld.train.ends import advice, end_of
from prorld.train.progress import State
from prorld.train.records import StepRecord
from prorld.train.run_config import GroupSettings, RunSettings

SETTINGS = RunSettings(model="m", steps=3, stop_at=0.9, groups=GroupSettings(empty_max=2))


def step(reward: float | None, **more: Any) -> StepRecord:
    """A step as it was written down."""
    names = {field.name for field in msgspec.structs.fields(StepRecord) if field.required}
    return StepRecord(**{**dict.fromkeys(names, 0), "figures": None, "reward": reward, "step": 1, **more})


def state(**more: Any) -> State:
    return State(run_id="r", settings={}, base_version=1, **more)


@pytest.mark.parametrize(
    ("kept", "why"),
    [
        ({}, None),
        ({"step": 2, "record": step(0.5), "empty": 1}, None),
        ({"step": 3, "record": step(0.5)}, "complete"),
        ({"step": 1, "record": step(0.9)}, "reached"),
        ({"step": 3, "record": step(0.9)}, "reached"),
        ({"step": 2, "record": step(1.0), "empty": 2}, "nothing_to_learn"),
        ({"step": 2, "record": step(None), "empty": 2}, "nothing_to_learn"),
    ],
)
def test_the_end_follows_from_what_is_kept(kept, why):
    """So a life that is started after it comes to the same."""
    assert end_of(SETTINGS, state(**kept)) == why


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"steps": 4}, "complete"),
        ({"stop_at": None}, "reached"),
        ({"stop_at": 0.95}, "reached"),
        ({"groups": GroupSettings(empty_max=3)}, "nothing_to_learn"),
    ],
)
def test_what_is_advised_lets_it_go_on(more, words):
    """Each end has a setting that may be changed for the same run."""
    kept = {
        "complete": state(step=3, record=step(0.5)),
        "reached": state(step=1, record=step(0.9)),
        "nothing_to_learn": state(step=2, record=step(0.0), empty=2),
    }[words]
    assert end_of(SETTINGS, kept) == words
    assert end_of(msgspec.structs.replace(SETTINGS, **more), kept) is None


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (step(1.0, groups_seen=4, solved_all=4), "too easy"),
        (step(0.0, groups_seen=4, solved_none=4), "too hard"),
        (step(0.5, groups_seen=4, solved_none=2, solved_all=2), "middling difficulty"),
        (step(None), "no group came to its end"),
    ],
)
def test_nothing_to_learn_says_what_the_rewards_were(record, words):
    """And what to do, in the first life and in every other."""
    for over in (False, True):
        found = advice("nothing_to_learn", SETTINGS, state(empty=2, record=record), is_over_already=over)
        assert words in (found or "")
        assert "--empty-max" in (found or "")


def test_an_end_that_was_asked_for_needs_no_words():
    """Unless it was there before. One that was not is told how it goes on."""
    for why, words in (("complete", "larger --steps"), ("reached", "--stop-at 0.9")):
        assert advice(why, SETTINGS, state(), is_over_already=False) is None
        assert words in (advice(why, SETTINGS, state(), is_over_already=True) or "")
    for over in (False, True):
        assert "the same command goes on" in (advice("interrupted", SETTINGS, state(), is_over_already=over) or "")
