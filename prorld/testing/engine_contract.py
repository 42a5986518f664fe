"""What every client of an engine has to keep, as checks that a test runs one by one.

For the author of a backend: make an ``EngineUnderTest`` and await each check of ``ENGINE_CONTRACT`` with it, for
example through ``pytest.mark.parametrize``. An engine that can be told to misbehave runs ``FAULT_CONTRACT``, too. A
check raises ``AssertionError`` for what is not kept. All that a test needs is imported from here.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import trio

from prorld.domain.job import Sampling
from prorld.domain.versions import PolicyVersion
from prorld.errors import ContextOverflow, Unsupported
from prorld.inference.contract import Generation, GenerationRequest, WeightRef
from prorld.kit.cleanup import shielded
from prorld.testing.engine_faults import (
    FAULT_CONTRACT,
    SCORE_FAULTS,
    FaultCheck,
    a_hanging_engine_is_left_by_the_caller,
    fault_is_typed,
    score_fault_is_typed,
)
from prorld.testing.engine_under_test import SECONDS_MAX, EngineUnderTest, assert_whole, error_of

__all__ = [
    "ENGINE_CONTRACT",
    "FAULT_CONTRACT",
    "SCORE_FAULTS",
    "EngineCheck",
    "EngineUnderTest",
    "FaultCheck",
    "a_hanging_engine_is_left_by_the_caller",
    "assert_whole",
    "fault_is_typed",
    "score_fault_is_typed",
]

# What an engine may not be able to take.
KNOBS = frozenset({"seed", "top_k", "min_p", "stop", "salt", "priority"})

# A policy may end any of them early; all of them it does not.
LONG_CALLS = 8

# Engines compute a token in a batch and alone with different kernels.
SCORE_GAP_MAX = 0.1

EngineCheck = Callable[[EngineUnderTest], Awaitable[None]]


async def probe_tells_the_context(engine: EngineUnderTest) -> None:
    """A probe names the model and the context, and may be repeated."""
    found = await engine.backend.probe()
    assert found.model
    assert found.max_context_tokens > len(engine.prompt)
    again = await engine.backend.probe()
    assert (again.model, again.max_context_tokens) == (found.model, found.max_context_tokens)


async def replies_are_whole(engine: EngineUnderTest) -> None:
    """Ids, log-probabilities, spans and finish of a reply fit each other and the request."""
    for temperature in (1.0, 0.0):
        request = engine.request(max_tokens=24, sampling=Sampling(temperature=temperature))
        generation = await engine.backend.generate(request)
        assert_whole(generation, request)
        assert generation.exact == (await engine.backend.probe()).exact
        if generation.logprobs_mode == "none":
            assert not any(generation.logprobs), "values that are no evidence are 0.0"


async def max_tokens_is_a_limit(engine: EngineUnderTest) -> None:
    """No reply is longer than asked for, and one that ends there says ``length``."""
    for limit in (1, 2, 17):
        request = engine.request(max_tokens=limit)
        generation = await engine.backend.generate(request)
        assert_whole(generation, request)
        if len(generation.token_ids) < limit:
            assert generation.finish == "stop"


async def the_stop_token_is_part_of_the_reply(engine: EngineUnderTest) -> None:
    """The token that stopped the policy is an action of the policy: its id and log-probability are there."""
    request = engine.request(max_tokens=40, stop_token_ids=tuple(range(engine.vocabulary)))
    generation = await engine.backend.generate(request)
    assert_whole(generation, request)
    assert len(generation.token_ids) == 1
    assert generation.finish == "stop"


async def a_prompt_that_does_not_fit_is_an_overflow(engine: EngineUnderTest) -> None:
    """A full or overfull context is ``ContextOverflow``, which may not be tried again."""
    context = await engine.context()
    for length in (context, context + 100):
        prompt = (list(engine.prompt) * (length // len(engine.prompt) + 1))[:length]
        error = await error_of(engine, engine.request(prompt=prompt))
        assert isinstance(error, ContextOverflow), f"{length} of {context} tokens: {error!r}"
        assert not error.may_retry


async def the_end_of_the_context_ends_a_reply(engine: EngineUnderTest) -> None:
    """A reply that reaches the end of the context is cut there."""
    context = await engine.context()
    prompt = (list(engine.prompt) * (context // len(engine.prompt) + 1))[: context - 3]
    generation = await engine.backend.generate(engine.request(prompt=prompt, max_tokens=50))
    assert 1 <= len(generation.token_ids) <= 4
    assert generation.finish in ("length", "stop")


async def a_refused_request_is_not_retryable(engine: EngineUnderTest) -> None:
    """What the engine refuses for good says so."""
    error = await error_of(engine, engine.request(prompt=[]))
    assert not error.may_retry
    assert not isinstance(error, ContextOverflow)


async def cancelling_frees_the_engine(engine: EngineUnderTest) -> None:
    """A caller that gives up leaves nothing running in the engine."""
    async with trio.open_nursery() as nursery:
        for _ in range(LONG_CALLS):
            nursery.start_soon(engine.backend.generate, engine.request(max_tokens=engine.long_tokens))
        await engine.wait_running(lambda running: running >= 1)
        nursery.cancel_scope.cancel()
    await engine.wait_running(lambda running: running == 0)
    request = engine.request()
    assert_whole(await engine.backend.generate(request), request)


async def concurrent_calls_do_not_mix(engine: EngineUnderTest) -> None:
    """Each of many calls at once gets an answer that fits itself."""
    answers: dict[int, tuple[GenerationRequest, Generation]] = {}

    async def one(limit: int) -> None:
        request = engine.request(prompt=[*engine.prompt, *engine.prompt[:limit]], max_tokens=limit)
        answers[limit] = (request, await engine.backend.generate(request))

    async with trio.open_nursery() as nursery:
        for limit in range(1, 9):
            nursery.start_soon(one, limit)
    for request, generation in answers.values():
        assert_whole(generation, request)


async def it_repeats_where_it_promises(engine: EngineUnderTest) -> None:
    """Same request, same answer: only with a seed or greedy, only alone, only where the engine promises it."""
    wishes: list[dict[str, Any]] = []
    if engine.repeats_with_seed:
        wishes.append({"seed": 7})
    if engine.repeats_when_greedy:
        wishes.append({"sampling": Sampling(temperature=0.0)})
    for wish in wishes:
        first = await engine.backend.generate(engine.request(max_tokens=20, **wish))
        second = await engine.backend.generate(engine.request(max_tokens=20, **wish))
        assert first.token_ids == second.token_ids


async def what_is_left_out_is_named(engine: EngineUnderTest) -> None:
    """A seed that the engine can't take is in ``ignored``, and of the other knobs every one that it is not told."""
    takes_seed = (await engine.backend.probe()).takes_seed
    generation = await engine.backend.generate(engine.request(seed=1))
    assert ("seed" in generation.ignored) == (not takes_seed)
    sampling = Sampling(top_p=0.9, top_k=40, min_p=0.01, stop=["\x01 never said \x02"])
    request = engine.request(sampling=sampling, seed=1, salt="v1", priority=1)
    generation = await engine.backend.generate(request)
    assert_whole(generation, request)
    assert set(generation.ignored) <= KNOBS
    assert len(set(generation.ignored)) == len(generation.ignored)


async def scores_are_those_of_sampling(engine: EngineUnderTest) -> None:
    """Where it scores: one value for each token from the start on, close to what sampling the token said."""
    if not (await engine.backend.probe()).scores:
        await _is_unsupported(engine.backend.score(array("i", engine.prompt), 1))
        return
    request = engine.request(max_tokens=12, sampling=Sampling(temperature=0.0))
    generation = await engine.backend.generate(request)
    whole = request.token_ids + generation.token_ids
    scores = await engine.backend.score(whole, len(request.token_ids))
    assert len(scores) == len(generation.token_ids)
    assert all(math.isfinite(value) and value <= 1e-3 for value in scores)
    if generation.logprobs_mode == "raw":
        gaps = [abs(one - two) for one, two in zip(scores, generation.logprobs, strict=True)]
        assert sum(gaps) / len(gaps) <= SCORE_GAP_MAX, f"scores {scores} are not {generation.logprobs}"
    assert len(await engine.backend.score(whole, len(whole) - 1)) == 1
    assert len(await engine.backend.score(whole, 1)) == len(whole) - 1


async def a_full_context_is_scored(engine: EngineUnderTest) -> None:
    """Where it scores: a context with no room left is scored to its last token, a larger one is an overflow."""
    found = await engine.backend.probe()
    if not found.scores or found.logprobs_mode != "raw":
        return
    context = found.max_context_tokens
    ids = array("i", (list(engine.prompt) * (context // len(engine.prompt) + 2))[: context + 1])
    assert len(await engine.backend.score(ids[:-1], context - 3)) == 3
    try:
        await engine.backend.score(ids, context - 3)
    except ContextOverflow:
        return
    raise AssertionError("a context that is too long was scored")


async def a_pause_keeps_what_was_said(engine: EngineUnderTest) -> None:
    """Where it can be paused: ``abort`` ends a running call with its tokens, and the rest can be asked for later."""
    if not (await engine.backend.probe()).control:
        return
    request = engine.request(max_tokens=engine.long_tokens, sampling=Sampling(temperature=0.0))
    got: list[Generation] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_generate_into, engine, request, got)
        await engine.wait_running(lambda running: running >= 1 or bool(got))
        with trio.fail_after(SECONDS_MAX):
            await engine.backend.pause("abort")
    try:
        (generation,) = got
        assert generation.finish in ("abort", "stop", "length")
        if generation.token_ids:
            assert_whole(generation, request)
        assert await engine.running() == 0
    finally:
        with shielded(SECONDS_MAX, "resuming"):
            await engine.backend.resume()  # noqa: ASYNC102  (shielded with a deadline by the line above)
    await engine.backend.resume()
    rest = engine.request(prompt=[*request.token_ids, *generation.token_ids], max_tokens=4)
    assert_whole(await engine.backend.generate(rest), rest)


async def a_waiting_pause_lets_calls_end(engine: EngineUnderTest) -> None:
    """Where it can be paused: ``wait`` returns when what ran has ended by itself."""
    if not (await engine.backend.probe()).control:
        return
    request = engine.request(max_tokens=24)
    got: list[Generation] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_generate_into, engine, request, got)
        await engine.wait_running(lambda running: running >= 1 or bool(got))
        with trio.fail_after(SECONDS_MAX):
            await engine.backend.pause("wait")
    await engine.backend.resume()
    assert got[0].finish in ("stop", "length")


async def new_weights_have_their_version(engine: EngineUnderTest) -> None:
    """A version that is told is read back, and the tokens sampled from then on carry it."""
    version = PolicyVersion(3, 7)
    before = await engine.backend.read_version()
    await engine.backend.set_version(version)
    try:
        assert await engine.backend.read_version() == version
        generation = await engine.backend.generate(engine.request())
        said = {(span.epoch, span.version) for span in generation.versions}
        assert said == {(3, 7)}
        await engine.backend.clear_cache()
    finally:
        with shielded(SECONDS_MAX, "taking the version back"):
            back = before or PolicyVersion()
            await engine.backend.set_version(back)  # noqa: ASYNC102  (shielded with a deadline two lines above)


async def weights_are_loaded_where_it_promises(engine: EngineUnderTest) -> None:
    """Where it can't reload or take adapters it says so; forgetting an adapter that is not there is fine."""
    found = await engine.backend.probe()
    await engine.backend.unload_adapter("prorld-9.9")
    ways: tuple[tuple[Literal["reload", "lora"], bool], ...] = (("reload", found.reload), ("lora", found.lora))
    for how, promised in ways:
        if not promised:
            ref = WeightRef(how=how, path="/nowhere", version=PolicyVersion(9, 9))
            await _is_unsupported(engine.backend.load_weights(ref))


async def it_is_healthy(engine: EngineUnderTest) -> None:
    """An engine that works says so."""
    assert await engine.backend.healthy()


ENGINE_CONTRACT: tuple[EngineCheck, ...] = (
    probe_tells_the_context,
    replies_are_whole,
    max_tokens_is_a_limit,
    the_stop_token_is_part_of_the_reply,
    a_prompt_that_does_not_fit_is_an_overflow,
    the_end_of_the_context_ends_a_reply,
    a_refused_request_is_not_retryable,
    cancelling_frees_the_engine,
    concurrent_calls_do_not_mix,
    it_repeats_where_it_promises,
    what_is_left_out_is_named,
    scores_are_those_of_sampling,
    a_full_context_is_scored,
    a_pause_keeps_what_was_said,
    a_waiting_pause_lets_calls_end,
    new_weights_have_their_version,
    weights_are_loaded_where_it_promises,
    it_is_healthy,
)


async def _is_unsupported(call: Awaitable[object]) -> None:
    try:
        await call
    except Unsupported:
        return
    raise AssertionError("it does what its probe does not promise")


async def _generate_into(engine: EngineUnderTest, request: GenerationRequest, into: list[Generation]) -> None:
    into.append(await engine.backend.generate(request))
