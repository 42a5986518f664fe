"""Cancels at every scheduler step and at random: no sandbox left, none for two jobs, never more starts than allowed."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing

from prorld.errors import SandboxError
from prorld.sandbox.contract import Sandbox, SandboxSpec
from prorld.sandbox.warm import WarmRuntime
from prorld.sandbox.warm_plan import WarmRules
from prorld.testing.fake_sandbox import FakeRuntime
from prorld.testing.sandbox_contract import open_sandbox
from prorld.testing.sweep import sweep

STARTS_MAX = 2


class Watched(FakeRuntime):
    """Counts the starts that are under way."""

    starting_most = 0
    _starting = 0

    async def run(
        self,
        spec: SandboxSpec,
        *,
        sandbox_id: str,
        job_id: str,
        task_status: trio.TaskStatus[Sandbox] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        runtime, up = self, False
        self._starting += 1
        self.starting_most = max(self.starting_most, self._starting)

        class Counting:
            def started(self, value: Sandbox | None = None) -> None:
                nonlocal up
                runtime._starting -= 1
                up = True
                assert value is not None
                task_status.started(value)

        try:
            await super().run(spec, sandbox_id=sandbox_id, job_id=job_id, task_status=Counting())
        finally:
            if not up:
                self._starting -= 1


class Crowd:
    """Jobs on a warm runtime, and what must never be."""

    def __init__(self, inner: Watched, rules: WarmRules) -> None:
        self.inner = inner
        self.warm = WarmRuntime(inner, rules, boot_id="boot", starts_max=STARTS_MAX)
        self.owners: dict[int, str] = {}
        self._kept: list[object] = []
        self.served = 0

    async def job(self, name: str, spec: SandboxSpec, seconds: float) -> None:
        """Use a sandbox for a while; it has to be fresh, and ours alone, until it ends."""
        try:
            async with open_sandbox(self.warm, spec, sandbox_id=name) as sandbox:
                assert id(sandbox) not in self.owners, "a sandbox for two jobs"
                self.owners[id(sandbox)] = name
                self._kept.append(sandbox)  # so that its id is not given to another one
                assert sandbox.sandbox_id == name
                with pytest.raises(FileNotFoundError):
                    await sandbox.read_file("mark")
                await sandbox.write_file("mark", name.encode())
                await trio.sleep(seconds)
                assert await sandbox.read_file("mark") == name.encode()
                self.served += 1
        except* SandboxError:
            pass  # it failed on purpose
        finally:
            assert name not in self.inner.live, "a sandbox outlived its job"

    def assert_quiet(self) -> None:
        """Nothing of any job is left, and every place is free."""
        assert not [box for box in self.inner.live.values() if box.job_id]
        assert self.inner.starting_most <= STARTS_MAX

    def assert_over(self) -> None:
        """Nothing at all is left."""
        self.assert_quiet()
        assert self.inner.live == {}
        assert self.warm.idle == 0
        seen = self.warm.admission.statistics()
        assert (seen.starting, seen.waiting) == (0, 0)


async def three_jobs(crowd: Crowd) -> None:
    """Warm and cold, at once and after one another, with a hint."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(crowd.job, "a", SandboxSpec(), 0.5)
        nursery.start_soon(crowd.job, "b", SandboxSpec(), 0.1)
        crowd.warm.expect(SandboxSpec(image="x"))
        await trio.sleep(0.3)
        nursery.start_soon(crowd.job, "c", SandboxSpec(image="x"), 0.1)


def swept(crowd: Crowd, victim: trio.CancelScope, *, pool_too: bool) -> Callable[[], Awaitable[None]]:
    async def scenario() -> None:
        async with trio.open_nursery() as nursery:
            if not pool_too:
                await nursery.start(crowd.warm.keep)
                await trio.sleep(1.0)
            with victim:
                if pool_too:
                    await nursery.start(crowd.warm.keep)
                    await trio.sleep(1.0)
                await three_jobs(crowd)
            crowd.assert_quiet()
            # Whatever was cancelled, the next job is served.
            before = crowd.served
            await crowd.job("last", SandboxSpec(), 0.1)
            await crowd.job("very last", SandboxSpec(), 0.1)
            assert crowd.served > before
            await trio.sleep(60.0)
            assert len(crowd.inner.live) == crowd.warm.idle, "one that nobody has and nobody waits for"
            nursery.cancel_scope.cancel()
        crowd.assert_over()

    return scenario


@pytest.mark.slow
@pytest.mark.parametrize("pool_too", [False, True])
@pytest.mark.parametrize("fail_start", [None, 1, 2, 3])
def test_a_cancel_at_every_step(pool_too: bool, fail_start: int | None) -> None:
    """Of the jobs, or of the pool too, with a start that fails: nothing is left and the next job is served."""

    async def scenario(victim: trio.CancelScope) -> None:
        crowd = Crowd(Watched(fail_starts=() if fail_start is None else (fail_start,)), WarmRules(images={"": 1}))
        await swept(crowd, victim, pool_too=pool_too)()

    report = sweep(scenario, seeds=range(2))
    assert report.runs > 100


async def test_the_whole_pool_is_cancelled_under_its_jobs(autojump_clock: trio.testing.MockClock) -> None:
    """The keeper ends first: jobs with lent sandboxes hear of it, and nothing is left."""
    crowd = Crowd(Watched(), WarmRules(images={"": 2}))
    async with trio.open_nursery() as jobs:
        async with trio.open_nursery() as nursery:
            await nursery.start(crowd.warm.keep)
            await trio.sleep(1.0)
            jobs.start_soon(crowd.job, "a", SandboxSpec(), 1000.0)
            jobs.start_soon(crowd.job, "b", SandboxSpec(), 1000.0)
            await trio.sleep(1.0)
            assert {"a", "b"} <= set(crowd.inner.live)
            nursery.cancel_scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
    assert crowd.served == 0
    assert trio.current_time() < 100.0
    crowd.assert_over()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
async def test_random_jobs_cancels_and_faults(seed: int, autojump_clock: trio.testing.MockClock) -> None:
    """Two hundred jobs of five specs; failing starts and calls, sandboxes that die, jobs given up, drains."""
    draw = random.Random(seed)
    faults: dict[str, Any] = {
        "fail_starts": draw.sample(range(1, 300), 40),
        "fail_calls": draw.sample(range(1, 1500), 50),
        "die_after_s": draw.choice([None, 3.0]),
        "boot_s": draw.choice([0.0, 0.05, 0.5]),
    }
    rules = WarmRules(total=draw.choice([0, 3, 8]), per_spec=2, specs=3, idle_s=20.0, age_s=15.0, images={"": 1})
    crowd = Crowd(Watched(**faults), rules)
    wanted = True
    crowd.warm.keep_while(lambda: wanted)

    async def one(name: str) -> None:
        spec = SandboxSpec(image=draw.choice([None, None, "a", "b", "c", "d"]))
        if draw.random() < 0.2:
            crowd.warm.expect(spec)
            await trio.sleep(draw.random())
        with trio.move_on_after(draw.choice([0.0, 0.01, 0.06, 0.5, 5.0, 50.0])):
            await crowd.job(name, spec, draw.random() * 2)

    async with trio.open_nursery() as pool:
        await pool.start(crowd.warm.keep)
        async with trio.open_nursery() as jobs:
            for number in range(200):
                jobs.start_soon(one, f"job-{number}")
                await trio.sleep(draw.choice([0.0, 0.0, 0.1, 1.0]))
                wanted = draw.random() < 0.9
                waiting = [box for box in crowd.inner.live.values() if not box.job_id and box.up]
                assert crowd.warm.idle <= rules.total
                assert len(waiting) <= rules.total + 4, "those that end count, too"
        crowd.assert_quiet()
        assert crowd.served > 20
        pool.cancel_scope.cancel()
    crowd.assert_over()
