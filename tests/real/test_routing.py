"""What it is worth to stay: sticky leases and shared homes against random routing, on two real engines in one run."""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from itertools import count

import msgspec
import pytest
import trio

from prorld.domain.calls import CallRecord
from prorld.domain.messages import user
from prorld.inference.contract import Capabilities, Generation, GenerationRequest
from prorld.inference.lease import Door
from prorld.inference.prometheus_text import metric_values
from prorld.inference.session import ModelSession
from prorld.inference.vllm import VllmBackend
from prorld.kit.http_client import HttpClient
from prorld.kit.lanes import Lane
from prorld.tokens.jinja_renderer import JinjaRenderer
from prorld.tokens.tokenizer import HfTokenizer
from tests.real.rollouts import job_spec, rollouts
from tests.real.vllm_server import VllmServer

pytestmark = [pytest.mark.real, pytest.mark.slow]

JOBS = 4
TURNS = 5
ROUNDS = 2
AT_ONCE = 2
MAX_TOKENS = 16
BLOCK = 32
GROUP = 8
# About as many tokens: a long task to begin with, and short answers of the environment.
OPENING_WORDS = 2600
ANSWER_WORDS = 80

CACHED_SHARE_MIN = 0.85
FASTER_MIN = 1.4
LESS_PREFILL_MIN = 5.0

_numbers = count()
Pair = tuple[VllmServer, VllmServer]


class RandomLease:
    """Any engine for every call, as a load balancer has it that knows nothing of conversations."""

    def __init__(self, backends: Sequence[VllmBackend], found: Capabilities, dice: random.Random) -> None:
        self._backends = backends
        self._dice = dice
        self.backend_id = "random"
        self.capabilities = found
        self.lacking: str | None = None

    async def generate(self, request: GenerationRequest, door: Door | None = None) -> Generation:
        """On one or the other."""
        return await self._dice.choice(self._backends).generate(request)

    async def migrate(self) -> None:
        """Nowhere to go."""
        raise AssertionError("an engine failed")


class Figures(msgspec.Struct):
    """One way of routing, over all its rounds."""

    wall_s: float = 0.0
    later_ttft_s: float = 0.0
    later_calls: float = 0.0
    cached: int = 0
    could_be_cached: int = 0

    @property
    def share(self) -> float:
        """Of what an engine that saw all the turns before could have in its cache, how much was there."""
        return self.cached / self.could_be_cached

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token of a later turn."""
        return self.later_ttft_s / self.later_calls


def words(dice: random.Random, number: int) -> str:
    """Text that nobody has sent before."""
    return " ".join(dice.choice(("tree", "seven", "blue", "run", "wide", "north", "paper")) for _ in range(number))


async def ttft(pair: Pair) -> tuple[float, float]:
    """Seconds to first tokens and their number, by the engines' own clocks."""
    names = ("vllm:time_to_first_token_seconds_sum", "vllm:time_to_first_token_seconds_count")
    total = [0.0, 0.0]
    for server in pair:
        http = HttpClient(server.url, connections_max=1, response_bytes_max=1 << 22)
        try:
            values = metric_values((await http.request("GET", "/metrics")).body.decode(), names)
        finally:
            http.close()
        total = [before + sum(values[name]) for before, name in zip(total, names, strict=True)]
    return total[0], total[1]


async def one_round(sessions: Sequence[ModelSession], pair: Pair, dice: random.Random, into: Figures) -> None:
    """First turns of all, then the later ones, a few conversations at once."""
    places = trio.Semaphore(AT_ONCE)

    async def first(session: ModelSession, opening: str) -> None:
        async with places:
            await session.start([user(opening)])
            await session.turn()

    async def later(session: ModelSession, answers: list[str]) -> None:
        async with places:
            for answer in answers:
                await session.observe([user(answer)])
                await session.turn()

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for session in sessions:
            nursery.start_soon(first, session, f"{next(_numbers)} {words(dice, OPENING_WORDS)}")
    before = await ttft(pair)
    async with trio.open_nursery() as nursery:
        for session in sessions:
            nursery.start_soon(later, session, [words(dice, ANSWER_WORDS) for _ in range(TURNS - 1)])
    after = await ttft(pair)
    into.wall_s += trio.current_time() - began
    into.later_ttft_s += after[0] - before[0]
    into.later_calls += after[1] - before[1]
    for session in sessions:
        assert session.turns == TURNS
        for last, call in zip(session.calls, session.calls[1:], strict=False):
            into.cached += call.cached_prefix_len or 0
            into.could_be_cached += (last.prompt_len + last.sampled_len) // BLOCK * BLOCK


async def sticky_round(pair: Pair, dice: random.Random, into: Figures) -> None:
    """Through the pool, as jobs do."""
    async with rollouts("vllm", *(s.url for s in pair), tokenizer=pair[0].model) as on, AsyncExitStack() as stack:
        specs = [job_spec(f"s{next(_numbers)}", turns=TURNS, max_tokens=MAX_TOKENS) for _ in range(JOBS)]
        await one_round([await stack.enter_async_context(on.open(spec)) for spec in specs], pair, dice, into)


async def random_round(pair: Pair, tokenizer: HfTokenizer, dice: random.Random, into: Figures) -> None:
    """The same work with a random engine for every call."""
    backends = [VllmBackend(server.url) for server in pair]
    try:
        found = [await backend.probe() for backend in backends]
        renderer, lane = JinjaRenderer(tokenizer), Lane("tokens", 1)
        sessions = [
            ModelSession(
                job_spec(f"r{next(_numbers)}", turns=TURNS, max_tokens=MAX_TOKENS), 1,
                renderer=renderer, lease=RandomLease(backends, found[0], dice), lane=lane,
            )
            for _ in range(JOBS)
        ]  # fmt: skip
        await one_round(sessions, pair, dice, into)
    finally:
        for backend in backends:
            await backend.aclose()


async def test_to_stay_is_faster_than_to_roam(
    vllm_pair: Pair, tokenizer: HfTokenizer, tell: Callable[[str], None]
) -> None:
    """Later turns find what could be cached, and the whole is done sooner; both ways take turns on the same engines."""
    dice = random.Random(5)
    sticky, roaming = Figures(), Figures()
    for _ in range(ROUNDS):
        await sticky_round(vllm_pair, dice, sticky)
        await random_round(vllm_pair, tokenizer, dice, roaming)
    faster = roaming.wall_s / sticky.wall_s
    for name, figures in (("sticky", sticky), ("random", roaming)):
        tell(
            f"{name}: {figures.wall_s:.1f} s, later turns' first token {figures.ttft_s:.2f} s,"
            f" {figures.share:.0%} of what could be cached was"
        )
    tell(f"sticky is {faster:.2f} times faster")
    assert sticky.share >= CACHED_SHARE_MIN
    assert roaming.share < sticky.share
    assert faster >= FASTER_MIN


async def test_a_group_computes_its_prompt_once(vllm_pair: Pair, tell: Callable[[str], None]) -> None:
    """Eight samples of one prompt cost about one prefill together; spread without a home, they cost one each."""
    dice = random.Random(6)
    prompt = words(dice, OPENING_WORDS)

    async with rollouts("vllm", *(server.url for server in vllm_pair), tokenizer=vllm_pair[0].model) as on:

        async def prefilled(one: Callable[[int], Awaitable[ModelSession]]) -> int:
            calls: list[CallRecord] = []

            async def sample(number: int) -> None:
                calls.extend((await one(number)).calls)

            async with trio.open_nursery() as nursery:
                for number in range(GROUP):
                    nursery.start_soon(sample, number)
            assert len(calls) == GROUP
            assert len({call.backend for call in calls}) == 1 or one is spread
            return sum(call.prompt_len - (call.cached_prefix_len or 0) for call in calls)

        async def together(number: int) -> ModelSession:
            return await on.one(f"g{number}", [user(prompt)], [], max_tokens=MAX_TOKENS, group_id="g")

        async def spread(number: int) -> ModelSession:
            # On as many engines as samples no one finds another's prefix; here every sample has a beginning of its own.
            opening = [user(f"{number} {prompt}")]
            return await on.one(f"n{number}", opening, [], max_tokens=MAX_TOKENS)

        grouped, apart = await prefilled(together), await prefilled(spread)
    less = apart / max(1, grouped)
    tell(f"a group of {GROUP}: {grouped} prompt tokens computed together, {apart} apart, {less:.1f} times less")
    assert less >= LESS_PREFILL_MIN
    assert math.isfinite(less)
