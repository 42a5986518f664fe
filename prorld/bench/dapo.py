"""Five ways to collect the groups that training can learn from, one after the other, each with a daemon of its own.

The engine is scripted and takes its time; the daemon, HTTP and every job are real.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec
import trio

from prorld.bench.dapo_figures import STRATEGIES, DapoFigures, DapoPlan, StrategyRun, figures_of
from prorld.bench.dapo_strategies import Collector, collector_of, run_steps
from prorld.bench.dapo_trainer import Engine, Trainer
from prorld.bench.dapo_workload import Workload
from prorld.bench.processes import Daemon, run_daemon
from prorld.bench.sample import Machine, MachineFigures
from prorld.testing.scripted_engine.script import Latency, Script
from prorld.testing.scripted_engine.serve import Serving, run_scripted_engine

__all__ = ["run_dapo"]

BENCH_S_MAX = 3600.0
STEP_S_MAX = 300.0


async def run_dapo(plan: DapoPlan, tell: Callable[[str], None]) -> MachineFigures:
    """Run every strategy that the plan has steps for. ``tell`` hears what is being done."""
    machine = Machine()
    workload = Workload(plan.seed, plan.group_size)
    runs: dict[str, StrategyRun] = {}
    with trio.fail_after(BENCH_S_MAX):
        await trio.lowlevel.checkpoint()
        for name in STRATEGIES:
            if name in plan.steps:
                tell(f"{name}: {plan.steps[name]} steps, {plan.speed:g} seconds of the setting in one of the clock")
                runs[name] = await _run_one(name, plan, workload, tell)
    stream = workload.first(max(1 + max(group.number for group in run.met) for run in runs.values()))
    notes = [f"{name}: left out" for name in STRATEGIES if name not in runs]
    found = {**figures_of(plan, runs, stream), **machine.figures(notes, warden_deaths=0)}
    return msgspec.convert(found, DapoFigures)


async def _run_one(name: str, plan: DapoPlan, workload: Workload, tell: Callable[[str], None]) -> StrategyRun:
    places = plan.group_size * plan.running * 4
    script = Script(pick="asked", max_model_len=1 << 20, latency=Latency(decode_token_s=1 / plan.speed))
    with tempfile.TemporaryDirectory(prefix="prorld-bench-") as place:
        async with trio.open_nursery() as nursery:
            serving: Serving = await nursery.start(run_scripted_engine, script, name="scripted engine")
            start = partial(
                run_daemon, Path(place), serving.url, places=places, connections=places + 1000, running=plan.slots
            )
            daemon: Daemon = await nursery.start(start, name="daemon")
            with closing(Trainer(daemon, plan)) as trainer, closing(Engine(serving.url, serving.pid)) as engine:
                run = await _measure(name, trainer, engine, workload, tell)
            nursery.cancel_scope.cancel("everything is measured")
    return run


async def _measure(
    name: str, trainer: Trainer, engine: Engine, workload: Workload, tell: Callable[[str], None]
) -> StrategyRun:
    plan = trainer.plan
    steps = plan.steps[name]
    async with trio.open_nursery() as nursery:
        await trainer.learn_version()
        collector: Collector = collector_of(name)(trainer, workload, nursery)
        before, began = trainer.usage(), trio.current_time()
        trainer.gate.go_on()
        nursery.start_soon(trainer.gate.look, name="looks at the gate")
        with trio.fail_after(STEP_S_MAX * steps):
            done = await run_steps(collector, trainer, steps, lambda number: tell(f"{name}: step {number + 1}"))
        trainer.gate.pause()
        seconds, after = trio.current_time() - began, trainer.usage()
        sampled = await engine.sampled()
        run = StrategyRun(
            steps=done,
            met=list(collector.met),
            sampled=sampled,
            alive=await collector.alive(sampled),
            open_s=trainer.gate.open_s,
            full=trainer.gate.full,
            cpu_share=(after.cpu_s - before.cpu_s) / seconds,
            queued_share=(after.queued_s - before.queued_s) / seconds,
        )
        nursery.cancel_scope.cancel("everything is measured")
    return run
