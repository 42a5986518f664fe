"""vLLM's control routes: what the probe finds of them, and what becomes of weights, adapters, labels and caches."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
import trio

from prorld.domain.branch import VersionSpan
from prorld.domain.job import Sampling
from prorld.domain.versions import PolicyVersion
from prorld.errors import BackendError, EngineBusy, Unsupported
from prorld.inference import vllm_control
from prorld.inference.contract import Generation, GenerationRequest, WeightRef
from prorld.inference.vllm import VllmBackend
from prorld.testing.scripted_engine.routes import ScriptedServer
from prorld.testing.scripted_engine.script import Fault, Latency, Script, scripted_logprob
from prorld.testing.scripted_engine.serve import Serving, serve_scripted

TURN = list(range(100, 200))
SLOW = Latency(decode_token_s=0.002)
FIRST, SECOND = PolicyVersion(0, 1), PolicyVersion(0, 2)
PROMPT = array("i", range(64))


@asynccontextmanager
async def engine(script: Script) -> AsyncIterator[tuple[ScriptedServer, VllmBackend]]:
    """A server in this process and its probed client."""
    server = ScriptedServer(script)
    async with trio.open_nursery() as nursery:
        serving: Serving = await nursery.start(partial(serve_scripted, server))
        backend = VllmBackend(serving.url)
        await backend.probe()
        yield server, backend
        await backend.aclose()
        nursery.cancel_scope.cancel()


def request(**changes: Any) -> GenerationRequest:
    """A request for all of the script."""
    wish: dict[str, Any] = {"max_tokens": 100, "request_id": "r-1", **changes}
    return GenerationRequest(token_ids=PROMPT, sampling=Sampling(), stop_token_ids=(), session="job-1", **wish)


def adapter(version: PolicyVersion) -> WeightRef:
    """An adapter of this version."""
    return WeightRef(how="lora", path=f"/adapters/{version.version}", version=version, name=version.label)


@pytest.mark.parametrize(
    ("script", "found"),
    [
        (Script(), (True, True, True, True)),
        (Script(dev_mode=False), (False, False, True, True)),
        (Script(lora=False), (True, True, False, True)),
        (Script(cpu=True), (True, True, True, False)),
        (Script(cpu=True, lora=False), (True, True, False, True)),
    ],
)
async def test_the_probe_finds_what_is_open(script: Script, found: tuple[bool, ...]) -> None:
    """Each ability comes of the flags it needs, and looking for them loads nothing."""
    async with engine(script) as (server, backend):
        got = await backend.probe()
        assert (got.control, got.reload, got.lora, got.scores) == found
        assert (server.engine.loaded, server.engine.adapters) == ([], {})


async def test_weights_come_from_a_path_and_their_version_is_read_back() -> None:
    """Pause, load, label, clear, resume: the next tokens are of the new version, nothing comes from the old cache."""
    async with engine(Script(turns=[TURN])) as (server, backend):
        assert (await backend.generate(request())).cached_tokens == 0
        await backend.pause("abort")
        with pytest.raises(EngineBusy):
            await backend.generate(request())
        await backend.load_weights(WeightRef(how="reload", path="/weights/2", version=SECOND))
        await backend.clear_cache()
        await backend.set_version(SECOND)
        assert await backend.read_version() == SECOND
        await backend.resume()
        generation = await backend.generate(request())
        assert (server.engine.loaded, generation.cached_tokens) == (["/weights/2"], 0)
        assert generation.versions == (VersionSpan(start=0, end=100, epoch=0, version=2),)
        assert (await backend.probe()).weights == SECOND


async def test_adapters_are_versions_by_name() -> None:
    """Two versions serve side by side; the tokens are of the one that was asked for, with prefixes of its own."""
    async with engine(Script(turns=[TURN])) as (server, backend):
        for version in (FIRST, SECOND):
            await backend.load_weights(adapter(version))
        for version in (SECOND, FIRST):
            generation = await backend.generate(request(adapter=version.label))
            assert generation.versions == (VersionSpan(start=0, end=100, epoch=0, version=version.version),)
            assert (generation.versions_exact, generation.cached_tokens) == (True, 0)
        await backend.unload_adapter(FIRST.label)
        await backend.unload_adapter(FIRST.label)
        with pytest.raises(BackendError) as caught:
            await backend.generate(request(adapter=FIRST.label))
        assert caught.value.status == 404
        assert list(server.engine.adapters) == [SECOND.label]


async def test_an_adapter_with_a_foreign_name_is_of_no_known_version() -> None:
    """A name that is no label says nothing about its version, whatever the weights below it are called."""
    async with engine(Script(turns=[TURN])) as (_, backend):
        ref = WeightRef(how="lora", path="/adapters/x", version=FIRST, name="sql-expert")
        await backend.load_weights(ref)
        generation = await backend.generate(request(adapter="sql-expert"))
        assert generation.versions == (VersionSpan(start=0, end=100, version=None),)
        assert not generation.versions_exact


async def test_an_adapter_of_an_earlier_life_makes_way() -> None:
    """The name may stand for other weights by now, so it is loaded anew."""
    async with engine(Script()) as (server, backend):
        server.engine.adapters[FIRST.label] = "/adapters/of-yesterday"
        await backend.load_weights(adapter(FIRST))
        assert server.engine.adapters == {FIRST.label: "/adapters/1"}


async def test_an_adapter_that_is_not_served_was_not_loaded() -> None:
    """A server that says yes and does nothing is found out."""
    async with engine(Script()) as (server, backend):
        server.faults.arm(Fault(kind="not_done", on="adapter"))
        with pytest.raises(BackendError, match="does not serve it"):
            await backend.load_weights(adapter(FIRST))


@pytest.mark.parametrize("kind", ["status", "hang_up", "reset"])
@pytest.mark.parametrize("on", ["pause", "resume", "reload", "label", "cache", "adapter"])
async def test_what_fails_is_said(kind: Any, on: Any) -> None:
    """Each step that fails raises, and can be done again."""
    async with engine(Script()) as (server, backend):
        steps: dict[str, Any] = {
            "pause": partial(backend.pause, "abort"),
            "resume": backend.resume,
            "reload": partial(backend.load_weights, WeightRef(how="reload", path="/w", version=FIRST)),
            "label": partial(backend.set_version, FIRST),
            "cache": backend.clear_cache,
            "adapter": partial(backend.load_weights, adapter(FIRST)),
        }
        # A kept socket that is closed without a word is a reason to try once more.
        server.faults.arm(Fault(kind=kind, on=on, count=2 if kind == "hang_up" else 1))
        with pytest.raises(BackendError):
            await steps[on]()
        await steps[on]()


async def test_a_label_that_reads_back_differently_is_seen() -> None:
    """What the engine says counts, not what it was told."""
    async with engine(Script()) as (server, backend):
        server.faults.arm(Fault(kind="other_label", on="label"))
        await backend.set_version(FIRST)
        assert await backend.read_version() is None


@pytest.mark.parametrize("on", ["pause", "reload"])
async def test_a_step_that_hangs_has_an_end(on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline turns a hanging engine into one that failed."""
    monkeypatch.setattr(vllm_control, "PAUSE_SECONDS_MAX", 0.1)
    monkeypatch.setattr(vllm_control, "LOAD_SECONDS_MAX", 0.1)
    async with engine(Script()) as (server, backend):
        ref = WeightRef(how="reload", path="/w", version=FIRST)
        step = partial(backend.pause, "wait") if on == "pause" else partial(backend.load_weights, ref)
        server.faults.arm(Fault(kind="hang", on=on))
        with pytest.raises(BackendError, match=r"was not done within 0\.1 s"):
            await step()


async def test_a_cache_that_can_not_be_cleared_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again for a while, then said: old prefixes under new weights are of no policy."""
    monkeypatch.setattr(vllm_control, "CLEAR_PAUSE_S", 0.0)
    async with engine(Script()) as (server, backend):
        server.faults.arm(Fault(kind="not_done", on="cache", count=2))
        await backend.clear_cache()
        server.faults.arm(Fault(kind="not_done", on="cache", count=None))
        with pytest.raises(BackendError, match="did not succeed"):
            await backend.clear_cache()


async def test_frozen_calls_lose_their_prefixes_too() -> None:
    """A cache that is cleared under calls that are kept is cleared all the same, and they go on."""
    async with engine(Script(turns=[TURN], latency=SLOW)) as (server, backend):
        got: list[Generation] = []

        async def one() -> None:
            got.append(await backend.generate(request()))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            with trio.fail_after(5):
                while not server.engine.running:  # noqa: ASYNC110 - it has no event for tests
                    await trio.sleep(0.005)
            await backend.pause("keep")
            await backend.clear_cache()
            await backend.set_version(SECOND)
            await backend.resume()
        assert list(got[0].token_ids) == TURN
        assert {span.version for span in got[0].versions} <= {0, 2}


async def test_a_server_without_control_has_the_version_it_is_said_to_have() -> None:
    """It calls its weights by their first name for ever; whoever started it with others says so."""
    for scale_out in (True, False):
        async with engine(Script(turns=[TURN], dev_mode=False, lora=False, scale_out=scale_out)) as (_, backend):
            await backend.set_version(SECOND)
            assert await backend.read_version() == SECOND
            generation = await backend.generate(request())
            assert generation.versions == (VersionSpan(start=0, end=100, epoch=0, version=2),)
            for how in ("reload", "lora"):
                with pytest.raises(Unsupported):
                    await backend.load_weights(WeightRef(how=how, path="/w", version=FIRST))


async def test_scores_are_of_the_very_tokens() -> None:
    """Each value is that of its token at its place, to the end of a full context."""
    async with engine(Script(max_model_len=64)) as (_, backend):
        for length in (40, 63, 64):
            scores = await backend.score(PROMPT[:length], 5)
            assert list(scores) == [scripted_logprob(PROMPT[at], at) for at in range(5, length)]
        assert len(await backend.score(PROMPT, 64)) == 0
        with pytest.raises(ValueError, match="starts between"):
            await backend.score(PROMPT, 0)


async def test_scoring_does_end_the_scripted_engine_of_a_cpu_with_adapters() -> None:
    """The control run: it is kept from one that can't take it, and one that is asked anyway is gone."""
    async with engine(Script(cpu=True)) as (_, backend):
        with pytest.raises(Unsupported):
            await backend.score(PROMPT, 1)
        backend._found = msgspec.structs.replace(await backend.probe(), scores=True)
        with pytest.raises(BackendError) as caught:
            await backend.score(PROMPT, 1)
        assert caught.value.status == 500
