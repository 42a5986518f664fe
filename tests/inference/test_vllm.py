"""The vLLM client: what it asks for, and what it makes of versions, aborts, pauses and loads."""

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
from prorld.errors import BackendError, ContextOverflow, EngineBusy
from prorld.inference.contract import Generation, GenerationRequest
from prorld.inference.prometheus_text import metric_values
from prorld.inference.vllm import VllmBackend
from prorld.inference.vllm_wire import may_be_cpu_build
from prorld.testing.scripted_engine.routes import ScriptedServer
from prorld.testing.scripted_engine.script import Latency, Script, scripted_logprob
from prorld.testing.scripted_engine.serve import Serving, serve_scripted
from tests.inference.listening import Listening

TURN = list(range(100, 200))
SLOW = Latency(decode_token_s=0.002)


@asynccontextmanager
async def engine(script: Script, **options: Any) -> AsyncIterator[tuple[Listening, VllmBackend]]:
    """A server in this process and its probed client."""
    server = Listening(script)
    async with trio.open_nursery() as nursery:
        serving: Serving = await nursery.start(partial(serve_scripted, server))
        backend = VllmBackend(serving.url, **options)
        await backend.probe()
        yield server, backend
        await backend.aclose()
        nursery.cancel_scope.cancel()


def request(prompt: list[int] | None = None, **changes: Any) -> GenerationRequest:
    """A request for up to a hundred tokens of the script."""
    wish: dict[str, Any] = {"max_tokens": 100, "sampling": Sampling(), "stop_token_ids": (), "request_id": "r-1"}
    return GenerationRequest(token_ids=array("i", prompt or [1, 2, 3]), session="job-1", **{**wish, **changes})


async def running(server: ScriptedServer) -> None:
    """Until a call runs in the engine."""
    with trio.fail_after(5):
        await trio.lowlevel.checkpoint()
        while not server.engine.running:  # noqa: ASYNC110 - it has no event for tests
            await trio.sleep(0.005)


async def test_logprobs_stand_beside_their_tokens() -> None:
    """Each log-probability is that of its token at its place, on both endpoints."""
    for scale_out in (True, False):
        async with engine(Script(turns=[TURN], scale_out=scale_out)) as (_, backend):
            generation = await backend.generate(request())
            assert list(generation.token_ids) == TURN
            assert list(generation.logprobs) == [scripted_logprob(token, 3 + at) for at, token in enumerate(TURN)]


async def test_only_what_was_asked_for_is_sent() -> None:
    """The defaults leave the engine's distribution alone; what differs is named in the request."""
    async with engine(Script(), model="scripted") as (server, backend):
        await backend.generate(request())
        asked = server.last("/inference/v1/generate")
        body, headers = msgspec.json.decode(asked.body), asked.headers
        assert headers["x-session-id"] == "job-1"
        assert body["token_ids"] == [1, 2, 3]
        assert {"cache_salt", "priority"}.isdisjoint(body)
        assert body["sampling_params"] == {
            "max_tokens": 100,
            "temperature": 1.0,
            "top_p": 1.0,
            "stop_token_ids": [],
            "logprobs": 0,
            "skip_special_tokens": False,
            "detokenize": False,
        }
        sampling = Sampling(temperature=0.5, top_p=0.9, top_k=20, min_p=0.1, stop=["END"])
        await backend.generate(request(sampling=sampling, seed=5, salt="v7", priority=-1, stop_token_ids=(9,)))
        body = server.last_body("/inference/v1/generate")
        params = body["sampling_params"]
        assert (params["temperature"], params["top_p"], params["top_k"], params["min_p"]) == (0.5, 0.9, 20, 0.1)
        assert (params["seed"], params["stop"], params["detokenize"]) == (5, ["END"], True)
        assert params["stop_token_ids"] == [9]
        # The higher one goes first here, the lower one there.
        assert (body["cache_salt"], body["priority"]) == ("v7", 1)


async def test_a_seed_is_kept_from_cpu_builds() -> None:
    """A seed ends the engine of a CPU build, so it is left out there and named, whatever the build calls itself."""
    for script in (Script(build="0.32.0+cpu"), Script(build="0.32.0", cpu=True)):
        async with engine(script) as (server, backend):
            generation = await backend.generate(request(seed=5))
            assert generation.ignored == ("seed",)
            assert "seed" not in server.last_body("/inference/v1/generate")["sampling_params"]
    async with engine(Script(build="0.32.0+cpu"), takes_seed=True) as (server, backend):
        assert (await backend.generate(request(seed=5))).ignored == ()


async def test_a_seed_does_end_the_scripted_engine_of_a_cpu() -> None:
    """The control run: a client that is told to send seeds loses such an engine."""
    async with engine(Script(cpu=True), takes_seed=True) as (_, backend):
        for seed in (5, None):
            with pytest.raises(BackendError) as caught:
                await backend.generate(request(seed=seed))
            assert caught.value.status == 500


@pytest.mark.parametrize(
    ("labels", "is_cpu"),
    [
        ('block_size="16",hash_block_size="128",kv_cache_memory_bytes="None"', False),
        ('block_size="16"', False),
        ('_block_size_resolved="True",block_size="128",kv_cache_memory_bytes="None"', True),
        ('block_size="32",kv_cache_memory_bytes="1073741824"', True),
        ('block_size="16",cpu_kvcache_space_bytes="4294967296"', True),
    ],
)
def test_a_cpu_build_is_known_by_its_cache(labels: str, is_cpu: bool) -> None:
    """The block size or a size in bytes give it away; other labels that end alike do not."""
    page = f"# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{{labels}}} 1.0\n"
    assert may_be_cpu_build("0.32.0", page) is is_cpu
    assert may_be_cpu_build("0.32.0+cpu", page)
    assert may_be_cpu_build("0.32.0", "")


async def test_a_prompt_that_just_fills_the_context_is_an_overflow() -> None:
    """Completions answer such a prompt with a complaint about ``max_tokens``; other complaints stay what they are."""
    async with engine(Script(scale_out=False, max_model_len=16)) as (_, backend):
        with pytest.raises(ContextOverflow, match="max_tokens must be at least 1"):
            await backend.generate(request(list(range(16))))
        with pytest.raises(BackendError) as caught:
            await backend.generate(request([1] * 15, max_tokens=0))
        assert not isinstance(caught.value, ContextOverflow)


async def test_tokens_know_the_weights_that_made_them() -> None:
    """New weights in the middle of a call split its versions at the token where they came."""
    async with engine(Script(turns=[TURN], latency=SLOW)) as (server, backend):
        server.engine.set_label(PolicyVersion(0, 3).label)
        got: list[Generation] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_collect, backend, request(), got)
            await running(server)
            await trio.sleep(0.05)
            server.engine.set_label(PolicyVersion(1, 2).label)
        first, second = got[0].versions
        assert (first.start, first.epoch, first.version) == (0, 0, 3)
        assert (second.end, second.epoch, second.version) == (100, 1, 2)
        assert first.end == second.start
        assert 0 < first.end < 100
        assert got[0].versions_exact


async def test_foreign_labels_are_no_versions() -> None:
    """Weights under a label that is not ours are of no known version, and the reply says so."""
    async with engine(Script(turns=[TURN])) as (server, backend):
        server.engine.set_label("step-7-of-somebody")
        generation = await backend.generate(request())
        assert generation.versions == (VersionSpan(start=0, end=100, version=None),)
        assert not generation.versions_exact
        assert (await backend.probe()).version is None


@pytest.mark.parametrize("dev_mode", [True, False])
async def test_without_spans_versions_are_exact_only_where_weights_stand_still(dev_mode: bool) -> None:
    """A server that says no spans may have changed its weights meanwhile if a control route is open."""
    script = Script(turns=[TURN], scale_out=False, spans_in_completions=False, dev_mode=dev_mode)
    async with engine(script) as (_, backend):
        generation = await backend.generate(request())
        assert generation.versions == (VersionSpan(start=0, end=100, epoch=0, version=0),)
        assert generation.versions_exact is not dev_mode


@pytest.mark.parametrize("scale_out", [True, False])
async def test_an_abort_returns_what_there_is_and_the_rest_can_be_asked_for(scale_out: bool) -> None:
    """Partial tokens come back with their evidence, and the turn goes on from them on another call."""
    script = Script(turns=[TURN], latency=SLOW, scale_out=scale_out)
    async with engine(script) as (server, backend):
        got: list[Generation] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_collect, backend, request(), got)
            await running(server)
            await trio.sleep(0.05)
            if scale_out:
                await backend.abort(["r-1"])
            else:
                server.engine.abort(["cmpl-r-1-0"])
        partial_ids = list(got[0].token_ids)
        assert got[0].finish == "abort"
        assert partial_ids == TURN[: len(partial_ids)]
        assert 0 < len(partial_ids) < 100
        rest = await backend.generate(request([1, 2, 3, *partial_ids], request_id="r-2"))
        assert partial_ids + list(rest.token_ids) == TURN


async def test_an_abort_by_the_plain_id_would_do_nothing() -> None:
    """The control run: the server knows calls by its own names only, and says 200 to any other."""
    async with engine(Script(turns=[TURN], latency=SLOW)) as (server, backend):
        got: list[Generation] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_collect, backend, request(), got)
            await running(server)
            server.engine.abort(["r-1"])
        assert len(got[0].token_ids) == 100


async def test_a_paused_engine_is_busy() -> None:
    """A pause is neither a fault nor a refusal."""
    async with engine(Script()) as (server, backend):
        server.engine.pause("abort", clear_cache=True)
        with pytest.raises(EngineBusy):
            await backend.generate(request())
        server.engine.resume()
        assert (await backend.generate(request())).token_ids


async def test_the_load_is_read_from_the_metrics() -> None:
    """Running calls are seen while they run."""
    async with engine(Script(turns=[TURN], latency=SLOW)) as (server, backend), trio.open_nursery() as nursery:
        nursery.start_soon(backend.generate, request())
        await running(server)
        assert (await backend.load()).running == 1
        nursery.cancel_scope.cancel()


async def test_an_engine_full_of_calls_still_answers_for_its_health() -> None:
    """Health, load and aborts do not wait behind calls that hold every socket."""
    script = Script(turns=[TURN], latency=Latency(fixed_s=60.0))
    async with engine(script, connections_max=2) as (server, backend), trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(backend.generate, request(request_id=f"r-{number}"))
        await running(server)
        with trio.fail_after(5):
            assert await backend.healthy()
            assert (await backend.load()).running in (1, 2)
            await backend.abort(["r-0"])
        assert backend.statistics().live == 2
        nursery.cancel_scope.cancel()


async def test_the_prefix_cache_is_reported() -> None:
    """The second turn of a conversation finds the first in the cache."""
    async with engine(Script(turns=[TURN])) as (_, backend):
        prompt = list(range(64))
        first = await backend.generate(request(prompt))
        second = await backend.generate(request([*prompt, *first.token_ids, 5, 6]))
        assert (first.cached_tokens, second.cached_tokens) == (0, 160)


async def test_a_probe_refuses_what_is_not_served() -> None:
    """A model that is not there, or nobody there, is said at the probe."""
    async with engine(Script()) as (_, backend):
        other = VllmBackend(backend.url, model="other")
        with pytest.raises(BackendError, match="does not serve 'other'"):
            await other.probe()
        await other.aclose()
    gone = VllmBackend(backend.url)
    assert not await gone.healthy()
    with pytest.raises(BackendError) as caught:
        await gone.probe()
    assert caught.value.stable_code == "engine_unreachable"


def test_figures_are_found_on_a_prometheus_page() -> None:
    """Labels, comments, foreign lines and broken values disturb nothing."""
    page = '# HELP a b\na{x="1"} 2\na{x="} 3"} 4 1700000000\nab 5\na nan-sense\n\n  \nb 1e3\n'
    assert metric_values(page, ("a", "b", "c")) == {"a": [2.0, 4.0], "b": [1000.0], "c": []}


async def _collect(backend: VllmBackend, wish: GenerationRequest, into: list[Generation]) -> None:
    into.append(await backend.generate(wish))
