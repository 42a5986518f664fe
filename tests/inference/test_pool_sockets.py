"""The pool over real engine processes: killed, stopped in the middle of calls, exchanged; no call is left hanging."""

from __future__ import annotations

import os
import signal
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from prorld.domain.job import Sampling
from prorld.errors import BackendError
from prorld.inference import watch
from prorld.inference.contract import Generation, GenerationRequest
from prorld.inference.lease import Lease
from prorld.inference.pool import BackendPool
from prorld.inference.vllm import VllmBackend
from prorld.metrics import Metrics
from prorld.testing.scripted_engine.script import Latency, Script
from prorld.testing.scripted_engine.serve import Serving, run_scripted_engine
from prorld.wire.ops import AddBackend, SetBackend, SetBackends

JOBS = 6
# Ten tokens in half a second.
SCRIPT = Script(turns=["ten tokens"[:9]], pick="hash", latency=Latency(decode_token_s=0.05))
DEADLINE_S = 30.0


class Engines:
    """Two engine processes and a pool that knows them."""

    def __init__(self, pool: BackendPool, servings: list[Serving], ids: list[str]) -> None:
        self.pool = pool
        self.servings = servings
        self.ids = ids


@asynccontextmanager
async def engines(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engines]:
    """Health is checked often here, so that real time is short."""
    monkeypatch.setattr(watch, "HEALTH_SECONDS", 0.1)
    monkeypatch.setattr(watch, "HEALTH_SECONDS_MAX", 0.3)
    monkeypatch.setattr(watch, "ABANDON_SECONDS", 2.0)
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            servings = [await nursery.start(run_scripted_engine, SCRIPT) for _ in range(2)]
            pool = BackendPool({"vllm": lambda request: VllmBackend(request.url)}, Metrics())
            await nursery.start(pool.run)
            ids = [(await pool.add(AddBackend(url=s.url, kind="vllm"))).backend_id for s in servings]
            yield Engines(pool, servings, ids)
            nursery.cancel_scope.cancel()


async def job(pool: BackendPool, number: int, said: dict[int, list[Generation]]) -> None:
    """Three turns; a call that fails is made again elsewhere, as a session does it."""
    async with pool.lease("default") as lease:
        for turn in range(3):
            said.setdefault(number, []).append(await _turn(lease, number, turn))


async def _turn(lease: Lease, number: int, turn: int) -> Generation:
    for attempt in range(5):
        request = GenerationRequest(
            token_ids=array("i", [1, 2, 3, number, turn]), max_tokens=64, sampling=Sampling(), stop_token_ids=(),
            request_id=f"{number}-{turn}-{attempt}", session=f"s-{number}",
        )  # fmt: skip
        try:
            return await lease.generate(request)
        except BackendError as exc:
            assert exc.may_retry, exc  # noqa: PT017
            await lease.migrate()
    raise AssertionError("five engines failed")


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP", "migrate"])
async def test_jobs_go_on_elsewhere(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed, its sockets break; stopped, they stay open and say nothing; exchanged, the pool closes them."""
    async with engines(monkeypatch) as here:
        said: dict[int, list[Generation]] = {}
        first, second = here.servings
        try:
            async with trio.open_nursery() as nursery:
                for number in range(JOBS):
                    nursery.start_soon(job, here.pool, number, said)
                await trio.sleep(0.7)
                if how == "migrate":
                    wanted = [SetBackend(url=second.url, kind="vllm")]
                    await here.pool.replace(SetBackends(generation=2, backends=wanted, removed="migrate"))
                else:
                    os.kill(first.pid, getattr(signal, how))
        finally:
            if how == "SIGSTOP":
                os.kill(first.pid, signal.SIGCONT)
        assert {number: len(turns) for number, turns in said.items()} == dict.fromkeys(range(JOBS), 3)
        assert {len(generation.token_ids) for turns in said.values() for generation in turns} == {10}
        left = {info.backend_id: info for info in here.pool.list().items}
        assert left[here.ids[1]].migrated_in_total >= 1
        assert all((info.inflight, info.leases, info.queued) == (0, 0, 0) for info in left.values())
