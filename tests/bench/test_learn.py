"""What runs of learning came to, from their lines."""

from __future__ import annotations

import math

import msgspec
import pytest

from prorld.bench.learn_figures import (
    AIMS,
    LearnFigures,
    LearnPlan,
    ModeFigures,
    ModeRun,
    figures_of,
    missed,
    mode_figures_of,
    run_of,
)

MACHINE = {"notes": [], "warden_deaths": 0, "cores": 2, "load_1m_before": 0.0, "load_1m_after": 0.0, "seconds": 1.0}


def lines(rewards, *, gap=0.01, cpu_s=0.1, held=(0.2, 0.95)):
    """A run's lines: ten seconds a step."""
    yield {"event": "start"}
    for number, temperature in ((0, 0.0), (0, 1.0)):
        yield {"event": "eval", "step": number, "temperature": temperature, "reward": held[0]}
    for number, reward in enumerate(rewards, 1):
        yield {
            "event": "step", "step": number, "reward": reward, "figures": {"gap": gap}, "daemon_cpu_s": cpu_s,
            "wall_s": 10.0, "rollout_s": 6.0, "train_s": 3.0, "checkpoint_s": 0.5, "hand_over_s": 0.25,
            "update_s": 0.25, "staleness": 0.5, "staleness_max": 1, "tokens_sampled": 60,
        }  # fmt: skip
    for temperature in (0.0, 1.0) if len(held) > 1 else ():
        yield {"event": "eval", "step": len(rewards), "temperature": temperature, "reward": held[1]}
    yield {"event": "end"}


def figures(*runs):
    return msgspec.convert({**figures_of(runs), **MACHINE}, LearnFigures)


def test_a_run_that_learns_meets_every_aim():
    """And its figures are the worst of the seeds."""
    found = figures(
        run_of(0, lines([0.2, 0.6, 0.95])), run_of(1, lines([0.25, 0.92, 0.97], gap=0.03, held=(0.25, 0.9)))
    )
    assert missed(found) == []
    assert (found.steps_to_goal_max, found.reward_first_max, found.reward_best_min) == (3.0, 0.25, 0.95)
    assert (found.gap_max, found.daemon_cpu_share) == (0.03, pytest.approx(0.01))
    assert (found.rollout_share, found.step_s, found.tokens_per_s) == (pytest.approx(0.6), 10.0, pytest.approx(10.0))
    assert found.held_out_gain_min == pytest.approx(0.65)


@pytest.mark.parametrize(
    ("more", "figure"),
    [
        ({"rewards": [0.2, 0.3]}, "reward_best_min"),
        ({"rewards": [0.2, 0.3]}, "steps_to_goal_max"),
        ({"rewards": [0.2] * 20 + [0.95]}, "steps_to_goal_max"),
        ({"rewards": [0.7, 0.95]}, "reward_first_max"),
        ({"gap": 0.2}, "gap_max"),
        ({"gap": math.nan}, "gap_max"),
        ({"cpu_s": 0.4}, "daemon_cpu_share"),
        ({"cpu_s": None}, "daemon_cpu_share"),
        ({"held": (0.2, 0.5)}, "held_out_gain_min"),
        ({"held": (0.2,)}, "held_out_gain_min"),
        ({"rewards": []}, "reward_first_max"),
    ],
)
def test_each_aim_can_be_missed(more, figure):
    """By one seed of two; what was not measured is a miss."""
    good = run_of(0, lines([0.2, 0.95]))
    found = figures(good, run_of(1, lines(**{"rewards": [0.2, 0.95], **more})))
    assert figure in {line.split()[0] for line in missed(found)}
    assert figure in {aim.figure for aim in AIMS}


def test_modes_stand_side_by_side():
    """Steps an hour over all seeds."""
    fast = [{**line, "wall_s": 5.0} if line["event"] == "step" else line for line in lines([0.2, 0.8])]
    runs = [ModeRun(mode="sync", run=run_of(0, lines([0.2, 0.9]))), ModeRun(mode="async", run=run_of(0, fast))]
    found = msgspec.convert({**mode_figures_of(runs), **MACHINE}, ModeFigures)
    shown = msgspec.structs.asdict(found)
    assert (shown["sync_steps_per_hour"], shown["async_steps_per_hour"], shown["speed_up"]) == (360.0, 720.0, 2.0)
    assert (shown["sync_reward_last"], shown["async_reward_last"], shown["async_staleness_max"]) == (0.9, 0.8, 1.0)


def test_a_look_is_smaller():
    """And is the same otherwise."""
    assert LearnPlan.quick().steps < LearnPlan().steps
