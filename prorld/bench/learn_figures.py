"""What runs of learning came to. Pure: nothing here measures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec

from prorld.bench.figures import Aim, Some, lines_of
from prorld.bench.sample import MachineFigures, by_wall

__all__ = [
    "AIMS",
    "MODES",
    "LearnFigures",
    "LearnPlan",
    "ModeFigures",
    "ModeRun",
    "SeedRun",
    "figures_of",
    "missed",
    "mode_figures_of",
    "run_of",
]

MODES = ("sync", "async")
GOAL = 0.9


class LearnPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The setting of ``prorld learn-demo``. With ``keep`` the runs stay in that directory, and go on in it."""

    seeds: tuple[int, ...] = (0, 1)
    engine: str = "vllm"
    python: str | None = None
    model: str | None = None
    steps: Some = 20
    groups: Some = 8
    samples: Some = 8
    held_out: Some = 48
    keep: str | None = None

    @classmethod
    def quick(cls) -> LearnPlan:
        """A look at the path, and no proof."""
        return cls(seeds=(0,), steps=2, groups=2, samples=4, held_out=4)


class SeedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run: a value for each step, and what was held out before and after, at temperature 1 and greedily."""

    seed: int
    rewards: list[float]
    gaps: list[float]
    cpu_shares: list[float]
    cpu_s: float
    wall_s: float
    staleness: list[float]
    staleness_max: int
    tokens: int
    parts: dict[str, float]
    held_out: dict[float, list[float]]


class ModeRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run in one of the modes."""

    mode: str
    run: SeedRun


class LearnFigures(MachineFigures, frozen=True, kw_only=True):
    """The worst of all seeds, each."""

    seeds: int
    reward_first_max: float | None
    steps_to_goal_max: float | None
    reward_best_min: float | None
    reward_last_min: float | None
    held_out_before_max: float | None
    held_out_after_min: float | None
    held_out_gain_min: float | None
    held_out_greedy_after_min: float | None
    gap_max: float | None
    daemon_cpu_share: float | None
    daemon_cpu_share_step_max: float | None
    rollout_share: float | None
    train_share: float | None
    checkpoint_share: float | None
    hand_over_share: float | None
    tokens_per_s: float | None
    step_s: float | None


_MODE = ("steps_per_hour", "staleness_mean", "staleness_max", "reward_last", "held_out_after", "gap_max")
# With fields of every mode, which no type checker can follow.
ModeFigures = cast(
    "type[MachineFigures]",
    msgspec.defstruct(
        "ModeFigures",
        [*by_wall(MODES, _MODE), ("speed_up", float | None, None)],
        bases=(MachineFigures,),
        frozen=True,
        kw_only=True,
    ),
)

AIMS: tuple[Aim, ...] = (
    Aim(figure="reward_first_max", bound=0.45),
    Aim(figure="reward_best_min", bound=GOAL, how="at least"),
    Aim(figure="steps_to_goal_max", bound=20, how="at most"),
    Aim(figure="held_out_gain_min", bound=0.4, how="at least"),
    Aim(figure="gap_max", bound=0.05),
    Aim(figure="daemon_cpu_share", bound=0.03),
)


def run_of(seed: int, lines: Iterable[Mapping[str, Any]]) -> SeedRun:
    """From the lines of a run's ``metrics.jsonl``."""
    found = [*lines]
    steps = [line for line in found if line["event"] == "step"]
    held: dict[float, list[float]] = {}
    for line in found:
        if line["event"] == "eval" and line["reward"] is not None:
            held.setdefault(line["temperature"], []).append(line["reward"])
    trained = [step["figures"] for step in steps if step["figures"] is not None]
    known = [step for step in steps if step["daemon_cpu_s"] is not None]
    parts: dict[str, float] = {
        "rollout": sum(step["rollout_s"] for step in steps),
        "train": sum(step["train_s"] for step in steps),
        "checkpoint": sum(step["checkpoint_s"] for step in steps),
        "hand_over": sum(step["hand_over_s"] + step["update_s"] for step in steps),
    }
    return SeedRun(
        seed=seed,
        rewards=[step["reward"] for step in steps if step["reward"] is not None],
        gaps=[figures["gap"] for figures in trained],
        cpu_shares=[step["daemon_cpu_s"] / step["wall_s"] for step in known],
        cpu_s=sum(step["daemon_cpu_s"] for step in known),
        wall_s=sum(step["wall_s"] for step in steps),
        staleness=[step["staleness"] for step in steps],
        staleness_max=max((step["staleness_max"] for step in steps), default=0),
        tokens=sum(step["tokens_sampled"] for step in steps),
        parts=parts,
        held_out=held,
    )


def figures_of(runs: Sequence[SeedRun]) -> dict[str, Any]:
    """The fields of ``LearnFigures`` that are of the runs."""
    wall = sum(run.wall_s for run in runs)
    hot = [run.held_out.get(1.0, []) for run in runs]
    greedy = [run.held_out.get(0.0, []) for run in runs]
    reached = [_steps_to(run.rewards) for run in runs]
    shares = {f"{name}_share": _over(sum(run.parts[name] for run in runs), wall) for name in runs[0].parts}
    return {
        "seeds": len(runs),
        "reward_first_max": _worst(max, [run.rewards[:1] for run in runs]),
        "steps_to_goal_max": None if None in reached else float(max(step for step in reached if step is not None)),
        "reward_best_min": _worst(min, [[max(run.rewards)] if run.rewards else [] for run in runs]),
        "reward_last_min": _worst(min, [run.rewards[-1:] for run in runs]),
        "held_out_before_max": _worst(max, [values[:1] for values in hot]),
        "held_out_after_min": _worst(min, [values[1:][-1:] for values in hot]),
        "held_out_gain_min": _worst(min, [[values[-1] - values[0]] if len(values) > 1 else [] for values in hot]),
        "held_out_greedy_after_min": _worst(min, [values[1:][-1:] for values in greedy]),
        "gap_max": _worst(max, [run.gaps for run in runs]),
        "daemon_cpu_share": _worst(max, [[run.cpu_s / run.wall_s] if run.cpu_shares else [] for run in runs]),
        "daemon_cpu_share_step_max": _worst(max, [run.cpu_shares for run in runs]),
        "tokens_per_s": _over(float(sum(run.tokens for run in runs)), shares_s(runs)),
        "step_s": _over(wall, float(sum(len(run.staleness) for run in runs))),
        **shares,
    }


def shares_s(runs: Sequence[SeedRun]) -> float:
    """Seconds in which rollouts were waited for."""
    return sum(run.parts["rollout"] for run in runs)


def mode_figures_of(runs: Sequence[ModeRun]) -> dict[str, Any]:
    """The fields of ``ModeFigures`` that are of the runs: means over the seeds, of gaps and staleness the worst."""
    found: dict[str, Any] = {}
    for mode in MODES:
        mine = [item.run for item in runs if item.mode == mode]
        steps = float(sum(len(run.staleness) for run in mine))
        values = {
            "steps_per_hour": _over(3600 * steps, sum(run.wall_s for run in mine)),
            "staleness_mean": _over(sum(sum(run.staleness) for run in mine), steps),
            "staleness_max": float(max((run.staleness_max for run in mine), default=0)),
            "reward_last": _over(sum(run.rewards[-1] for run in mine if run.rewards), float(len(mine))),
            "held_out_after": _over(sum(run.held_out.get(1.0, [0.0])[-1] for run in mine), float(len(mine))),
            "gap_max": _worst(max, [run.gaps for run in mine]),
        }
        found |= {f"{mode}_{name}": value for name, value in values.items()}
    found["speed_up"] = _over(found["async_steps_per_hour"] or 0.0, found["sync_steps_per_hour"] or 0.0)
    return found


def missed(figures: LearnFigures) -> list[str]:
    """A line for each aim that is missed."""
    return lines_of(figures, AIMS)


def _steps_to(rewards: Sequence[float]) -> int | None:
    return next((number for number, reward in enumerate(rewards, 1) if reward >= GOAL), None)


def _worst(of: Any, values: Sequence[Sequence[float]]) -> float | None:
    """Nothing where a seed has no value, or one that is no number: what was not measured is no success."""
    found = [value for some in values for value in some]
    if not all(values) or not all(map(math.isfinite, found)):
        return None
    return float(of(found))


def _over(value: float, under: float) -> float | None:
    return value / under if under else None
