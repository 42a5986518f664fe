"""The whole bench: starts engine and daemon, measures one thing after the other, and takes both down."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import trio

from prorld.bench.api import Api, EngineApi
from prorld.bench.crowd import measure_cancel, measure_crowd
from prorld.bench.figures import Figures, Plan
from prorld.bench.holds import measure_holds
from prorld.bench.processes import Daemon, run_daemon, script
from prorld.bench.rollouts import measure_latency, measure_rollouts
from prorld.testing.scripted_engine.serve import Serving, run_scripted_engine

__all__ = ["run_bench"]

# Malformed requests come on connections of their own.
SPARE_CONNECTIONS = 1000
BENCH_S_MAX = 1800.0

Step = tuple[str, Callable[[Api, EngineApi, Plan], Awaitable[dict[str, Any]]]]


async def run_bench(plan: Plan, tell: Callable[[str], None]) -> Figures:
    """Measure everything. ``tell`` hears what is being done; raises ``BenchFailed`` where it can't be."""
    began, load_before = time.monotonic(), os.getloadavg()[0]
    found: dict[str, Any] = {}
    with trio.fail_after(BENCH_S_MAX):
        await trio.lowlevel.checkpoint()
        for steps in _steps(plan):
            found |= await _with_daemon(plan, steps, tell)
    found |= {
        "cores": len(os.sched_getaffinity(0)),
        "load_1m_before": load_before,
        "load_1m_after": os.getloadavg()[0],
        "seconds": time.monotonic() - began,
    }
    return msgspec.convert(found, Figures)


def _steps(plan: Plan) -> Iterator[tuple[Step, ...]]:
    """What is measured, by the daemon that it is measured on: one that has been large gives its memory away slowly."""
    yield (
        (f"{plan.rollouts} one-turn rollouts", measure_rollouts),
        ("what is added to each engine call", measure_latency),
    )
    yield (
        (f"{plan.concurrent} rollouts at once", measure_crowd),
        (f"{plan.concurrent} rollouts cancelled in one call", measure_cancel),
    )
    yield ((f"{plan.held} held, {plan.abandoned} abandoned and {plan.malformed} malformed requests", measure_holds),)


async def _with_daemon(plan: Plan, steps: Sequence[Step], tell: Callable[[str], None]) -> dict[str, Any]:
    """A fresh pair of processes for these measurements."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="prorld-bench-") as place:
        async with trio.open_nursery() as nursery:
            serving: Serving = await nursery.start(run_scripted_engine, script(), name="scripted engine")
            start = partial(
                run_daemon,
                Path(place),
                serving.url,
                places=plan.concurrent,
                connections=plan.held + plan.clients + SPARE_CONNECTIONS,
            )
            daemon: Daemon = await nursery.start(start, name="daemon")
            with closing(EngineApi(serving.url, pid=serving.pid, connections_max=plan.clients)) as engine:
                for what, measure in steps:
                    tell(what)
                    # None sees the sockets of the measurement before it.
                    with closing(Api(daemon, connections_max=plan.clients)) as api:
                        found |= await measure(api, engine, plan)
            nursery.cancel_scope.cancel("everything is measured")
    return found
