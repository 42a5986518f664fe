"""The vLLM client and the tokens of a whole rollout, against real vLLM servers with a small real model."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import pytest
import trio

from prorld.domain.job import AgentLimits, JobSpec, Sampling
from prorld.domain.messages import Message, system, user
from prorld.domain.versions import PolicyVersion
from prorld.inference.contract import Generation, GenerationRequest, WeightRef
from prorld.inference.embedded import EmbeddedEngine, run_embedded_engine
from prorld.inference.llamacpp import LlamaCppBackend
from prorld.inference.models import PooledModels
from prorld.inference.openai import OpenAIBackend
from prorld.inference.policies import Policies, PolicySource
from prorld.inference.pool import BackendPool
from prorld.inference.prometheus_text import metric_values
from prorld.inference.text_view import ConversationView
from prorld.inference.vllm import VllmBackend
from prorld.kit.cleanup import shielded
from prorld.kit.http_client import HttpClient
from prorld.kit.lanes import Lane
from prorld.metrics import Metrics
from prorld.testing.engine_contract import ENGINE_CONTRACT, EngineCheck, EngineUnderTest, assert_whole
from prorld.tokens.context import TokenContext
from prorld.tokens.jinja_renderer import JinjaRenderer
from prorld.tokens.tokenizer import HfTokenizer
from prorld.tokens.verify import verify
from prorld.wire.ops import AddBackend
from tests.real.conftest import PYTHON
from tests.real.vllm_server import CONTEXT_TOKENS, VllmServer, vllm_server

WAIT_SECONDS_MAX = 60.0

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="no vLLM here: run ./just test-real engines, or set PRORLD_TEST_VLLM"),
]

TEXTS = (
    "The quick brown fox, it's 12345 years old.",
    "  two blanks\n\n\tand a tab \r\n",
    "naïve 中文 🙂 e\u0301",
    "<|im_end|> and <|im_start|>user are control tokens here",
    "def f(x):\n    return x**2  # 3.14\n",
    "",
)
# What any model of language goes on with in one way.
SURE = ("1, 2, 3, 4, 5, 6, 7, 8, 9, 10,", "Monday, Tuesday, Wednesday,", "a b c d e f g h i j")
GREEDY = Sampling(temperature=0.0)
# llama.cpp rounds what it multiplies with to 8 bits, vLLM to bfloat16.
GAP_MEAN_MAX = 0.1
CONVERSATION = (user("What is 12 plus 30?"), Message(role="assistant", content="42"), user("And  7?\n"))


@pytest.fixture(scope="session", params=[True, False], ids=["scale-out", "plain"])
def server(
    request: pytest.FixtureRequest, vllm_python: str, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    """One server of each kind for all tests that want it."""
    with vllm_server(vllm_python, model, tmp_path_factory.mktemp("vllm"), scale_out=request.param) as ready:
        yield ready


@asynccontextmanager
async def client(server: VllmServer) -> AsyncIterator[VllmBackend]:
    """A probed client that leaves no socket behind."""
    backend = VllmBackend(server.url)
    try:
        await backend.probe()
        yield backend
    finally:
        await backend.aclose()
    assert backend.statistics().live == 0


@asynccontextmanager
async def llama(gguf: Path) -> AsyncIterator[LlamaCppBackend]:
    """The other engine on the file itself."""
    async with trio.open_nursery() as nursery:
        start = partial(run_embedded_engine, model_path=gguf, slots=1, context_per_slot=256)
        embedded: EmbeddedEngine = await nursery.start(start)
        backend = LlamaCppBackend(embedded.url)
        try:
            await backend.probe()
            yield backend
        finally:
            await backend.aclose()
        nursery.cancel_scope.cancel()


def prompt_of(tokenizer: HfTokenizer, *messages: Message) -> list[int]:
    """A conversation up to the assistant's turn."""
    return [token for part in JinjaRenderer(tokenizer).render(messages, ()) for token in part.ids]


def under_test(backend: VllmBackend, tokenizer: HfTokenizer) -> EngineUnderTest:
    """What the contract needs to know."""
    return EngineUnderTest(
        backend=backend,
        prompt=prompt_of(tokenizer, system("Be kind."), user("Hello")),
        vocabulary=49152,
        long_tokens=600,
    )


async def ask(url: str, path: str, payload: dict[str, Any]) -> Any:
    """What the server answers beside the client."""
    http = HttpClient(url, connections_max=1, response_bytes_max=1 << 20)
    try:
        body = msgspec.json.encode(payload)
        response = await http.request("POST", path, body, (("content-type", "application/json"),))
    finally:
        http.close()
    assert response.status == 200, response.excerpt()
    return msgspec.json.decode(response.body)


@pytest.mark.parametrize("check", ENGINE_CONTRACT, ids=lambda check: check.__name__)
async def test_it_keeps_the_contract(check: EngineCheck, server: VllmServer, tokenizer: HfTokenizer) -> None:
    """Every check holds on the token endpoint and on completions."""
    async with client(server) as backend:
        await check(under_test(backend, tokenizer))


async def test_a_probe_finds_what_the_server_was_started_with(server: VllmServer) -> None:
    """Endpoints, control routes, context, weights and the place of the model are those of the command line."""
    async with client(server) as backend:
        found = await backend.probe()
        assert (found.native_generate, found.control) == (server.scale_out, server.scale_out)
        assert (found.model, found.max_context_tokens) == ("smollm2", CONTEXT_TOKENS)
        assert (found.version, found.model_path) == (0, str(server.model))


async def test_a_seed_does_not_end_it(server: VllmServer, tokenizer: HfTokenizer) -> None:
    """Calls with seeds and prompts that are read in pieces leave the engine alive, whatever became of the seeds."""
    async with client(server) as backend:
        engine = under_test(backend, tokenizer)

        async def one(number: int) -> None:
            request = engine.request(prompt=[1, 198, 1000 + number] * 300, max_tokens=4, seed=number)
            assert_whole(await backend.generate(request), request)

        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(one, number)
        assert await backend.healthy()


async def test_both_tokenize_alike(server: VllmServer, tokenizer: HfTokenizer) -> None:
    """Texts and conversations have the same ids here and there."""
    for text in TEXTS:
        said = await ask(server.url, "/tokenize", {"prompt": text, "add_special_tokens": False})
        assert said["tokens"] == tokenizer.encode(text), text
    messages = [{"role": message.role, "content": message.content} for message in CONVERSATION]
    said = await ask(server.url, "/tokenize", {"messages": messages, "add_generation_prompt": True})
    assert said["tokens"] == prompt_of(tokenizer, *CONVERSATION)


async def test_a_whole_rollout_is_sound(server: VllmServer) -> None:
    """Three turns over the pool, with the tokenizer that the engine's model brings: every token is accounted for."""
    spec = JobSpec(
        job_id="real-1",
        tenant="t",
        handler="h",
        instance={},
        sampling=Sampling(max_tokens=40, seed=3),
        agent=AgentLimits(max_turns=3, max_context_tokens=CONTEXT_TOKENS),
    )
    lane = Lane("tokens", 1)
    pool = BackendPool({"vllm": lambda request: VllmBackend(request.url)}, Metrics())
    models = PooledModels(pool, Policies({"default": PolicySource()}, lane), lane)
    async with trio.open_nursery() as nursery:
        await nursery.start(pool.run)
        backend_id = (await pool.add(AddBackend(url=server.url, kind="vllm"))).backend_id
        async with models.open(spec, 1, lambda number, turn: None) as session:
            await session.start([system("Answer in one line."), user("What is 12 plus 30?")])
            for number in range(3):
                turn = await session.turn()
                assert 1 <= turn.sampled <= 40
                if number < 2:
                    await session.observe([user(f"Are you sure, <|im_end|> number {number}?")])
            assert (await session.turn()).stop is not None
        nursery.cancel_scope.cancel()
    assert verify(session.branches, session.calls) == []
    assert (session.turns, len(session.calls), session.backends_used()) == (3, 3, [backend_id])
    assert session.versions_used() == [0]
    assert {call.exact for call in session.calls} == {True}
    counts = session.token_counts()
    assert counts.sampled == sum(sum(branch.mask) for branch in session.branches)
    assert len(session.branches) == 1


async def test_two_engines_of_one_model_agree(server: VllmServer, tokenizer: HfTokenizer, gguf: Path) -> None:
    """Where the model is sure, vLLM and llama.cpp say the same with the same certainty: the weights are the model's."""
    async with client(server) as backend, llama(gguf) as other:
        engine = under_test(backend, tokenizer)
        for text in SURE:
            wish: dict[str, Any] = {"prompt": tokenizer.encode(text), "max_tokens": 6, "sampling": GREEDY}
            here = await backend.generate(engine.request(**wish))
            there = await other.generate(engine.request(**wish))
            assert here.token_ids == there.token_ids, text
            gaps = [abs(one - two) for one, two in zip(here.logprobs, there.logprobs, strict=True)]
            assert fmean(gaps) < GAP_MEAN_MAX, (text, gaps)


@pytest.mark.parametrize("server", [True], ids=["scale-out"], indirect=True)
async def test_weights_are_loaded_from_a_path_under_a_version(server: VllmServer, tokenizer: HfTokenizer) -> None:
    """A reload of the same weights changes the version and nothing else; the cache is cold after it."""
    async with client(server) as backend:
        engine = under_test(backend, tokenizer)
        prompt = tokenizer.encode(SURE[0] * 12)
        before = await backend.score(array("i", prompt), 1)
        try:
            await backend.pause("abort")
            version = PolicyVersion(1, 5)
            await backend.load_weights(WeightRef(how="reload", path=str(server.model), version=version))
            await backend.clear_cache()
            await backend.set_version(version)
            assert await backend.read_version() == version
            await backend.resume()
            request = engine.request(prompt=prompt, max_tokens=4)
            generation = await backend.generate(request)
            assert {(span.epoch, span.version) for span in generation.versions} == {(1, 5)}
            assert list(await backend.score(array("i", prompt), 1)) == pytest.approx(list(before), abs=0.05)
        finally:
            with shielded(WAIT_SECONDS_MAX, "taking the version back"):
                await backend.resume()  # noqa: ASYNC102  (shielded with a deadline by the line above)
                await ask(server.url, "/update_weight_version", {"new_version": "default"})  # noqa: ASYNC102  (as above)


async def test_its_openai_routes_can_be_spoken_to_in_text(server: VllmServer, tokenizer: HfTokenizer) -> None:
    """Found out for what it is, it is exact; spoken to as any text engine, it says sensible things and is not."""
    whole = OpenAIBackend(f"{server.url}/v1")
    text = OpenAIBackend(f"{server.url}/v1", text_only=True)
    try:
        found = await whole.probe()
        assert (found.exact, found.details["spoken_to_as"]) == (True, "vllm")
        assert not (await text.probe()).exact
        context = TokenContext(JinjaRenderer(tokenizer))
        context.apply(context.plan_start([user("Say hello.")], ()))
        engine = under_test(backend := VllmBackend(server.url), tokenizer)
        view = ConversationView(JinjaRenderer(tokenizer), context)
        request = engine.request(
            prompt=context.prompt(), sampling=GREEDY, stop_token_ids=(2,), max_tokens=40, view=view
        )
        said = await text.generate(request)
        assert_whole(said, request)
        await backend.probe()
        exactly = await backend.generate(request)
        assert (said.exact, exactly.exact) == (False, True)
        assert tokenizer.decode(said.token_ids) == tokenizer.decode(exactly.token_ids)
        await backend.aclose()
    finally:
        await whole.aclose()
        await text.aclose()


@pytest.mark.parametrize("server", [True], ids=["scale-out"], indirect=True)
async def test_an_abort_and_new_weights_are_told_by_token(server: VllmServer, tokenizer: HfTokenizer) -> None:
    """A call that goes through a change of version and is aborted comes back with its part and both versions."""
    async with client(server) as backend:
        engine = under_test(backend, tokenizer)
        request = engine.request(prompt=tokenizer.encode(SURE[0]), max_tokens=900, sampling=GREEDY)
        got: list[Generation] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_collect, backend, request, got)
            await more_tokens(server)
            await ask(server.url, "/update_weight_version", {"new_version": PolicyVersion(0, 1).label})
            await more_tokens(server)
            await backend.abort([request.request_id])
        await ask(server.url, "/update_weight_version", {"new_version": "default"})
    generation = got[0]
    assert_whole(generation, request)
    assert generation.finish == "abort"
    assert [(span.epoch, span.version) for span in generation.versions] == [(0, 0), (0, 1)]
    assert generation.versions_exact


async def more_tokens(server: VllmServer) -> None:
    """Until the engine has sampled a few tokens more."""
    name = "vllm:generation_tokens_total"
    http = HttpClient(server.url, connections_max=1, response_bytes_max=1 << 22)

    async def sampled() -> float:
        page = (await http.request("GET", "/metrics")).body.decode()
        return sum(metric_values(page, (name,))[name])

    try:
        with trio.fail_after(WAIT_SECONDS_MAX):
            before = await sampled()
            while await sampled() < before + 3:  # noqa: ASYNC110 - an engine tells only when it is asked
                await trio.sleep(0.02)
    finally:
        http.close()


async def _collect(backend: VllmBackend, request: GenerationRequest, into: list[Generation]) -> None:
    into.append(await backend.generate(request))
