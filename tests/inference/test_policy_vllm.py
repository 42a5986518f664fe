"""Policy versions against vLLM's own routes, over real sockets: an engine that is played, under both of its habits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

from prorld.inference.contract import PauseMode
from prorld.inference.vllm import VllmBackend
from prorld.testing.scripted_engine.routes import ScriptedServer
from prorld.testing.scripted_engine.script import Latency, Script
from prorld.testing.scripted_engine.serve import Serving, serve_scripted
from prorld.wire.ops import AddBackend
from prorld.wire.policies import PausePolicy, PolicyUpdate, ResumePolicy, UpdatePolicy
from tests.http.raw_client import until
from tests.rollout.support import Room, room

ANSWER = "forty-two" * 6
TOKENS = len(ANSWER) + 1
SLOW = Latency(decode_token_s=0.02)


@asynccontextmanager
async def world(script: Script, engines: int = 1) -> AsyncIterator[tuple[Room, list[ScriptedServer]]]:
    """A room on engines that listen on sockets."""
    async with trio.open_nursery() as nursery, room(backends=[]) as here:
        servers = [ScriptedServer(script) for _ in range(engines)]
        for server in servers:
            serving: Serving = await nursery.start(partial(serve_scripted, server))
            here.engines[serving.url] = VllmBackend(serving.url)
            await here.pool.add(AddBackend(url=serving.url, kind="vllm"))
        yield here, servers
        nursery.cancel_scope.cancel()


async def updated(here: Room, **wish: object) -> PolicyUpdate:
    """An update, to its end."""
    begun = await here.policies.update("default", UpdatePolicy(**wish), "alice")  # type: ignore[arg-type]
    return await here.policies.wait_update("default", begun.update_id)


async def sampled(here: Room, job_id: str) -> list[tuple[int | None, int]]:
    """Versions and numbers of tokens of a job that ended well, with all of its answer and nothing twice."""
    record = await here.supervisor.wait_done(job_id, "tests")
    assert record.outcome is not None
    assert record.outcome.kind.value == "ok", record.outcome
    assert (await here.looks.verify(job_id, "tests")).violations == []
    document = await here.supervisor.trajectory(job_id, "tests")
    (branch,) = document.branches
    ids = [token for token, mine in zip(branch.token_ids, branch.mask, strict=True) if mine]
    assert bytes(ids[:-1]).decode() == ANSWER
    return [(span.version, span.end - span.start) for call in document.calls for span in call.policy_versions]


@pytest.mark.parametrize("rejects", [True, False])
@pytest.mark.parametrize("mode", ["abort", "keep"])
async def test_an_update_in_mid_generation(mode: PauseMode, rejects: bool) -> None:
    """Tokens before and after, each under its own version, whether a paused engine refuses calls or lets them wait."""
    script = Script(turns=[ANSWER], latency=SLOW, rejects_while_paused=rejects)
    with trio.fail_after(30):
        async with world(script) as (here, (server,)):
            await here.submit("j")
            await until(lambda: server.engine.running == 1)
            await trio.sleep(0.2)
            update = await updated(here, version=1, how="reload", path="/weights/1", mode=mode)
            assert update.state == "done", update
            assert (server.engine.loaded, server.engine.label) == (["/weights/1"], "prorld-0.1")
            (old, before), (new, after) = await sampled(here, "j")
            assert (old, new, before + after) == (0, 1, TOKENS)
            assert min(before, after) > 0


async def test_a_trainer_moves_the_weights_of_two_engines() -> None:
    """One that is started anew meanwhile says its old name, and is named with the other."""
    with trio.fail_after(30):
        async with world(Script(turns=[ANSWER], latency=SLOW), engines=2) as (here, servers):
            for n in range(4):
                await here.submit(f"j{n}")
            await until(lambda: all(server.engine.running == 2 for server in servers))
            paused = await here.policies.pause("default", PausePolicy(mode="wait", timeout_s=0.1), "alice")
            assert [server.engine.running for server in servers] == [0, 0]
            done = await here.policies.resume("default", ResumePolicy(pause_id=paused.pause_id, version=9))
            assert [(result.ok, result.version) for result in done.backends] == [(True, 9), (True, 9)]
            for n in range(4):
                assert [version for version, _ in await sampled(here, f"j{n}")] == [0, 9]


async def test_an_adapter_comes_beside_the_weights() -> None:
    """The engine says the name of the weights, the tokens have the version of the adapter."""
    with trio.fail_after(30):
        async with world(Script(turns=[ANSWER], latency=SLOW)) as (here, (server,)):
            assert (await updated(here, version=1, how="lora", path="/adapters/1")).state == "done"
            await here.submit("j")
            await until(lambda: server.engine.running == 1)
            assert (await updated(here, version=2, how="lora", path="/adapters/2")).state == "done"
            assert set(server.engine.adapters) == {"prorld-0.1", "prorld-0.2"}
            assert await sampled(here, "j") == [(1, TOKENS)]
            await here.submit("k")
            assert await sampled(here, "k") == [(2, TOKENS)]
            await until(lambda: set(server.engine.adapters) == {"prorld-0.2"})
            assert server.engine.label == "default"
