"""Engines that go wrong under jobs: each fault has its outcome, no token is lost or doubled, and nothing is wedged."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from prorld.domain.outcome import OutcomeKind
from prorld.inference.contract import EngineLoad
from prorld.inference.pool_entry import EngineRules
from prorld.testing.byte_tokenizer import IM_END, byte_ids
from prorld.testing.fake_backend import FakeBackend
from prorld.testing.scripted_engine.script import Fault, Latency, Script
from prorld.wire.jobs import JobRecord
from prorld.wire.ops import SetBackend, SetBackends
from tests.rollout.support import Room, room

TOOL = '<tool_call>{"name": "bash", "arguments": {"command": "true"}}</tool_call>'
TURNS: list[list[int] | str] = [TOOL, TOOL, TOOL, "42"]
SAMPLED = 3 * len([*byte_ids(TOOL), IM_END]) + len([*byte_ids("42"), IM_END])
JOBS = [f"job-{number}" for number in range(8)]
# A turn takes about seven seconds, so that whatever happens happens in the middle of one.
LATENCY = Latency(fixed_s=0.5, decode_token_s=0.1)


class Frail(FakeBackend):
    """Can fall silent as a machine that has lost its power, and tells how many tokens it has worked on."""

    silent = False
    works = True

    async def healthy(self) -> bool:
        if self.silent:
            await trio.sleep_forever()
        return await super().healthy()

    async def load(self) -> EngineLoad:
        tokens = trio.current_time() if self.works else 0.0
        return EngineLoad(running=self.engine.running, waiting=0, tokens_total=tokens)


def engine(name: str, *faults: Fault) -> Frail:
    """One that says what belongs to the prompt, so that any engine can go on where another one stopped."""
    return Frail(Script(turns=TURNS, pick="marker", latency=LATENCY, faults=list(faults)), url=f"fake://{name}")


async def finished(here: Room) -> list[JobRecord]:
    """Every job to its end."""
    return [await here.supervisor.wait_done(name, "tests") for name in JOBS]


async def started(here: Room, **fields: Any) -> None:
    """All jobs, each with a sandbox and four turns."""
    for name in JOBS:
        await here.submit(name, {"sandbox": True, "expected": "42"}, timeouts={"run_s": 900.0}, **fields)


async def tokens(here: Room) -> list[list[tuple[list[int], list[int]]]]:
    """Ids and masks of every job's branches."""
    found = []
    for name in JOBS:
        document = await here.supervisor.trajectory(name, "tests")
        found.append([(list(branch.token_ids), list(branch.mask)) for branch in document.branches])
    return found


async def undisturbed() -> list[list[tuple[list[int], list[int]]]]:
    """The same jobs where nothing happens."""
    async with room(backends=[engine("calm")], workers=(8, 8, 8)) as here:
        await started(here)
        assert {record.tokens.sampled for record in await finished(here)} == {SAMPLED}
        return await tokens(here)


async def check_all_well(here: Room) -> None:
    """All jobs ended well at the first attempt, verify, and have the tokens that they would have had anyway."""
    for record in await finished(here):
        assert record.outcome is not None
        assert (record.outcome.kind, record.reward, len(record.attempts)) == (OutcomeKind.OK, 1.0, 1), record
        said = await here.looks.verify(record.job_id, "tests")
        assert (said.result, said.violations) == ("ok", [])
    assert await tokens(here) == await undisturbed()
    here.assert_clean()


@pytest.mark.parametrize(
    "fault",
    [
        Fault(kind="die"),
        Fault(kind="reset", count=4),
        Fault(kind="hang_up", count=4),
        Fault(kind="garbage", count=6),
        Fault(kind="lengths", count=6),
        Fault(kind="nan", count=6),
        Fault(kind="prompt_ids", count=6),
        Fault(kind="status", status=500, count=6),
        Fault(kind="status", status=503, count=12),
        Fault(kind="status", status=429, count=12),
        Fault(kind="slow", seconds=60.0, count=6),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.status}" if fault.kind == "status" else fault.kind,
)
async def test_a_fault_of_one_engine_costs_no_job(fault: Fault, autojump_clock: MockClock) -> None:
    """Dead, broken, untrustworthy, full or late: all jobs end well, with the tokens that they would have had."""
    async with room(backends=[engine("sick", fault), engine("well")], workers=(8, 8, 8)) as here:
        await started(here)
        await check_all_well(here)


async def test_an_engine_that_dies_in_the_middle_of_its_calls(autojump_clock: MockClock) -> None:
    """What it was saying is said again elsewhere."""
    dying = engine("dying")
    async with room(backends=[dying, engine("well")], workers=(8, 8, 8)) as here:
        await started(here)
        await trio.sleep(10)
        assert len(dying.live) == 4
        dying.die()
        await check_all_well(here)
        assert sum(info.migrated_in_total for info in here.pool.list().items) >= 4


async def test_a_machine_that_falls_silent(autojump_clock: MockClock) -> None:
    """No socket breaks; the jobs go on elsewhere in half a minute, and not when their stage's time is over."""
    silent = engine("silent")
    async with room(backends=[silent, engine("well")], workers=(8, 8, 8)) as here:
        await started(here)
        await trio.sleep(10)
        silent.silent = True
        silent.faults.arm(Fault(kind="hang", count=None))
        await check_all_well(here)
        assert trio.current_time() < 200


async def test_an_engine_that_hangs_and_says_that_it_is_well(autojump_clock: MockClock) -> None:
    """That its count of tokens stands still gives it away."""
    stuck = engine("stuck", Fault(kind="hang", count=None))
    stuck.works = False
    rules = EngineRules(stall_s=60)
    async with room(backends=[stuck, engine("well")], workers=(8, 8, 8), rules=rules) as here:
        await started(here)
        await check_all_well(here)


async def test_an_engine_that_hangs_unseen_costs_its_jobs_their_stage(autojump_clock: MockClock) -> None:
    """Where nothing gives it away, the stage's deadline does: a time-out, and never a wedge."""
    mute = FakeBackend(Script(faults=[Fault(kind="hang", count=None)]))
    async with room(backends=[mute]) as here:
        record = await here.finish("a", timeouts={"run_s": 30.0}, max_attempts=1)
        assert record.outcome is not None
        assert (record.outcome.kind, record.reward) == (OutcomeKind.TIMEOUT, None)
        here.assert_clean()


async def test_an_engine_that_is_paused_is_waited_for(autojump_clock: MockClock) -> None:
    """Both pause and come back: nobody moves, nobody fails."""
    engines = [engine("one"), engine("two")]
    async with room(backends=engines, workers=(8, 8, 8)) as here:
        await started(here)
        await trio.sleep(10)
        for one in engines:
            one.engine.pause("wait", clear_cache=False)
        await trio.sleep(60)
        for one in engines:
            one.engine.resume()
        await check_all_well(here)
        assert {info.migrated_away_total for info in here.pool.list().items} == {0}


@pytest.mark.parametrize("removed", ["drain", "migrate"])
async def test_the_whole_set_is_exchanged_under_jobs(removed: Any, autojump_clock: MockClock) -> None:
    """Drained, the old ones finish what they have; otherwise everything goes on elsewhere; no token differs."""
    old, new = engine("old"), engine("new")
    async with room(backends=[old, new], workers=(8, 8, 8)) as here:
        (first, second) = here.pool.list().items
        await here.pool.remove(second.backend_id)
        await started(here)
        await trio.sleep(10)
        wanted = [SetBackend(url=new.url, kind="vllm")]
        generation = here.pool.list("default").generation
        await here.pool.replace(SetBackends(generation=generation, backends=wanted, removed=removed))
        await trio.sleep(1)
        assert len(old.live) == (8 if removed == "drain" else 0)
        await check_all_well(here)
        assert [info.url for info in here.pool.list().items] == [new.url]
        assert bool(new.requests) == (removed == "migrate")
        assert first.backend_id not in [info.backend_id for info in here.pool.list().items]


async def test_waiting_for_a_place_to_the_end_is_the_engines_fault(autojump_clock: MockClock) -> None:
    """RUN's time that ends in the line before a full engine is no time-out of the policy."""
    slow = FakeBackend(Script(turns=["42"], latency=Latency(fixed_s=50.0)))
    async with room(backends=[slow], rules=EngineRules()) as here:
        (info,) = here.pool.list().items
        await here.pool.replace(
            SetBackends(generation=1, backends=[SetBackend(url=info.url, kind="vllm", max_inflight=1)])
        )
        await here.submit("first", timeouts={"run_s": 60.0})
        await trio.sleep(1)
        record = await here.finish("second", timeouts={"run_s": 20.0}, max_attempts=1)
        assert record.outcome is not None
        assert (record.outcome.kind, record.outcome.code) == (OutcomeKind.LLM_ERROR, "engine_busy")
        record = await here.supervisor.wait_done("first", "tests")
        assert record.outcome is not None
        assert record.outcome.kind is OutcomeKind.OK
