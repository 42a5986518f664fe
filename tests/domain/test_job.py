"""Jobs: the legal ways between states, and seeds that differ where they must."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorld.domain.job import JobSpec, JobState, Sampling, StageTimeouts, Timing, advance, effective_seed
from prorld.domain.outcome import STAGES, Stage


@given(st.lists(st.sampled_from(JobState), max_size=20))
def test_nothing_leaves_done_and_nothing_skips_a_stage(wishes: list[JobState]) -> None:
    """A walk over any wishes only takes legal steps, and a refused one changes nothing."""
    state = JobState.QUEUED
    for wish in wishes:
        try:
            after = advance(state, wish)
        except AssertionError:
            continue
        assert state is not JobState.DONE
        if after is JobState.RUNNING:
            assert state is JobState.INITIALISING
        if after is JobState.EVALUATING:
            assert state is JobState.RUNNING
        state = after


def test_every_state_can_end() -> None:
    """Whatever a job is doing, it can be done."""
    for state in JobState:
        if state is not JobState.DONE:
            assert advance(state, JobState.DONE) is JobState.DONE


def spec(**changes: object) -> JobSpec:
    """A job with a seed."""
    base = JobSpec(job_id="j", tenant="t", handler="h", instance={}, sampling=Sampling(seed=7))
    return msgspec.structs.replace(base, **changes)


def test_samples_of_a_group_differ_and_repeat() -> None:
    """The effective seed depends on group, sample, attempt and call, and on nothing that changes between runs."""
    base = effective_seed(spec(group_id="g"), 1, 0)
    assert base == effective_seed(spec(group_id="g", job_id="another"), 1, 0)
    others = {
        effective_seed(spec(group_id="g", sample_index=1), 1, 0),
        effective_seed(spec(group_id="h"), 1, 0),
        effective_seed(spec(group_id="g"), 2, 0),
        effective_seed(spec(group_id="g"), 1, 1),
    }
    assert len(others | {base}) == 5
    assert effective_seed(spec(sampling=Sampling()), 1, 0) is None


def test_timeouts_and_timing_speak_of_the_same_stages() -> None:
    """Each stage has its budget and its two clocks."""
    timeouts = StageTimeouts(init_s=1, run_s=2, eval_s=3)
    assert [timeouts.of(stage) for stage in STAGES] == [1, 2, 3]


@pytest.mark.parametrize("stage", STAGES)
def test_timing_adds_up_per_stage(stage: Stage) -> None:
    """Seconds go to the stage they were spent in, over all attempts."""
    timing = Timing()
    timing.queued(stage, 1.5)
    timing.queued(stage, 1.0)
    timing.ran(stage, 2.0)
    told = msgspec.to_builtins(timing)
    assert (told.pop(f"queue_{stage}_s"), told.pop(f"{stage}_s")) == (2.5, 2.0)
    assert set(told.values()) == {0.0}
