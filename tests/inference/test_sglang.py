"""The SGLang client: what it asks for, and what it makes of versions, adapters, caches and loads."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio

from prorld.domain.branch import VersionSpan
from prorld.domain.job import Sampling
from prorld.domain.versions import PolicyVersion
from prorld.errors import BackendError, ContextOverflow, Unsupported
from prorld.inference.contract import Generation, GenerationRequest, WeightRef
from prorld.inference.sglang import SglangBackend
from prorld.testing.scripted_engine.routes import ScriptedServer
from prorld.testing.scripted_engine.script import Fault, Latency, Script, scripted_logprob
from prorld.testing.scripted_engine.serve import Serving, serve_scripted
from tests.inference.listening import Listening

TURN = list(range(100, 200))
SLOW = Latency(decode_token_s=0.002)
FIRST, SECOND = PolicyVersion(0, 1), PolicyVersion(0, 2)
PROMPT = array("i", range(64))


@asynccontextmanager
async def engine(**changes: Any) -> AsyncIterator[tuple[Listening, SglangBackend]]:
    """A server in this process and its probed client."""
    server = Listening(Script(flavour="sglang", turns=[TURN], **changes))
    async with trio.open_nursery() as nursery:
        serving: Serving = await nursery.start(partial(serve_scripted, server))
        backend = SglangBackend(serving.url)
        await backend.probe()
        yield server, backend
        await backend.aclose()
        nursery.cancel_scope.cancel()


def request(**changes: Any) -> GenerationRequest:
    """A request for all of the script."""
    wish: dict[str, Any] = {"max_tokens": 100, "sampling": Sampling(), "stop_token_ids": (9,), **changes}
    return GenerationRequest(token_ids=PROMPT, request_id="r-1", session="job-1", **wish)


async def running(server: ScriptedServer) -> None:
    """Until a call runs in the engine."""
    with trio.fail_after(5):
        while not server.engine.running:  # noqa: ASYNC110 - it has no event for tests
            await trio.sleep(0.005)


async def test_all_that_shapes_a_sample_is_in_the_request() -> None:
    """Nothing is left to the server's defaults; what it was not started for is left out and named."""
    async with engine() as (server, backend):
        sampling = Sampling(temperature=0.5, top_p=0.9, top_k=20, min_p=0.1, stop=["END"])
        generation = await backend.generate(request(sampling=sampling, salt="v7", seed=5, priority=2))
        assert server.last_body("/generate") == {
            "input_ids": list(PROMPT),
            "rid": "r-1",
            "session_id": "job-1",
            "routing_key": "job-1",
            "sampling_params": {
                "max_new_tokens": 100,
                "temperature": 0.5,
                "top_p": 0.9,
                "top_k": 20,
                "min_p": 0.1,
                "stop_token_ids": [9],
                "stop": ["END"],
                "no_stop_trim": True,
                "skip_special_tokens": False,
            },
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "stream": False,
            "extra_key": "v7",
        }
        assert generation.ignored == ("seed", "priority")
        assert generation.logprobs_mode == "processed"
        assert list(generation.logprobs) == [scripted_logprob(token, 64 + at) for at, token in enumerate(TURN)]


async def test_a_budget_stops_before_the_context_does() -> None:
    """The server refuses a call that might fill its context, so that is not asked for."""
    async with engine(max_model_len=80) as (server, backend):
        generation = await backend.generate(request())
        assert (len(generation.token_ids), generation.finish) == (15, "length")
        assert server.last_body("/generate")["sampling_params"]["max_new_tokens"] == 15
    async with engine(max_model_len=65) as (_, backend):
        with pytest.raises(ContextOverflow):
            await backend.generate(request())


async def test_an_abort_keeps_what_was_said_and_its_versions() -> None:
    """A pause ends the call with its tokens, and each of them knows its weights."""
    async with engine(latency=SLOW) as (server, backend):
        got: list[Generation] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_collect, backend, got)
            await running(server)
            await trio.sleep(0.03)
            await backend.set_version(FIRST)
            await trio.sleep(0.03)
            await backend.pause("abort")
        await backend.resume()
        assert got[0].finish == "abort"
        assert list(got[0].token_ids) == TURN[: len(got[0].token_ids)]
        assert [span.version for span in got[0].versions] == [0, 1]
        assert got[0].versions_exact


async def test_weights_come_from_disk_with_their_version() -> None:
    """One call loads, labels and clears; a server that says no in words is believed."""
    async with engine() as (server, backend):
        await backend.generate(request())
        await backend.pause("keep")
        await backend.load_weights(WeightRef(how="reload", path="/weights/2", version=SECOND))
        assert server.last_body("/update_weights_from_disk")["weight_version"] == SECOND.label
        assert await backend.read_version() == SECOND
        await backend.resume()
        generation = await backend.generate(request())
        assert generation.versions == (VersionSpan(start=0, end=100, epoch=0, version=2),)
        assert generation.cached_tokens == 0
        server.faults.arm(Fault(kind="not_done", on="reload"))
        with pytest.raises(BackendError, match="did not load"):
            await backend.load_weights(WeightRef(how="reload", path="/weights/3", version=SECOND))


async def test_a_wait_is_over_when_nothing_runs() -> None:
    """The call that ran has ended by itself, and what comes meanwhile is held."""
    async with engine(latency=SLOW) as (server, backend):
        got: list[Generation] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_collect, backend, got)
            await running(server)
            await backend.pause("wait")
            assert [(len(generation.token_ids), generation.finish) for generation in got] == [(100, "length")]
            assert server.engine.is_paused
            await backend.resume()


async def test_adapters_are_versions_by_name() -> None:
    """Each is asked for by its name, one of an earlier life makes way, and one that is gone is a refusal."""
    async with engine() as (server, backend):
        server.engine.adapters[FIRST.label] = "/adapters/of-yesterday"
        await backend.load_weights(WeightRef(how="lora", path="/adapters/1", version=FIRST, name=FIRST.label))
        assert server.engine.adapters == {FIRST.label: "/adapters/1"}
        generation = await backend.generate(request(adapter=FIRST.label))
        assert generation.versions == (VersionSpan(start=0, end=100, epoch=0, version=1),)
        await backend.unload_adapter(FIRST.label)
        await backend.unload_adapter(FIRST.label)
        with pytest.raises(BackendError):
            await backend.generate(request(adapter=FIRST.label))
    async with engine(lora=False) as (_, backend):
        with pytest.raises(Unsupported):
            await backend.load_weights(WeightRef(how="lora", path="/adapters/1", version=FIRST))


async def test_a_cache_under_running_calls_is_not_cleared() -> None:
    """The server refuses, and that is said; under calls that were taken back it can be cleared."""
    async with engine(latency=SLOW) as (server, backend):
        got: list[Generation] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_collect, backend, got)
            await running(server)
            with pytest.raises(BackendError, match="not flushed"):
                await backend.clear_cache()
            await backend.pause("keep")
            await backend.clear_cache()
            await backend.resume()
        assert list(got[0].token_ids) == TURN


async def _collect(backend: SglangBackend, into: list[Generation]) -> None:
    into.append(await backend.generate(request()))
