"""Many rollouts at once: what each keeps in memory, how late the loop gets, and how fast all of them are gone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import trio

from prorld.bench.api import Api, EngineApi
from prorld.bench.figures import Plan, quantile, quantile_of_buckets
from prorld.bench.processes import BenchFailed
from prorld.bench.procfs import Usage, usage
from prorld.bench.rollouts import prompt, warm_up

__all__ = ["lag_buckets", "measure_cancel", "measure_crowd"]

# So many submits at a time: they are what comes in while a crowd builds up, not what is measured.
SUBMITTERS = 8
TURNS = 3
POLL_S = 0.05
_LAG = "prorld_loop_lag_seconds_bucket{le="


async def measure_crowd(api: Api, engine: EngineApi, plan: Plan) -> dict[str, Any]:
    """So many rollouts of several turns against an engine that takes its time."""
    await warm_up(api, plan)
    await engine.slow_down(plan.slow_call_s)
    pid = api.daemon.pid
    calm, lag_before, began = usage(pid), lag_buckets(await api.get("/metrics")), trio.current_time()
    calls_before = (await engine.state()).faults_met.get("slow", 0)
    job_ids = await _submit(api, plan.concurrent, turns=TURNS)
    seen, full = await _seen_together(api, plan.concurrent)
    await api.until_over()
    seconds, after = trio.current_time() - began, usage(pid)
    lag = _minus(lag_buckets(await api.get("/metrics")), lag_before)
    turns = (await engine.state()).faults_met.get("slow", 0) - calls_before
    await engine.speed_up()
    for job in await api.newest(len(job_ids)):
        if job.outcome is None or job.outcome.kind != "ok":
            raise BenchFailed(f"a rollout of the crowd ended {job.outcome}")
    return {
        "concurrent": plan.concurrent,
        "concurrent_seen": seen,
        "turns_per_s": turns / seconds,
        "lag_p50_ms": quantile_of_buckets(lag, 0.5) * 1e3,
        "lag_p99_ms": quantile_of_buckets(lag, 0.99) * 1e3,
        "lag_samples": int(lag.get(math.inf, 0)),
        "cpu_share": (after.cpu_s - calm.cpu_s) / seconds,
        "queued_share": (after.queued_s - calm.queued_s) / seconds,
        "memory_kb_per_rollout": (full.rss_bytes - calm.rss_bytes) / plan.concurrent / 1e3,
    }


async def measure_cancel(api: Api, engine: EngineApi, plan: Plan) -> dict[str, Any]:
    """One call that ends all of them, while every one waits for its engine."""
    await engine.hold()
    job_ids = await _submit(api, plan.concurrent)
    await engine.until_waiting(plan.concurrent)
    before, began, asked_at = usage(api.daemon.pid), trio.current_time(), datetime.now(UTC)
    cancelled = await api.cancel(job_ids)
    answered_s = trio.current_time() - began
    await engine.until_waiting(0)
    engine_s = trio.current_time() - began
    await api.until_over()
    after = usage(api.daemon.pid)
    await engine.let_go()
    # By the daemon's own clock of the moment each end was told; both processes read the same one.
    gone = [_seconds_since(asked_at, job.ended_at) for job in await api.newest(len(job_ids))]
    return {
        "cancelled": cancelled,
        "cancel_p50_ms": quantile(gone, 0.5) * 1e3,
        "cancel_p99_ms": quantile(gone, 0.99) * 1e3,
        "cancel_all_ms": max(gone) * 1e3,
        "cancel_engine_ms": engine_s * 1e3,
        "cancel_answer_ms": answered_s * 1e3,
        "cancel_cpu_ms": (after.cpu_s - before.cpu_s) * 1e3,
        "cancel_queued_ms": (after.queued_s - before.queued_s) * 1e3,
    }


async def _submit(api: Api, count: int, *, turns: int = 1) -> list[str]:
    job_ids: list[str] = []
    left = iter(range(count))

    async def submitter() -> None:
        for number in left:
            job_id = await api.submit({"prompt": prompt(number), "turns": turns})
            job_ids.append(job_id)

    async with trio.open_nursery() as nursery:
        for number in range(min(SUBMITTERS, count)):
            nursery.start_soon(submitter, name=f"submitter {number}")
    return job_ids


async def _seen_together(api: Api, wanted: int) -> tuple[int, Usage]:
    """The most rollouts that were alive at once, up to all that are wanted, and the daemon at that moment."""
    most, full = 0, usage(api.daemon.pid)
    while most < wanted:
        alive = await api.alive()
        if alive > most:
            most, full = alive, usage(api.daemon.pid)
        if not alive:
            break
        await trio.sleep(POLL_S)
    return most, full


def lag_buckets(page: bytes) -> dict[float, float]:
    """The histogram of the loop's lateness on a page of metrics: counts by upper bound."""
    found: dict[float, float] = {}
    for line in page.decode().splitlines():
        if line.startswith(_LAG):
            bound, _, count = line.removeprefix(_LAG).partition("} ")
            found[float(bound.strip('"'))] = float(count)
    return found


def _minus(later: Mapping[float, float], earlier: Mapping[float, float]) -> dict[float, float]:
    return {bound: count - earlier.get(bound, 0.0) for bound, count in later.items()}


def _seconds_since(asked_at: datetime, ended_at: str | None) -> float:
    if ended_at is None:
        return math.inf
    return (datetime.fromisoformat(ended_at) - asked_at).total_seconds()
