"""A queue of thousands: how late the loop gets while it fills, while half of it is cancelled, and while it empties."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import trio

from prorld.bench.api import Api, EngineApi
from prorld.bench.crowd import lag_buckets
from prorld.bench.figures import Aim, Plan, Some, quantile_of_buckets
from prorld.bench.processes import Daemon, run_daemon, script
from prorld.bench.procfs import usage
from prorld.bench.rollouts import warm_up
from prorld.bench.sample import Machine, MachineFigures, missed_of
from prorld.testing.scripted_engine.serve import Serving, run_scripted_engine

__all__ = ["QueueFigures", "QueuePlan", "aims_of", "missed", "run_queue"]

BENCH_S_MAX = 1800.0
SUBMITTERS = 16
RUNNING = 64
SPARE_CONNECTIONS = 1000
EMPTY_S_MAX = 600.0
LOOK_S = 0.25


class QueuePlan(msgspec.Struct, frozen=True, kw_only=True):
    """How many jobs wait, and how many of them are cancelled in one call."""

    jobs: Some = 10_000
    cancelled: Some = 5_000

    @classmethod
    def quick(cls) -> QueuePlan:
        """A look, and no proof."""
        return cls(jobs=600, cancelled=300)


class QueueFigures(MachineFigures, frozen=True, kw_only=True):
    """Lateness of the loop is the daemon's own measure, over each part and over all; an MB is 10**6 bytes."""

    jobs: int
    waiting_seen: int
    submit_per_s: float
    fill_lag_p99_ms: float
    cancel_lag_p99_ms: float
    empty_lag_p99_ms: float
    lag_p99_ms: float
    lag_samples: int
    # From the one call that cancels to its answer, and until all of these have ended.
    cancelled: int
    cancel_answer_ms: float
    cancel_all_ms: float
    empty_s: float
    # What a waiting job keeps in memory; what is left of it all when every job has ended.
    memory_kb_per_job: float
    rss_full_mb: float
    rss_after_mb: float
    # Jobs by what the service says became of them, and those that it does not know any more.
    ended_ok: int
    ended_cancelled: int
    unaccounted: int
    queued_share: float


def aims_of(plan: QueuePlan) -> tuple[Aim, ...]:
    """What it should be for so many."""
    left = plan.jobs - plan.cancelled
    return (
        Aim(figure="lag_p99_ms", bound=100.0),
        Aim(figure="fill_lag_p99_ms", bound=100.0),
        Aim(figure="cancel_lag_p99_ms", bound=100.0),
        Aim(figure="empty_lag_p99_ms", bound=100.0),
        Aim(figure="waiting_seen", bound=plan.jobs - RUNNING, how="at least"),
        Aim(figure="ended_ok", bound=left, how="at least"),
        Aim(figure="ended_cancelled", bound=plan.cancelled, how="at least"),
        Aim(figure="unaccounted", bound=0, how="at most"),
        Aim(figure="memory_kb_per_job", bound=64.0),
    )


def missed(figures: QueueFigures, plan: QueuePlan) -> list[str]:
    """One line per aim that the figures miss."""
    return missed_of(figures, aims_of(plan))


async def run_queue(plan: QueuePlan, tell: Callable[[str], None]) -> QueueFigures:
    """Fill, cancel, empty."""
    machine = Machine()
    with trio.fail_after(BENCH_S_MAX), tempfile.TemporaryDirectory(prefix="prorld-bench-") as place:
        async with trio.open_nursery() as nursery:
            serving: Serving = await nursery.start(run_scripted_engine, script(), name="scripted engine")
            start = partial(
                run_daemon,
                Path(place),
                serving.url,
                places=plan.jobs,
                connections=SPARE_CONNECTIONS,
                running=RUNNING,
            )
            daemon: Daemon = await nursery.start(start, name="daemon")
            with (
                closing(EngineApi(serving.url, pid=serving.pid, connections_max=SUBMITTERS)) as engine,
                closing(Api(daemon, connections_max=2 * SUBMITTERS)) as api,
            ):
                found = await _measure(api, engine, plan, tell)
            nursery.cancel_scope.cancel("everything is measured")
    return msgspec.convert({**found, **machine.figures([], warden_deaths=0)}, QueueFigures)


async def _measure(api: Api, engine: EngineApi, plan: QueuePlan, tell: Callable[[str], None]) -> dict[str, Any]:
    await warm_up(api, Plan(clients=SUBMITTERS))
    await engine.hold()
    pid = api.daemon.pid
    calm, empty_lag, began = usage(pid), await _lag(api), trio.current_time()
    tell(f"{plan.jobs} jobs come in")
    job_ids = await _submit(api, plan.jobs)
    submitted_s = trio.current_time() - began
    full, waiting, full_lag = usage(pid), await api.alive() - RUNNING, await _lag(api)
    tell(f"{plan.cancelled} of them are cancelled in one call")
    # Every so many of them, so that the queue is thinned and not cut.
    chosen = [job_ids[number * plan.jobs // plan.cancelled] for number in range(plan.cancelled)]
    asked = trio.current_time()
    cancelling = await api.cancel(chosen)
    answered_s = trio.current_time() - asked
    await _until_alive(api, plan.jobs - plan.cancelled)
    gone_s, thin_lag = trio.current_time() - asked, await _lag(api)
    tell("the others run")
    await engine.let_go()
    released = trio.current_time()
    await _until_alive(api, 0)
    empty_s, after, last_lag = trio.current_time() - released, usage(pid), await _lag(api)
    seconds = trio.current_time() - began
    whole = _minus(last_lag, empty_lag)
    return {
        "jobs": len(job_ids),
        "waiting_seen": waiting,
        "submit_per_s": plan.jobs / submitted_s,
        "fill_lag_p99_ms": _p99_ms(_minus(full_lag, empty_lag)),
        "cancel_lag_p99_ms": _p99_ms(_minus(thin_lag, full_lag)),
        "empty_lag_p99_ms": _p99_ms(_minus(last_lag, thin_lag)),
        "lag_p99_ms": _p99_ms(whole),
        "lag_samples": int(max(whole.values(), default=0)),
        "cancelled": cancelling,
        "cancel_answer_ms": answered_s * 1e3,
        "cancel_all_ms": gone_s * 1e3,
        "empty_s": empty_s,
        "memory_kb_per_job": (full.rss_bytes - calm.rss_bytes) / plan.jobs / 1e3,
        "rss_full_mb": full.rss_bytes / 1e6,
        "rss_after_mb": after.rss_bytes / 1e6,
        "queued_share": (after.queued_s - calm.queued_s) / seconds,
        **await _accounted(api, job_ids),
    }


async def _submit(api: Api, count: int) -> list[str]:
    job_ids: list[str] = []
    left = iter(range(count))

    async def submitter() -> None:
        for number in left:
            job_id = await api.submit({"prompt": f"Job {number}."})
            job_ids.append(job_id)

    async with trio.open_nursery() as nursery:
        for number in range(SUBMITTERS):
            nursery.start_soon(submitter, name=f"submitter {number}")
    return job_ids


async def _until_alive(api: Api, count: int) -> None:
    with trio.fail_after(EMPTY_S_MAX):
        while await api.alive() > count:  # noqa: ASYNC110 - a process tells nobody
            await trio.sleep(LOOK_S)


async def _accounted(api: Api, job_ids: list[str]) -> dict[str, int]:
    """What the service says became of each."""
    known = {job.job_id: job for job in await api.newest(len(job_ids))}
    outcomes = [known[job_id].outcome if job_id in known else None for job_id in job_ids]
    kinds = ["" if outcome is None else outcome.kind for outcome in outcomes]
    return {
        "ended_ok": kinds.count("ok"),
        "ended_cancelled": kinds.count("cancelled"),
        "unaccounted": sum(1 for kind in kinds if kind not in ("ok", "cancelled")),
    }


async def _lag(api: Api) -> dict[float, float]:
    return lag_buckets(await api.get("/metrics"))


def _minus(later: Mapping[float, float], earlier: Mapping[float, float]) -> dict[float, float]:
    return {bound: count - earlier.get(bound, 0.0) for bound, count in later.items()}


def _p99_ms(buckets: Mapping[float, float]) -> float:
    return quantile_of_buckets(buckets, 0.99) * 1e3
