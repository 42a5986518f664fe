"""Real learning, measured: ``prorld learn-demo`` once for each seed, and for ``learn-async`` in both modes of each.

Every run is a process of its own with a daemon and an engine of its own, and what is measured is what it wrote into its
``metrics.jsonl``.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import trio

from prorld.bench.learn_figures import (
    LearnFigures,
    LearnPlan,
    ModeFigures,
    ModeRun,
    SeedRun,
    figures_of,
    mode_figures_of,
    run_of,
)
from prorld.bench.processes import BenchFailed
from prorld.bench.sample import Machine, MachineFigures
from prorld.kit.process import run_group

__all__ = ["run_learn", "run_learn_async"]

RUN_S_MAX = 4 * 3600.0
WORDS_MAX = 2000
# The demo ends its engine, its daemon, and its own thread.
STOP_S = 60.0


async def run_learn(plan: LearnPlan, tell: Callable[[str], None]) -> LearnFigures:
    """One run for each seed, one after the other."""
    machine = Machine()
    runs: list[SeedRun] = []
    with ExitStack() as stack:
        place = _place(plan, stack)
        for seed in plan.seeds:
            tell(f"seed {seed}: up to {plan.steps} steps in {place / f'seed-{seed}'}")
            runs.append(await _run(plan, seed, "sync", place / f"seed-{seed}"))
    return msgspec.convert({**figures_of(runs), **machine.figures(_curves(runs), warden_deaths=0)}, LearnFigures)


async def run_learn_async(plan: LearnPlan, tell: Callable[[str], None]) -> MachineFigures:
    """Both modes on the same seeds, in turns, so that other work on the machine meets both."""
    machine = Machine()
    runs: list[ModeRun] = []
    with ExitStack() as stack:
        place = _place(plan, stack)
        for seed in plan.seeds:
            for mode in ("sync", "async"):
                tell(f"seed {seed}, {mode}: up to {plan.steps} steps")
                runs.append(ModeRun(mode=mode, run=await _run(plan, seed, mode, place / f"{mode}-{seed}")))
    notes = [f"{item.mode}, {line}" for item in runs for line in _curves([item.run])]
    return msgspec.convert({**mode_figures_of(runs), **machine.figures(notes, warden_deaths=0)}, ModeFigures)


def _place(plan: LearnPlan, stack: ExitStack) -> Path:
    if plan.keep is not None:
        place = Path(plan.keep).absolute()
        place.mkdir(parents=True, exist_ok=True)
        return place
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prorld-bench-")))


async def _run(plan: LearnPlan, seed: int, mode: str, out: Path) -> SeedRun:
    """One demo to its end; it goes on where ``out`` has an earlier life of it."""
    argv = [sys.executable, "-m", "prorld.cli", "learn-demo", "--json", "--engine", plan.engine, "--mode", mode]
    argv += ["--seed", str(seed), "--steps", str(plan.steps), "--groups", str(plan.groups)]
    argv += ["--samples", str(plan.samples), "--eval-count", str(plan.held_out), "--out", str(out)]
    argv += [] if plan.python is None else ["--python", plan.python]
    argv += [] if plan.model is None else ["--model", plan.model]
    with trio.fail_after(RUN_S_MAX):
        done = await run_group(argv, env=os.environ, term_seconds=STOP_S)
    if done.exit_code != 0:
        said = done.stderr.decode("utf-8", "replace")[-WORDS_MAX:].strip()
        raise BenchFailed(f"learn-demo ended with {done.exit_code}: {said}")
    return run_of(seed, _lines(out / "metrics.jsonl"))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines() if line.strip()]


def _curves(runs: Sequence[SeedRun]) -> list[str]:
    """Every seed's rewards, as a line to look at."""
    return [f"seed {run.seed}: reward {' '.join(f'{reward:.2f}' for reward in run.rewards)}" for run in runs]
