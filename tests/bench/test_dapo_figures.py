"""Figures of the bench of batches from what the strategies did, and when it has to say that nothing is known."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from prorld.bench.dapo_figures import (
    OURS,
    STRATEGIES,
    DapoFigures,
    DapoPlan,
    StepDone,
    StrategyRun,
    Trained,
    figures_of,
    missed,
)
from prorld.bench.dapo_workload import GroupPlan, Workload
from prorld.bench.sample import Machine, MachineFigures

STREAM = Workload(0, 4).first(400)
GOOD = [group for group in STREAM if group.is_informative]


def strategy(seconds: float, *, trained: list[GroupPlan] | None = None, wasted: int = 0, **more: Any) -> StrategyRun:
    """Ten steps of ten groups, so many seconds each."""
    groups = GOOD[:100] if trained is None else trained
    steps = [
        StepDone(
            seconds=seconds,
            trained=[Trained(group=group, staleness=at % 3) for group in groups[at * 10 : at * 10 + 10]],
        )
        for at in range(10)
    ]
    useful = sum(group.tokens for group in groups)
    fields: dict[str, Any] = {
        "steps": steps, "met": STREAM[:200], "sampled": useful + wasted, "alive": 0, "open_s": useful / 128 / 75,
        "full": 0.99, "cpu_share": 0.3, "queued_share": 0.1,
    }  # fmt: skip
    return StrategyRun(**{**fields, **more})


def figures(**runs: StrategyRun) -> MachineFigures:
    """Of these strategies, on this machine."""
    found = figures_of(DapoPlan(), runs, STREAM)
    return msgspec.convert({**found, **Machine().figures([], 0)}, DapoFigures)


def value(found: MachineFigures, name: str) -> float:
    """One of them."""
    return float(getattr(found, name))


def test_a_ratio_is_over_ours():
    """And the steps of the warm-up are not counted."""
    slow = strategy(8.0)
    slow = msgspec.structs.replace(slow, steps=[StepDone(seconds=99.0, trained=slow.steps[0].trained), *slow.steps[1:]])
    found = figures(batches=slow, carry=strategy(2.0))
    assert (value(found, "batches_ratio"), value(found, "carry_ratio")) == (4.0, 1.0)
    assert value(found, "batches_steps") == 9
    assert msgspec.structs.asdict(found)["abort_ratio"] is None


def test_waste_is_what_nobody_trains_on():
    """What a next step will get is none."""
    useful = sum(group.tokens for group in GOOD[:100])
    found = figures(carry=strategy(1.0, wasted=useful), abort=strategy(1.0, wasted=useful, alive=useful))
    assert value(found, "carry_wasted_share") == pytest.approx(0.5)
    assert value(found, "abort_wasted_share") == pytest.approx(0.0)
    assert value(found, "carry_excess_waste") == pytest.approx(0.5 - value(found, "uninformative_share"))


def test_a_choice_of_the_short_ones_is_a_bias():
    """Against all informative groups that the strategy met."""
    quick = {group.number for group in sorted(GOOD[:160], key=lambda group: group.longest)[:100]}
    short = [group for group in GOOD if group.number in quick]
    biased, fair = figures(carry=strategy(1.0, trained=short)), figures(carry=strategy(1.0))
    assert value(biased, "carry_duration_bias") < -0.2
    assert value(biased, "carry_difficulty_bias") < -0.1
    assert abs(value(fair, "carry_duration_bias")) < abs(value(biased, "carry_duration_bias"))
    assert value(fair, "carry_staleness_max") == 2


def test_another_draw_of_a_prompt_is_not_another_prompt():
    """What a prompt was drawn again for does not count twice in what there is."""
    again = [msgspec.structs.replace(group, draw=1) for group in STREAM[:200]]
    once, twice = figures(requeue=strategy(1.0)), figures(requeue=strategy(1.0, met=[*STREAM[:200], *again]))
    assert value(once, "requeue_duration_bias") == value(twice, "requeue_duration_bias")


def all_good(**more: Any) -> dict[str, StrategyRun]:
    """Every aim is met."""
    seconds = {"batches": 5.0, "abort": 1.3, "requeue": 2.0, "carry": 1.0, "submission": 1.1}
    unbiased = GOOD[: len([group for group in STREAM[:200] if group.is_informative])]
    waste = round(0.2 / 0.8 * sum(group.tokens for group in GOOD[:100]))
    made = {name: strategy(seconds[name], wasted=waste, met=unbiased[:100]) for name in STRATEGIES}
    return {**made, **more}


def test_a_bench_that_met_its_aims_says_nothing_and_one_that_did_not_names_them():
    """By line."""
    lines = missed(figures(**all_good()))
    assert [line for line in lines if "bias" not in line] == []
    lines = missed(figures(**all_good(batches=strategy(3.9), requeue=strategy(1.6), abort=strategy(1.1))))
    assert [line.split()[0] for line in lines if "ratio" in line] == ["batches_ratio", "requeue_ratio", "abort_ratio"]
    lines = missed(figures(**all_good(carry=strategy(1.0, wasted=10**7, full=0.9))))
    assert {"carry_excess_waste", "carry_full_share"} <= {line.split()[0] for line in lines}


@pytest.mark.parametrize(("cpu_share", "queued_share"), [(0.9, 0.0), (0.3, 0.6)])
def test_where_the_processor_was_the_limit_nothing_is_known(cpu_share: float, queued_share: float):
    """One line, and no aim."""
    [line] = missed(figures(**all_good(requeue=strategy(2.0, cpu_share=cpu_share, queued_share=queued_share))))
    assert line.startswith("requeue: the daemon used or waited for")


def test_slots_that_are_taken_and_do_not_sample_are_the_services_own_time():
    """Then the clock shows the service and no strategy."""
    useful = sum(group.tokens for group in GOOD[:100])
    idle = strategy(1.0, open_s=2 * useful / 128 / 75)
    [line] = missed(figures(**all_good(**{OURS: idle})))
    assert line.startswith("carry: slots were taken")


def test_what_was_not_run_misses_its_aim():
    """Nobody takes a part for the whole."""
    lines = missed(figures(carry=strategy(1.0)))
    assert any(line.startswith("batches_ratio is not measured") for line in lines)
