"""Who is asked to score: the right version, the least busy, within bounds, and only while it has that version."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from prorld.domain.backends import BackendState
from prorld.domain.versions import PolicyVersion
from prorld.errors import BackendError, ContextOverflow, EngineBusy, Unsupported
from prorld.inference import rescoring
from prorld.inference.contract import Capabilities
from prorld.inference.policy_gate import PolicyGate
from prorld.inference.pool import BackendPool
from prorld.inference.rescoring import CannotScore, Scorer
from prorld.metrics import Metrics
from prorld.testing.fake_backend import FakeBackend
from prorld.testing.scripted_engine.script import Script, scripted_logprob
from prorld.wire.ops import AddBackend

IDS = array("i", range(20))
FIRST, SECOND = PolicyVersion(0, 0), PolicyVersion(0, 1)
TRUTH = [scripted_logprob(token, at) for at, token in enumerate(IDS)]


class Engine(FakeBackend):
    """A fake that counts its scores, takes a second for each, and claims what the test says."""

    def __init__(self, url: str, script: Script | None = None) -> None:
        super().__init__(script, url=url)
        self.scored = self.running = self.most = 0
        self.raises: list[BackendError] = []
        self.claims: dict[str, object] = {}
        self.gives: array[float] | None = None

    async def probe(self) -> Capabilities:
        return msgspec.structs.replace(await super().probe(), **self.claims)

    async def score(self, token_ids: array[int], start: int) -> array[float]:
        self.scored += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await trio.sleep(1.0)
            if self.raises:
                raise self.raises.pop(0)
            return await super().score(token_ids, start) if self.gives is None else self.gives
        finally:
            self.running -= 1


class World:
    """A pool of such engines, and what scores on it."""

    def __init__(self) -> None:
        self.engines: dict[str, Engine] = {}
        self.metrics = Metrics()
        self.pool = BackendPool({"vllm": lambda request: self.engines[request.url]}, self.metrics)
        self.scorer = Scorer(self.pool)

    async def add(self, name: str, version: PolicyVersion = FIRST, **fields) -> tuple[str, Engine]:
        engine = self.engines[f"http://{name}"] = Engine(f"http://{name}", fields.pop("script", None))
        engine.claims = fields.pop("claims", {})
        await engine.set_version(version)
        info = await self.pool.add(AddBackend(url=engine.url, kind="vllm", **fields))
        return info.backend_id, engine

    async def ask(self, version: PolicyVersion | None = FIRST, start: int = 5):
        return await self.scorer.score("default", version, IDS, start)

    async def refused(self, version: PolicyVersion | None = FIRST, start: int = 5) -> str:
        with pytest.raises(CannotScore) as caught:
            await self.ask(version, start)
        return caught.value.reason


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    """A pool that runs for the length of the block."""
    made = World()
    async with trio.open_nursery() as nursery:
        await nursery.start(made.pool.run)
        yield made
        nursery.cancel_scope.cancel()


async def test_the_version_decides(autojump_clock: MockClock) -> None:
    """Epoch and number have to be the very same; a version that nobody has is not scored by another."""
    async with world() as it:
        one, first = await it.add("one", FIRST)
        two, second = await it.add("two", SECOND)
        assert it.scorer.served("default") == {FIRST, SECOND}
        found = await it.ask(SECOND)
        assert (found.backend_id, list(found.logprobs)) == (two, TRUTH[5:])
        assert (await it.ask(FIRST)).backend_id == one
        assert await it.refused(PolicyVersion(1, 1)) == "not_served"
        assert await it.refused(None) == "not_served"
        assert (first.scored, second.scored) == (1, 1)
        assert it.metrics.value("prorld_engine_call_seconds_count", kind="vllm", result="ok") == 2


async def test_the_least_busy_is_asked_and_a_doubtful_one_last(autojump_clock: MockClock) -> None:
    """Calls for the weight decide, then leases; engines with strikes and those that drain come after all others."""
    async with world() as it:
        one, _ = await it.add("one")
        two, _ = await it.add("two")
        rows = {entry.backend_id: entry.row for entry in it.pool.entries("default")}
        rows[one].inflight = 3
        assert (await it.ask()).backend_id == two
        rows[two].inflight = 4
        assert (await it.ask()).backend_id == one
        rows[two].weight = 8.0
        assert (await it.ask()).backend_id == two
        await it.pool.drain(two)
        assert (await it.ask()).backend_id == one
        rows[one].state = BackendState.SUSPECT
        assert (await it.ask()).backend_id == one, "suspect comes before draining"
        await it.pool.remove(one)
        assert (await it.ask()).backend_id == two
        rows[two].inflight = 0


async def test_bounds_hold_and_no_lease_is_taken(autojump_clock: MockClock) -> None:
    """The engine's own bound on calls is shared with jobs, and all scores together have one."""
    async with world() as it:
        _, small = await it.add("small", max_inflight=2)
        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(it.ask)
            await wait_all_tasks_blocked()
            assert it.pool.list().items[0].leases == 0
            assert small.running == 2
        assert (small.most, small.scored) == (2, 6)
        await it.pool.remove(it.pool.list().items[0].backend_id)
        _, large = await it.add("large")
        async with trio.open_nursery() as nursery:
            for _ in range(3 * rescoring.SCORES_AT_ONCE):
                nursery.start_soon(it.ask)
        assert large.most == rescoring.SCORES_AT_ONCE
        assert it.pool.list().items[0].inflight == 0


async def test_another_engine_answers_for_one_that_fails(autojump_clock: MockClock) -> None:
    """Once each; no strike is given; when none is left the question is given up with the last one's words."""
    async with world() as it:
        _, first = await it.add("one")
        two, second = await it.add("two")
        first.raises = [BackendError("out of memory", status=500)] * 2
        assert (await it.ask()).backend_id == two
        second.raises = [BackendError("out of memory", status=500)]
        assert await it.refused() == "unscored"
        assert (first.scored, second.scored) == (2, 2)
        assert {info.state for info in it.pool.list().items} == {"up"}
        second.raises = [EngineBusy("paused", status=503)] * 3
        it.pool.entries("default")[0].row.inflight = 9
        assert (await it.ask()).backend_id == two
        assert second.scored == 6


async def test_a_busy_engine_is_not_waited_for_for_ever(autojump_clock: MockClock) -> None:
    """The deadline ends it, the place is free again, and nothing is left in the engine."""
    async with world() as it:
        _, engine = await it.add("one")
        engine.raises = [EngineBusy("paused", status=503)] * 10_000
        began = trio.current_time()
        assert await it.refused() == "unscored"
        assert trio.current_time() - began == rescoring.SCORE_S_MAX
        assert (engine.running, it.pool.list().items[0].inflight) == (0, 0)


async def test_an_update_that_overtakes_a_score_spoils_it(autojump_clock: MockClock) -> None:
    """An engine that says another version afterwards has not scored this one, whatever the pool still believes."""
    async with world() as it:
        _, engine = await it.add("one")
        async with trio.open_nursery() as nursery:

            async def overtake() -> None:
                await trio.sleep(0.5)
                await engine.set_version(SECOND)

            nursery.start_soon(overtake)
            assert await it.refused() == "not_served"


class Gate:
    """Closed until the test opens it."""

    def __init__(self) -> None:
        self.opened = trio.Event()

    @property
    def is_open(self) -> bool:
        return self.opened.is_set()

    async def wait_open(self) -> None:
        await self.opened.wait()


async def test_nothing_is_scored_while_the_policy_is_paused(autojump_clock: MockClock) -> None:
    """It waits, and asks for the version that is there afterwards; for as long as its deadline allows."""
    async with world() as it:
        gate = Gate()
        it.scorer = Scorer(it.pool, lambda policy: gate if policy == "default" else None)
        _, engine = await it.add("one")
        assert await it.refused() == "unscored"
        async with trio.open_nursery() as nursery:

            async def update() -> None:
                await wait_all_tasks_blocked()
                assert engine.scored == 0
                await engine.set_version(SECOND)
                (entry,) = it.pool.entries("default")
                entry.found = await engine.probe()
                gate.opened.set()

            nursery.start_soon(update)
            assert (await it.ask(SECOND)).backend_id == entry_name(it)


def entry_name(it: World) -> str:
    """The only engine."""
    return it.pool.list().items[0].backend_id


@pytest.mark.parametrize("claims", [{"scores": False}, {"exact": False}])
async def test_engines_that_can_not_score_are_not_asked(claims, autojump_clock: MockClock) -> None:
    """They are told apart from a version that is gone."""
    async with world() as it:
        _, engine = await it.add("one", claims=claims)
        assert await it.refused() == "no_scores"
        assert engine.scored == 0


@pytest.mark.parametrize("gives", [TRUTH[5:-1], TRUTH[4:], [*TRUTH[5:-1], float("nan")], []])
async def test_scores_of_another_form_are_not_believed(gives, autojump_clock: MockClock) -> None:
    """Too few, too many, or no numbers."""
    async with world() as it:
        _, engine = await it.add("one")
        engine.gives = array("f", gives)
        assert await it.refused() == "unscored"


async def test_what_the_context_can_not_hold_is_left_out(autojump_clock: MockClock) -> None:
    """As much as fits is scored; where that is nothing the reason says so."""
    async with world() as it:
        name, engine = await it.add("tiny", script=Script(max_model_len=11))
        assert list((await it.ask()).logprobs) == TRUTH[5:11]
        assert await it.refused(start=11) == "too_long"
        for cramped in (ContextOverflow("11 tokens and 1 to sample"), Unsupported("not the last one")):
            engine.raises = [cramped]
            found = await it.ask()
            assert (found.backend_id, list(found.logprobs)) == (name, TRUTH[5:10])
            engine.raises = [cramped]
            assert await it.refused(start=10) == "too_long"
        engine.raises = [ContextOverflow("no"), ContextOverflow("and no")]
        assert await it.refused() == "unscored"


async def test_a_paused_policy_holds_up_no_other(autojump_clock: MockClock) -> None:
    """Its questions wait without a place, and get one when it goes on."""
    gates = {"default": PolicyGate("default"), "paused": PolicyGate("paused")}
    async with world() as it, trio.open_nursery() as nursery:
        await it.add("one")
        await it.add("two", policy="paused")
        scorer = Scorer(it.pool, gates.__getitem__)
        answers: list[str] = []

        async def ask() -> None:
            answers.append((await scorer.score("paused", FIRST, IDS, 5)).backend_id)

        gates["paused"].close()
        for _ in range(rescoring.SCORES_AT_ONCE):
            nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        with trio.fail_after(5):
            await scorer.score("default", FIRST, IDS, 5)
        assert answers == []
        gates["paused"].open()
        await trio.sleep(10)
        assert len(answers) == rescoring.SCORES_AT_ONCE
