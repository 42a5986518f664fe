"""Why a run is over, and what may be done about it: decided from what is kept, so every later life says the same."""

from __future__ import annotations

from prorld.train.progress import State
from prorld.train.records import StepRecord
from prorld.train.run_config import RunSettings

__all__ = ["COMPLETE", "INTERRUPTED", "NOTHING", "REACHED", "advice", "end_of"]

COMPLETE, REACHED, NOTHING, INTERRUPTED = "complete", "reached", "nothing_to_learn", "interrupted"


def end_of(settings: RunSettings, state: State) -> str | None:
    """Why there is no next step; none where there is one."""
    if state.empty >= settings.groups.empty_max:
        return NOTHING
    reward = None if state.record is None else state.record.reward
    if settings.stop_at is not None and reward is not None and reward >= settings.stop_at:
        return REACHED
    return COMPLETE if state.step >= settings.steps else None


def advice(why: str, settings: RunSettings, state: State, *, is_over_already: bool) -> str | None:
    """What somebody should know of this end; none where it is as it was asked for."""
    if why == NOTHING:
        cure = "a larger --empty-max goes on with the next prompts, and another --out begins a new run"
        return f"{_taught_nothing(settings, state)}; {cure}"
    if why == INTERRUPTED:
        return f"ended by a signal with {state.step} of {settings.steps} steps made; the same command goes on"
    if not is_over_already:
        return None
    if why == REACHED:
        words = f"the run was over: a step has reached --stop-at {settings.stop_at:g}"
        return f"{words}; with a higher one, or none, it goes on"
    return f"the run was over: its {settings.steps} steps were made; with a larger --steps it goes on"


def _taught_nothing(settings: RunSettings, state: State) -> str:
    """What the rewards say about the tasks."""
    record = state.record
    if record is None or not record.groups_seen:
        return f"step {state.step} had nothing to learn from, since no group came to its end: `prorld jobs` says why"
    mean = "-" if record.reward is None else f"{record.reward:.3f}"
    return (
        f"step {record.step} had nothing to learn from: in each of {record.groups_seen} groups all rewards were equal "
        f"(solved in {record.solved_all}, not in {record.solved_none}, mean {mean}). {_why_equal(settings, record)}"
    )


def _why_equal(settings: RunSettings, record: StepRecord) -> str:
    if record.solved_all == record.groups_seen:
        return "The tasks are too easy, or are learnt: take harder ones"
    if record.solved_none == record.groups_seen:
        return (
            f"The tasks are too hard, or no answer is found in what the model says within --max-tokens "
            f"{settings.sampling.max_tokens}: look at rollouts by `prorld export`, take easier tasks, or a better model"
        )
    return (
        f"The {settings.groups.samples} rollouts of a group do not differ: take tasks of middling difficulty, a larger "
        "--samples or a higher --temperature"
    )
