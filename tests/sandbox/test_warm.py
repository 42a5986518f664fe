"""Sandboxes that are there before a job asks, on the fake under a virtual clock."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from prorld.errors import SandboxError
from prorld.metrics import Metrics
from prorld.sandbox.contract import CommandResult, Sandbox, SandboxRuntime, SandboxSpec
from prorld.sandbox.warm import LOOK_EVERY_S, STAYS_S, WarmRuntime
from prorld.sandbox.warm_plan import EXPECTED_S, WarmRules
from prorld.testing.fake_sandbox import Answer, FakeRuntime, FakeSandbox, SessionName, toy_answer
from prorld.testing.sandbox_contract import SandboxCheck, open_sandbox, sandbox_checks

SPEC = SandboxSpec()
OTHER = SandboxSpec(image="other")


class Pool:
    """A warm runtime, what it is around, and what it counts."""

    def __init__(self, inner: FakeRuntime, rules: WarmRules, **options: Any) -> None:
        self.inner = inner
        self.metrics = Metrics()
        self.warm = WarmRuntime(inner, rules, boot_id="boot", metrics=self.metrics, **options)

    def taken(self, how: str) -> int:
        return int(self.metrics.value("prorld_sandboxes_taken_total", runtime="fake", how=how) or 0)

    def unused(self, reason: str) -> int:
        return int(self.metrics.value("prorld_sandboxes_unused_total", runtime="fake", reason=reason) or 0)

    def names(self) -> list[str]:
        return sorted(row.sandbox_id for row in self.warm.list())


@asynccontextmanager
async def pool(inner: FakeRuntime | None = None, rules: WarmRules | None = None, **options: Any) -> AsyncIterator[Pool]:
    """A pool for the length of a block; then nothing is left of it."""
    made = Pool(inner or FakeRuntime(), rules or WarmRules(images={"": 1}), **options)
    async with trio.open_nursery() as nursery:
        await nursery.start(made.warm.keep)
        await settle()
        yield made
        nursery.cancel_scope.cancel()
    assert made.inner.live == {}
    assert made.warm.idle == 0
    seen = made.warm.admission.statistics()
    assert (seen.starting, seen.waiting) == (0, 0)


async def settle(seconds: float = 3 * LOOK_EVERY_S) -> None:
    """What was begun has come up."""
    await trio.sleep(seconds)


async def one_job(runtime: SandboxRuntime, spec: SandboxSpec = SPEC, sandbox_id: str = "job-1") -> Sandbox:
    """A job that uses a sandbox and ends."""
    async with open_sandbox(runtime, spec, sandbox_id=sandbox_id) as sandbox:
        await sandbox.bash("echo hello")
    return sandbox


@pytest.mark.parametrize("kept", [0, 3])
@pytest.mark.parametrize("check", sandbox_checks(shell=False), ids=lambda check: check.name)
async def test_it_keeps_the_contract(check: SandboxCheck, kept: int, autojump_clock: trio.testing.MockClock) -> None:
    """Cold and warm it answers as every runtime does."""
    async with pool(rules=WarmRules(total=kept, images={"": 3} if kept else {})) as it:
        await check.run(it.warm)
        assert bool(it.taken("warm")) == bool(kept)


async def test_a_warm_one_becomes_the_jobs(autojump_clock: trio.testing.MockClock) -> None:
    """It waits under its own name and no job; taken, it is the job's in listing and errors, and at once."""
    async with pool() as it:
        (row,) = it.warm.list()
        assert (row.sandbox_id, row.job_id, row.state, row.runtime) == ("boot-warm-1", "", "up", "fake")
        assert row.age_s > 0
        asked_at = trio.current_time()
        async with open_sandbox(it.warm, sandbox_id="job-1") as sandbox:
            assert trio.current_time() == asked_at
            assert sandbox.sandbox_id == "job-1"
            assert ("job-1", "contract") in {(row.sandbox_id, row.job_id) for row in it.warm.list()}
            assert it.taken("warm") == 1
        assert "job-1" not in it.names()
        with pytest.raises(SandboxError, match="sandbox job-1 is gone"):
            await sandbox.bash("echo hello")


async def test_one_that_was_used_is_never_used_again(autojump_clock: trio.testing.MockClock) -> None:
    """Jobs one after the other, each with a fresh one: what one wrote, no other reads."""
    async with pool() as it:
        seen = []
        for number in range(5):
            async with open_sandbox(it.warm, sandbox_id=f"job-{number}") as sandbox:
                with pytest.raises(FileNotFoundError):
                    await sandbox.read_file("mark")
                await sandbox.write_file("mark", b"mine")
                seen.append(sandbox)
            await settle()
        assert len({id(sandbox) for sandbox in seen}) == 5
        assert it.taken("warm") == 5


async def test_only_exactly_what_is_asked_for(autojump_clock: trio.testing.MockClock) -> None:
    """Another variable in the environment is another sandbox; no other job gets one with it."""
    async with pool() as it:
        await one_job(it.warm, SandboxSpec(env={"SECRET": "of one job"}))
        assert (it.taken("warm"), it.taken("cold")) == (0, 1)


async def test_those_of_a_named_image_are_for_either_session(autojump_clock: trio.testing.MockClock) -> None:
    """An interpreter comes up in them when it is used. What jobs alone keep asking for is kept for these."""
    python_first = SandboxSpec(first="python")
    async with pool() as it:
        for count in (1, 2):
            await one_job(it.warm, python_first)
            assert (it.taken("warm"), it.taken("cold")) == (count, 0)
            await settle()
    async with pool(rules=WarmRules()) as it:
        for _ in range(2):
            await one_job(it.warm, SPEC)
            await settle()
        assert it.warm.idle == 1
        await one_job(it.warm, python_first)
        assert (it.taken("warm"), it.taken("cold")) == (0, 3)


async def test_one_that_begins_with_an_interpreter_is_kept(autojump_clock: trio.testing.MockClock) -> None:
    """It is asked an empty cell, and nothing of its shell."""
    async with pool(rules=WarmRules()) as it:
        it.warm.expect(SandboxSpec(first="python"))
        await settle()
        async with open_sandbox(it.warm, SandboxSpec(first="python")) as sandbox:
            assert isinstance(sandbox, FakeSandbox)
            assert set(sandbox.calls) == {("python", "")}
        assert it.taken("warm") == 1


async def test_what_is_asked_for_again_is_kept(autojump_clock: trio.testing.MockClock) -> None:
    """No configuration: the second ask makes a habit, the third finds one ready, and what is unused for long goes."""
    async with pool(rules=WarmRules(idle_s=60.0)) as it:
        for _ in range(3):
            await one_job(it.warm, OTHER)
            await settle()
        assert (it.taken("cold"), it.taken("warm")) == (2, 1)
        assert it.warm.idle == 2
        await trio.sleep(60.0)
        assert it.warm.idle == 0
        assert it.unused("idle") == 2


async def test_an_expected_one_is_ready(autojump_clock: trio.testing.MockClock) -> None:
    """A hint makes one; if nobody comes, it goes, and it holds up nobody."""
    async with pool(rules=WarmRules()) as it:
        it.warm.expect(OTHER)
        await settle()
        await one_job(it.warm, OTHER)
        assert (it.taken("warm"), it.warm.idle) == (1, 0)
        it.warm.expect(OTHER)
        await settle()
        assert it.warm.idle == 1
        await trio.sleep(EXPECTED_S)
        assert (it.warm.idle, it.unused("idle")) == (0, 1)


async def test_an_old_one_is_replaced(autojump_clock: trio.testing.MockClock) -> None:
    """What has waited for too long is ended, and another one made."""
    async with pool(rules=WarmRules(images={"": 1}, age_s=100.0)) as it:
        assert it.names() == ["boot-warm-1"]
        await trio.sleep(100.0 + LOOK_EVERY_S)
        assert it.names() == ["boot-warm-2"]
        assert it.unused("old") == 1


@pytest.mark.parametrize("answer", [CommandResult(exit_code=1, output=b""), 1000.0, SandboxError("broken")])
async def test_one_that_does_not_answer_is_not_handed_out(
    answer: Answer, autojump_clock: trio.testing.MockClock
) -> None:
    """A shell that says something else, nothing, or is broken: the job gets a cold one, and the warm one is ended."""
    sick = False

    def said(session: SessionName, code: str) -> Answer:
        return answer if sick and code == "true" else toy_answer(session, code)

    async with pool(FakeRuntime(said)) as it:
        assert it.warm.idle == 1
        sick = True
        await one_job(it.warm)
        assert (it.taken("warm"), it.taken("cold"), it.unused("unfit")) == (0, 1, 1)
        await settle()
        assert it.warm.idle == 0
        assert "boot-warm-1" not in it.names()
        sick = False
        await trio.sleep(60.0)
        await one_job(it.warm)
        assert it.taken("warm") == 1


async def test_one_that_died_waiting_is_replaced(autojump_clock: trio.testing.MockClock) -> None:
    """Its death disturbs nobody and no job gets it; the pool makes another, later each time."""
    async with pool(FakeRuntime(die_after_s=10.0)) as it:
        await trio.sleep(200.0)
        assert 5 <= it.unused("died") <= 12
        assert it.taken("warm") == 0


async def test_one_that_ends_by_itself_ends_its_job(autojump_clock: trio.testing.MockClock) -> None:
    """A lent one that dies raises in the job that has it, as a cold one does, and names it."""
    async with pool(FakeRuntime(die_after_s=10.0)) as it:
        with pytest.RaisesGroup(pytest.RaisesExc(SandboxError, match="sandbox job-1 ended by itself")):
            async with open_sandbox(it.warm, sandbox_id="job-1"):
                assert it.taken("warm") == 1
                await trio.sleep(100.0)
        assert it.unused("died") == 0


async def test_a_start_that_fails_is_tried_again_later(autojump_clock: trio.testing.MockClock) -> None:
    """A spec that does not come up is not started in a loop, and other specs do not wait for it."""
    inner = FakeRuntime(fail_starts=range(1, 6))
    async with pool(inner) as it:
        await trio.sleep(200.0)
        assert (it.warm.idle, it.unused("failed")) == (1, 5)
        assert inner.starts == 6


async def test_bounds_of_what_waits(autojump_clock: trio.testing.MockClock) -> None:
    """In all, of one spec, and of how many specs: however much is asked for."""
    rules = WarmRules(total=5, per_spec=2, specs=3)
    async with pool(rules=rules) as it:
        for turn in range(5):
            for name in "abcdef":
                await one_job(it.warm, SandboxSpec(image=name), f"job-{turn}-{name}")
                rows = [row for row in it.warm.list() if not row.job_id]
                assert len(rows) <= 5
                assert all([row.image for row in rows].count(image) <= 2 for image in "abcdef")
        await settle(STAYS_S + 3 * LOOK_EVERY_S)
        rows = [row for row in it.warm.list() if not row.job_id]
        assert len({row.image for row in rows}) == 3
        assert "f" in {row.image for row in rows}


async def test_many_specs_in_turns_do_not_churn(autojump_clock: trio.testing.MockClock) -> None:
    """Twenty specs that take turns faster than sandboxes are worth ending: few are made in advance for it."""
    inner = FakeRuntime()
    async with pool(inner, WarmRules(total=4, specs=4)) as it:
        for turn in range(10):
            for number in range(20):
                await one_job(it.warm, SandboxSpec(image=str(number)), f"job-{turn}-{number}")
        assert inner.starts - it.taken("cold") <= 4 * (1 + trio.current_time() / STAYS_S) + it.taken("warm")


async def test_starts_are_admitted(autojump_clock: trio.testing.MockClock) -> None:
    """Thirty jobs at once: never more starts than allowed, and all get a sandbox."""
    inner = FakeRuntime(boot_s=1.0)
    up: list[str] = []

    async with pool(inner, WarmRules(total=0), starts_max=4) as it:

        async def job(name: str) -> None:
            async with open_sandbox(it.warm, sandbox_id=name):
                up.append(name)
                await trio.sleep(5.0)

        async with trio.open_nursery() as nursery:
            for number in range(30):
                nursery.start_soon(job, f"job-{number}")
        seen = it.warm.admission.statistics()
        assert (len(up), seen.peak, seen.admitted_total) == (30, 4, 30)
        assert it.metrics.value("prorld_sandbox_starts_waiting", runtime="fake") == 0


async def test_a_daemon_that_drains_gives_them_up(autojump_clock: trio.testing.MockClock) -> None:
    """While they are not wanted none is kept, starting ones included; jobs are served all the same."""
    wanted = False
    async with pool(FakeRuntime(boot_s=50.0), WarmRules(images={"": 2})) as it:
        assert len(it.names()) == 2
        it.warm.keep_while(lambda: wanted)
        await settle()
        assert it.names() == []
        await one_job(it.warm)
        assert it.names() == []
        wanted = True
        await settle(60.0)
        assert it.warm.idle == 2
        wanted = False
        await settle()
        assert it.names() == []


class Plain:
    """A plugin's sandbox: what the contract asks for and no more."""

    def __init__(self, inner: Sandbox) -> None:
        self._inner = inner
        self.sandbox_id = inner.sandbox_id
        self.workdir = inner.workdir
        self.bash = inner.bash
        self.python = inner.python
        self.read_file = inner.read_file
        self.write_file = inner.write_file
        self.upload = inner.upload
        self.download = inner.download


class PlainRuntime(FakeRuntime):
    """Makes those."""

    async def run(
        self,
        spec: SandboxSpec,
        *,
        sandbox_id: str,
        job_id: str,
        task_status: trio.TaskStatus[Sandbox] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        class Wrapping:
            def started(self, value: Sandbox | None = None) -> None:
                assert value is not None
                task_status.started(Plain(value))

        await super().run(spec, sandbox_id=sandbox_id, job_id=job_id, task_status=Wrapping())


async def test_what_can_not_be_adopted_is_not_kept(autojump_clock: trio.testing.MockClock) -> None:
    """A runtime that does not know of adoption is tried once; its jobs have cold ones."""
    inner = PlainRuntime()
    async with pool(inner) as it:
        await trio.sleep(500.0)
        await one_job(it.warm)
        assert (inner.starts, it.taken("cold"), it.unused("failed")) == (2, 1, 1)


async def test_after_the_keeper_jobs_start_their_own(autojump_clock: trio.testing.MockClock) -> None:
    """A pool that has ended, or never was kept, keeps nothing and still makes sandboxes."""
    inner = FakeRuntime()
    warm = WarmRuntime(inner, WarmRules(images={"": 3}), boot_id="boot")
    await one_job(warm)
    async with trio.open_nursery() as nursery:
        await nursery.start(warm.keep)
        await settle()
        assert warm.idle == 3
        nursery.cancel_scope.cancel()
    assert (warm.idle, inner.live) == (0, {})
    await one_job(warm)
