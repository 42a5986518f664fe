"""The clients of SGLang, of the token endpoint and of text engines keep the contract against what plays those engines.

What an engine does not say can't be found wrong: each kind names the faults that leave no trace in its replies.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
import trio

from prorld.inference.openai import OpenAIBackend
from prorld.inference.prorl import ProrlBackend
from prorld.inference.sglang import SglangBackend
from prorld.testing.byte_tokenizer import byte_ids
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
from prorld.testing.scripted_engine.routes import ScriptedServer
from prorld.testing.scripted_engine.script import Fault, FaultKind, Latency, Script
from prorld.testing.scripted_engine.serve import Serving, serve_scripted

SCRIPT = Script(max_model_len=256, random_tokens_mean=60.0, latency=Latency(decode_token_s=0.001))


# One token is one character, so that text engines are given and give what was sampled.
TEXT = msgspec.structs.replace(SCRIPT, flavour="openai", vocabulary=128)
FRAME = byte_ids("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n")


class TextOnly:
    """A prompt of bytes as text."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._text = bytes(list(ids)).decode()

    def prompt(self) -> str:
        """The text."""
        return self._text

    def messages(self) -> list[dict[str, Any]]:
        """It as one message."""
        return [{"role": "user", "content": self._text}]

    def encode(self, text: str) -> list[int]:
        """Bytes again."""
        return list(text.encode())


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """A kind as it is tested. ``silent`` ones do not tell their load; ``unseen`` are the faults that no reply shows."""

    script: Script
    make: Any
    told: dict[str, Any] = {}
    silent: bool = False
    unseen: frozenset[FaultKind] = frozenset()


def in_flight(server: ScriptedServer) -> Callable[[], int]:
    """The engine's calls, for those that do not say."""
    return lambda: server.engine.running + server.engine.waiting


KINDS = {
    "sglang": Kind(
        script=msgspec.structs.replace(SCRIPT, flavour="sglang"), make=SglangBackend, unseen=frozenset({"prompt_ids"})
    ),
    "openai-completions": Kind(
        script=TEXT,
        make=OpenAIBackend,
        told={"context_tokens": SCRIPT.max_model_len, "repeats_with_seed": True, "view": TextOnly},
        silent=True,
        unseen=frozenset({"prompt_ids", "prompt_length", "other_ids", "spans"}),
    ),
    "openai-chat": Kind(
        script=msgspec.structs.replace(TEXT, scale_out=False),
        make=OpenAIBackend,
        told={"context_tokens": SCRIPT.max_model_len - len(FRAME), "repeats_with_seed": True, "view": TextOnly},
        silent=True,
        unseen=frozenset({"prompt_ids", "prompt_length", "other_ids", "spans", "lengths"}),
    ),
    "prorl": Kind(
        script=msgspec.structs.replace(SCRIPT, flavour="prorl"),
        make=ProrlBackend,
        told={"context_tokens": SCRIPT.max_model_len, "repeats_with_seed": True},
        silent=True,
        unseen=frozenset({"prompt_ids", "prompt_length", "other_ids", "spans"}),
    ),
}


@asynccontextmanager
async def under_test(kind: Kind) -> AsyncIterator[EngineUnderTest]:
    """The client on an engine in this process."""
    server = ScriptedServer(kind.script)

    async def arm(fault: Fault) -> None:
        server.faults.arm(fault)
        await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        serving: Serving = await nursery.start(partial(serve_scripted, server))
        backend = kind.make(serving.url)
        await backend.probe()
        engine = EngineUnderTest(
            backend=backend, prompt=range(40, 60), vocabulary=512, long_tokens=200, arm=arm, **kind.told
        )
        engine.count = in_flight(server) if kind.silent else None
        yield engine
        await backend.aclose()
        assert backend.statistics().live == 0
        nursery.cancel_scope.cancel()


every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@every_kind
@pytest.mark.parametrize("check", ENGINE_CONTRACT, ids=lambda check: check.__name__)
async def test_it_keeps_the_contract(check: EngineCheck, kind: Kind) -> None:
    """Every check holds."""
    async with under_test(kind) as engine:
        await check(engine)


FAULTS = [
    pytest.param(kind, check, id=f"{name}-{check[0].kind}-{check[0].status}")
    for name, kind in KINDS.items()
    for check in FAULT_CONTRACT
    if check[0].kind not in kind.unseen
]


@pytest.mark.parametrize(("kind", "check"), FAULTS)
async def test_it_types_every_fault(kind: Kind, check: FaultCheck) -> None:
    """Whatever the engine does wrong, the call fails with the right class and the next one is well."""
    async with under_test(kind) as engine:
        await fault_is_typed(engine, check)


@pytest.mark.parametrize("check", SCORE_FAULTS, ids=lambda check: f"{check[0].kind}-{check[0].status}")
async def test_sglang_types_every_fault_of_a_score(check: FaultCheck) -> None:
    """Scores are judged as samples are."""
    if check[0].kind == "prompt_ids":
        pytest.skip("it does not echo prompts")
    async with under_test(KINDS["sglang"]) as engine:
        await score_fault_is_typed(engine, check)


@every_kind
async def test_it_does_not_hang_with_the_engine(kind: Kind) -> None:
    """An engine that never answers holds nobody."""
    async with under_test(kind) as engine:
        await a_hanging_engine_is_left_by_the_caller(engine)
