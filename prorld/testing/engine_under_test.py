"""An engine as the checks of its contract see it, and what can be read off one of its replies."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import trio

from prorld.domain.branch import VersionSpan
from prorld.domain.job import Sampling
from prorld.errors import BackendError
from prorld.inference.contract import Backend, Generation, GenerationRequest, TextView
from prorld.testing.scripted_engine.script import Fault

__all__ = ["SECONDS_MAX", "EngineUnderTest", "assert_whole", "error_of"]

SECONDS_MAX = 60.0
_POLL_SECONDS = 0.02


@dataclass(kw_only=True)
class EngineUnderTest:
    """A probed client and what the checks need to know of the engine behind it.

    ``prompt`` is anything ordinary; ``long_tokens`` keep the engine busy for a while; ``repeats_with_seed`` and
    ``repeats_when_greedy`` say what it promises for calls that run alone. ``context_tokens`` and ``count`` are for an
    engine that tells neither its context nor its load, ``view`` for one that takes no ids.
    """

    backend: Backend
    prompt: Sequence[int]
    vocabulary: int
    long_tokens: int
    repeats_with_seed: bool = False
    repeats_when_greedy: bool = False
    arm: Callable[[Fault], Awaitable[None]] | None = None
    context_tokens: int | None = None
    count: Callable[[], int] | None = None
    view: Callable[[Sequence[int]], TextView] | None = None
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def request(self, *, prompt: Sequence[int] | None = None, max_tokens: int = 8, **changes: Any) -> GenerationRequest:
        """A request with an id of its own."""
        number = next(self._numbers)
        ids = array("i", self.prompt if prompt is None else prompt)
        wish: dict[str, Any] = {
            "sampling": Sampling(),
            "stop_token_ids": (),
            "session": f"contract-{number}",
            "view": None if self.view is None else self.view(ids),
            **changes,
        }
        return GenerationRequest(
            token_ids=ids,
            max_tokens=max_tokens,
            request_id=f"contract-{number}",
            **wish,
        )

    async def context(self) -> int:
        """The engine's context."""
        found = await self.backend.probe()
        return found.max_context_tokens if self.context_tokens is None else self.context_tokens

    async def running(self) -> int:
        """Calls in the engine, as it says itself."""
        if self.count is not None:
            return self.count()
        load = await self.backend.load()
        return (load.running or 0) + (load.waiting or 0)

    async def wait_running(self, condition: Callable[[int], bool]) -> None:
        """Until the engine says so."""
        with trio.fail_after(SECONDS_MAX):
            while not condition(await self.running()):  # noqa: ASYNC110 - an engine tells only when it is asked
                await trio.sleep(_POLL_SECONDS)


def assert_whole(generation: Generation, request: GenerationRequest) -> None:
    """Every promise that can be read off one reply."""
    sampled = len(generation.token_ids)
    assert 1 <= sampled <= request.max_tokens, f"{sampled} tokens for a limit of {request.max_tokens}"
    assert len(generation.logprobs) == sampled, "one log-probability per token"
    assert all(math.isfinite(value) and value <= 1e-3 for value in generation.logprobs), "log-probabilities are finite"
    assert _covers(generation.versions, sampled), f"spans {generation.versions} do not cover {sampled} tokens"
    assert generation.latency_s >= 0
    stops = [at for at, token in enumerate(generation.token_ids) if token in request.stop_token_ids]
    assert all(at == sampled - 1 for at in stops), "nothing is sampled after a stop token"
    if stops:
        assert generation.finish == "stop", "a stop token stops"
    if generation.finish == "length":
        assert sampled == request.max_tokens or not stops


def _covers(spans: Sequence[VersionSpan], sampled: int) -> bool:
    edges = [0, *(span.end for span in spans)]
    return [span.start for span in spans] == edges[:-1] and edges[-1] == sampled


async def error_of(engine: EngineUnderTest, request: GenerationRequest) -> BackendError:
    """What a call that must fail fails with."""
    try:
        generation = await engine.backend.generate(request)
    except BackendError as error:
        return error
    raise AssertionError(f"no error but {generation}")
