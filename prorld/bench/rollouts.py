"""One-turn rollouts through the daemon, engine calls past it, and what the daemon adds to each call."""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import trio

from prorld.bench.api import Api, EngineApi
from prorld.bench.figures import Plan, quantile
from prorld.bench.processes import SAMPLED
from prorld.bench.procfs import usage

__all__ = ["measure_latency", "measure_rollouts", "prompt", "warm_up"]

PROMPT_CHARS = 200
WARM = 256
# The bare loop and the daemon take turns, so that both see the same machine.
ROUNDS = 10


def prompt(number: int) -> str:
    """No two rollouts have the same prompt, so nothing that remembers prompts makes them cheaper than they are."""
    return f"Rollout {number}. " + "Say what comes next. " * (PROMPT_CHARS // 21)


async def measure_rollouts(api: Api, engine: EngineApi, plan: Plan) -> dict[str, Any]:
    """Rollouts per second and what each costs, warm."""
    numbers = itertools.count(1)

    async def rollout() -> None:
        await api.roll({"prompt": prompt(next(numbers))})

    async def in_two_requests() -> None:
        await api.ended(await api.submit({"prompt": prompt(next(numbers))}))

    await warm_up(api, plan)
    pid, asked = api.daemon.pid, api.requests
    before, engine_before, began = usage(pid), usage(engine.pid), trio.current_time()
    await _repeat(rollout, plan.rollouts, plan.clients)
    seconds, after = trio.current_time() - began, usage(pid)
    requests, engine_cpu_s = api.requests - asked, usage(engine.pid).cpu_s - engine_before.cpu_s
    await _repeat(in_two_requests, plan.rollouts, plan.clients)
    polled_cpu_s = usage(pid).cpu_s - after.cpu_s
    return {
        "rollouts": plan.rollouts,
        "clients": plan.clients,
        "rollouts_per_s": plan.rollouts / seconds,
        "cpu_ms_per_rollout": (after.cpu_s - before.cpu_s) / plan.rollouts * 1e3,
        "cpu_ms_per_rollout_in_two_requests": polled_cpu_s / plan.rollouts * 1e3,
        "requests_per_rollout": requests / plan.rollouts,
        "cpu_ms_per_request": await _request_cost(api, plan),
        "engine_cpu_ms_per_call": engine_cpu_s / plan.rollouts * 1e3,
        **await _bare(engine, plan),
    }


async def warm_up(api: Api, plan: Plan) -> None:
    """Let the daemon load and compile what it does once."""

    async def rollout() -> None:
        await api.ended(await api.submit({"prompt": prompt(0)}))

    await _repeat(rollout, WARM, plan.clients)


async def _request_cost(api: Api, plan: Plan) -> float:
    """CPU of the daemon for a look at a job that has ended: what HTTP alone costs."""
    job_id = await api.submit({"prompt": prompt(0)})
    await api.ended(job_id)
    before = usage(api.daemon.pid).cpu_s

    async def look() -> None:
        await api.get(f"/v1/jobs/{job_id}")

    await _repeat(look, plan.rollouts, plan.clients)
    return (usage(api.daemon.pid).cpu_s - before) / plan.rollouts * 1e3


async def _bare(engine: EngineApi, plan: Plan) -> dict[str, float]:
    """The same number of engine calls from a bare loop in this process."""
    ids = list(prompt(0).encode())
    numbers = itertools.count()

    async def call() -> None:
        await engine.generate(ids, SAMPLED, f"bare-{next(numbers)}")

    began, before = trio.current_time(), time.process_time()
    await _repeat(call, plan.rollouts, plan.clients)
    seconds = trio.current_time() - began
    return {
        "bare_calls_per_s": plan.rollouts / seconds,
        "bare_cpu_ms_per_call": (time.process_time() - before) / plan.rollouts * 1e3,
    }


async def _repeat(work: Callable[[], Awaitable[None]], times: int, at_once: int) -> None:
    left = iter(range(times))

    async def worker() -> None:
        for _ in left:
            await work()

    async with trio.open_nursery() as nursery:
        for number in range(min(at_once, times)):
            nursery.start_soon(worker, name=f"client {number}")


class _Call(msgspec.Struct, frozen=True):
    """An engine call of a rollout, to be made again without the daemon."""

    prompt: list[int]
    sampled: int


async def measure_latency(api: Api, engine: EngineApi, plan: Plan) -> dict[str, Any]:
    """Each turn as its handler sees it, alone on the daemon, against the same calls in a bare loop."""
    script = await _calls_of(api, plan.turns)
    through: list[float] = []
    bare: list[float] = []
    for number in range(ROUNDS):
        bare += await _replay(engine, script, number)
        job_id = await api.submit({"prompt": "Go on.", "turns": plan.turns})
        through += (await api.ended(job_id)).reward_parts.values()
    through_p50, through_p99 = quantile(through, 0.5), quantile(through, 0.99)
    bare_p50, bare_p99 = quantile(bare, 0.5), quantile(bare, 0.99)
    return {
        "calls": len(through),
        "call_p50_ms": through_p50 * 1e3,
        "call_p99_ms": through_p99 * 1e3,
        "bare_call_p50_ms": bare_p50 * 1e3,
        "bare_call_p99_ms": bare_p99 * 1e3,
        "added_p50_ms": (through_p50 - bare_p50) * 1e3,
        "added_p99_ms": (through_p99 - bare_p99) * 1e3,
        "call_ratio_p50": through_p50 / bare_p50,
    }


async def _calls_of(api: Api, turns: int) -> list[_Call]:
    """Run such a rollout once, and read from its trajectory what was asked of the engine."""
    job_id = await api.submit({"prompt": "Go on.", "turns": turns})
    await api.ended(job_id)
    told = await api.trajectory(job_id)
    ids = told.branches[0].token_ids
    return [_Call(ids[: call.prompt_len], call.sampled_len) for call in told.calls]


async def _replay(engine: EngineApi, script: Sequence[_Call], number: int) -> list[float]:
    seconds: list[float] = []
    for call in script:
        began = trio.current_time()
        await engine.generate(call.prompt, call.sampled, f"replay-{number}")
        seconds.append(trio.current_time() - began)
    return seconds
