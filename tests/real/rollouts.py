"""Rollouts of several turns on real engines, through the pool and the session that jobs use."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from prorld.domain.job import AgentLimits, JobSpec, Sampling
from prorld.domain.messages import Message
from prorld.inference.contract import Backend
from prorld.inference.embedded import EmbeddedEngine, run_embedded_engine
from prorld.inference.engine_http import EngineHttp
from prorld.inference.llamacpp import LlamaCppBackend
from prorld.inference.models import PooledModels
from prorld.inference.policies import Policies, PolicySource
from prorld.inference.pool import BackendPool
from prorld.inference.session import ModelSession
from prorld.inference.vllm import VllmBackend
from prorld.kit.lanes import Lane
from prorld.metrics import Metrics
from prorld.wire.ops import AddBackend, BackendKindName

CLIENTS: dict[str, Callable[[str], Backend]] = {"vllm": VllmBackend, "llamacpp": LlamaCppBackend}


class Rollouts:
    """The engines of one pool, and conversations on them."""

    def __init__(self, pool: BackendPool, models: PooledModels) -> None:
        self.pool = pool
        self._models = models

    def open(self, spec: JobSpec) -> AbstractAsyncContextManager[ModelSession]:
        """A leased engine for as long as the block lasts."""
        return self._models.open(spec, 1, lambda number, turn: None)

    async def one(
        self, name: str, opening: Sequence[Message], answers: Sequence[Message], **wishes: Any
    ) -> ModelSession:
        """A conversation: the opening, a turn of the policy, and one more turn after each answer."""
        async with self.open(job_spec(name, turns=len(answers) + 1, **wishes)) as session:
            await session.start(opening)
            await session.turn()
            for answer in answers:
                await session.observe([answer])
                await session.turn()
            return session


def job_spec(name: str, *, turns: int, max_tokens: int, group_id: str | None = None, context: int = 4096) -> JobSpec:
    """A job that samples from the model's own distribution."""
    return JobSpec(
        job_id=name,
        tenant="t",
        handler="h",
        instance={},
        group_id=group_id,
        sampling=Sampling(max_tokens=max_tokens),
        agent=AgentLimits(max_turns=turns, max_context_tokens=context),
    )


@asynccontextmanager
async def rollouts(
    kind: BackendKindName, *urls: str, tokenizer: Path, client: Callable[[str], Backend] | None = None
) -> AsyncIterator[Rollouts]:
    """A pool of these engines; ``client`` makes another client than the usual one for their addresses."""
    lane = Lane("tokens", 1)
    make = client or CLIENTS[kind]
    pool = BackendPool({kind: lambda request: make(request.url)}, Metrics())
    models = PooledModels(pool, Policies({"default": PolicySource(tokenizer=str(tokenizer))}, lane), lane)
    async with trio.open_nursery() as nursery:
        await nursery.start(pool.run)
        for url in urls:
            await pool.add(AddBackend(url=url, kind=kind))
        yield Rollouts(pool, models)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def embedded(gguf: Path, *, slots: int, context: int) -> AsyncIterator[str]:
    """The embedded engine; yields its address."""
    async with trio.open_nursery() as nursery:
        start = partial(run_embedded_engine, model_path=gguf, slots=slots, context_per_slot=context)
        engine: EmbeddedEngine = await nursery.start(start)
        yield engine.url
        nursery.cancel_scope.cancel()


class Tap:
    """What was sent to the engines and what they said, as it went through the wire."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[dict[str, Any], Any]] = []
        plain = EngineHttp.call

        async def call(http: EngineHttp, method: str, path: str, decoder: Any, payload: Any = None, *rest: Any) -> Any:
            reply = await plain(http, method, path, decoder, payload, *rest)
            if isinstance(payload, dict):
                self.seen.append((payload, reply))
            return reply

        monkeypatch.setattr(EngineHttp, "call", call)
