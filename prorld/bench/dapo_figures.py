"""What a strategy did, step by step, and the figures that follow from it. Pure: nothing here measures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta

from prorld.bench.dapo_workload import GroupPlan, Mix, mix_of
from prorld.bench.figures import Aim, Some
from prorld.bench.sample import MachineFigures, by_wall, missed_of

__all__ = [
    "AIMS",
    "OURS",
    "STRATEGIES",
    "DapoFigures",
    "DapoPlan",
    "StepDone",
    "StrategyRun",
    "Trained",
    "figures_of",
    "missed",
]

# Batch by batch; as completed, the rest aborted; the same, with the prompts of the aborted first in the next step; the
# service's batches; the same in the order of submission.
STRATEGIES = ("batches", "abort", "requeue", "carry", "submission")
OURS = "carry"
# A strategy's first steps are short-biased where long groups come later; as many are left out.
WARM_UP = {"batches": 1, "abort": 2, "requeue": 3, "carry": 7, "submission": 7}

# So many that the boundaries of the measured steps, which long groups cross, do not decide the bias.
STEPS = {"batches": 6, "abort": 13, "requeue": 12, "carry": 36, "submission": 24}


class DapoPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The setting, and how much is done. ``speed`` is how many seconds of the setting pass in one of the clock.

    ``training_s`` is of the setting: so long the engine stands still after each step, as where both share their GPUs.
    """

    speed: Annotated[float, Meta(gt=0, le=1000)] = 66.0
    seed: int = 0
    slots: Some = 128
    group_size: Annotated[int, Meta(ge=2, le=4096)] = 8
    target: Some = 32
    running: Some = 48
    turns: Some = 2
    training_s: float = 60.0
    steps: dict[str, int] = msgspec.field(default_factory=lambda: dict(STEPS))

    @classmethod
    def quick(cls) -> DapoPlan:
        """A look, and no proof: a small trainer, and a few steps."""
        steps = {"batches": 2, "abort": 3, "requeue": 4, "carry": 12, "submission": 10}
        return cls(slots=32, target=8, running=12, steps=steps)


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """A group that was trained on, and how many versions its oldest sampled token lay behind."""

    group: GroupPlan
    staleness: int


class StepDone(msgspec.Struct, frozen=True, kw_only=True):
    """One step: how long it took with its training, and what it was trained on."""

    seconds: float
    trained: list[Trained]


class StrategyRun(msgspec.Struct, frozen=True, kw_only=True):
    """All steps of a strategy.

    ``met`` are the groups that it started, each draw of a prompt one of its own. ``sampled`` is what the engine says it
    sampled, ``alive`` what of that is in groups that a next step would still get. ``open_s`` is how long the engine
    worked, and ``full`` the share of it in which every slot was taken. CPU and waits are shares of one processor.
    """

    steps: list[StepDone]
    met: list[GroupPlan]
    sampled: int
    alive: int
    open_s: float
    full: float
    cpu_share: float
    queued_share: float


_NAMES = (
    # Seconds of the clock a step, after warm-up; over ours.
    *("step_s", "ratio"),
    # Of the tokens that were sampled and are of no further use, or were trained on: those of no use.
    "wasted_share",
    # The longest sample of the trained groups and their difficulty, against those of all informative ones.
    *("duration_bias", "difficulty_bias"),
    *("staleness_mean", "staleness_max"),
    # Of the time that the engine worked: with every slot taken; tokens sampled, over what all slots could sample.
    *("full_share", "slot_use"),
    # The daemon: on a processor, and waiting for one.
    *("cpu_share", "queued_share"),
    *("steps", "groups"),
)


class _Base(MachineFigures, frozen=True, kw_only=True):
    """What is no strategy's own. ``uninformative_share`` is of the tokens of the stream; the scale is in ``speed``."""

    uninformative_share: float
    informative_groups: int
    speed: float
    slots: int
    target: int
    # How much more was wasted than the stream makes everybody waste.
    carry_excess_waste: float | None = None
    carry_abs_bias: float | None = None
    submission_abs_bias: float | None = None


DapoFigures = cast(
    "type[MachineFigures]",
    msgspec.defstruct("DapoFigures", by_wall(STRATEGIES, _NAMES), bases=(_Base,), frozen=True, kw_only=True),
)

# Above this the clock shows the processor and no strategy.
BUSY_MAX = 0.85
# Every slot was taken, and this share of what they could sample was sampled: the rest is the service's own time.
SLOT_USE_MIN = 0.85

AIMS: tuple[Aim, ...] = (
    Aim(figure="batches_ratio", bound=4.0, how="at least"),
    Aim(figure="requeue_ratio", bound=1.7, how="at least"),
    Aim(figure="abort_ratio", bound=1.15, how="at least"),
    Aim(figure="carry_excess_waste", bound=0.03, how="at most"),
    Aim(figure="carry_abs_bias", bound=0.03, how="at most"),
    Aim(figure="submission_abs_bias", bound=0.03, how="at most"),
    Aim(figure="carry_full_share", bound=0.95, how="at least"),
)


def figures_of(plan: DapoPlan, runs: Mapping[str, StrategyRun], stream: Sequence[GroupPlan]) -> dict[str, Any]:
    """The figures of the strategies that ran; ``stream`` is as much of the prompts as the longest of them met."""
    informative, uninformative = mix_of(stream)
    found: dict[str, Any] = {
        "uninformative_share": uninformative,
        "informative_groups": informative.groups,
        "speed": plan.speed,
        "slots": plan.slots,
        "target": plan.target,
    }
    for name, run in runs.items():
        found |= {f"{name}_{figure}": value for figure, value in _of(plan, name, run).items()}
    ours = found.get(f"{OURS}_step_s")
    for name in runs:
        found[f"{name}_ratio"] = found[f"{name}_step_s"] / ours if ours else None
    if OURS in runs:
        found["carry_excess_waste"] = found["carry_wasted_share"] - uninformative
    for name in ("carry", "submission"):
        if name in runs:
            found[f"{name}_abs_bias"] = abs(found[f"{name}_duration_bias"])
    return found


def _of(plan: DapoPlan, name: str, run: StrategyRun) -> dict[str, float]:
    counted = run.steps[min(WARM_UP[name], len(run.steps) - 1) :]
    trained = [one for step in counted for one in step.trained]
    mix = Mix.of([one.group for one in trained])
    there = _against(run, len(run.steps) - len(counted))
    useful = sum(one.group.tokens for step in run.steps for one in step.trained)
    over = run.sampled - run.alive
    return {
        "step_s": sum(step.seconds for step in counted) / len(counted),
        "wasted_share": (over - useful) / over if over else math.nan,
        "duration_bias": mix.longest / there.longest - 1,
        "difficulty_bias": mix.difficulty - there.difficulty,
        "staleness_mean": sum(one.staleness for one in trained) / len(trained),
        "staleness_max": max(one.staleness for one in trained),
        "full_share": run.full,
        "slot_use": run.sampled / (plan.slots * run.open_s * plan.speed),
        "cpu_share": run.cpu_share,
        "queued_share": run.queued_share,
        "steps": len(counted),
        "groups": len(trained),
    }


def _against(run: StrategyRun, warm: int) -> Mix:
    """The informative groups that a strategy met since its warm-up: the first draw of each prompt, used or not.

    As many as it trained on before are taken from the front: those are the groups of the warm-up.
    """
    informative = [group for group in run.met if group.is_informative and not group.draw]
    before = sum(len(step.trained) for step in run.steps[:warm])
    return Mix.of(informative[before:] or informative)


def missed(figures: MachineFigures) -> list[str]:
    """One line per aim that the figures miss; where the processor was the limit, that alone, for no aim is then known.

    What could not be measured misses its aim.
    """
    for name in STRATEGIES:
        busy = [getattr(figures, f"{name}_{share}") for share in ("cpu_share", "queued_share")]
        if None not in busy and sum(busy) > BUSY_MAX:
            line = f"{name}: the daemon used or waited for {sum(busy):.0%} of a processor, so nothing is known"
            return [f"{line}: try again on a machine with less to do, or with a lower --speed"]
    full, use = getattr(figures, f"{OURS}_full_share"), getattr(figures, f"{OURS}_slot_use")
    if full is not None and use is not None and use < full * SLOT_USE_MIN:
        return [f"{OURS}: slots were taken {full:.0%} of the time and sampled {use:.0%} of it: try a lower --speed"]
    return missed_of(figures, AIMS)
