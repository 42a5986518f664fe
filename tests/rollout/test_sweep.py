"""The cancel sweep: a scenario of several jobs is run once per scheduler step with a cancel at that step.

What must hold in every run, wherever the cancel falls: each accepted job has exactly one terminal event, no sandbox
and no engine call is alive, every gate is empty, every lease is given back, and nothing waits in a mailbox.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import pytest
import structlog
import trio

from prorld.domain.job import JobState
from prorld.errors import Overloaded
from prorld.testing.fake_backend import FakeBackend
from prorld.testing.fake_sandbox import FakeRuntime
from prorld.testing.scripted_engine.script import Fault, Latency, Script
from prorld.testing.sweep import sweep
from prorld.wire.jobs import JobRecord
from prorld.wire.policies import PausePolicy, ResumePolicy, UpdatePolicy
from tests.rollout.support import Room, byte_renderer

# Two turns each: a call of a tool that is not there, then an answer.
TURNS: list[list[int] | str] = ['<tool_call>{"name": "bash", "arguments": {"command": "true"}}</tool_call>', "42"]


def crowded(state: Path | None = None) -> Room:
    """More jobs than places, two engines of which one stumbles, a sandbox that fails once."""
    return Room(
        state=state,
        backends=[
            FakeBackend(
                Script(turns=TURNS, latency=Latency(fixed_s=0.5), faults=[Fault(kind="reset")]), url="fake://one"
            ),
            FakeBackend(Script(turns=TURNS, latency=Latency(fixed_s=0.2)), url="fake://two"),
        ],
        runtime=FakeRuntime(fail_starts=(2,)),
        workers=(2, 2, 1),
    )


JOBS: dict[str, dict[str, object]] = {
    "ok": {"sandbox": True, "expected": "42"},
    "retried": {"sandbox": True, "seconds": {"run": 0.3}},
    "hangs": {"sandbox": True, "fail": {"run": "hang"}},
    "breaks": {"fail": {"eval": "bug"}},
    "cancelled": {"sandbox": True, "seconds": {"init": 0.2, "run": 5.0}},
}


async def work(here: Room, accepted: list[str]) -> None:
    """Submit all, cancel one in the middle, wait for all."""
    for name, instance in JOBS.items():
        await here.submit(name, dict(instance), timeouts={"run_s": 3.0}, agent={"tools": []})
        accepted.append(name)
    await trio.sleep(1.0)
    await here.supervisor.cancel("cancelled", "tests", "not needed")
    for name in JOBS:
        await here.supervisor.wait_done(name, "tests")


async def check(here: Room) -> None:
    """Every accepted job has one end, and nothing is left."""
    for record in (await here.supervisor.list("tests", limit=100)).items:
        ends = [event for event in await here.supervisor.events(record.job_id, "tests") if event.event == "job.done"]
        assert len(ends) == 1, record.job_id
        assert record.state is JobState.DONE
        assert record.outcome is not None
        assert (record.reward is None) or record.outcome.kind.value in ("ok", "policy_limit")
        document = await here.supervisor.trajectory(record.job_id, "tests")
        assert sum(sum(branch.mask) for branch in document.branches) == sum(c.sampled_len for c in document.calls)
    counts = here.supervisor.counts()
    assert sum(counts.values()) == counts["done"], counts
    here.assert_clean()


async def cancel_the_daemon(victim: trio.CancelScope) -> None:
    """The whole room is cancelled at the step."""
    here, accepted = crowded(), list[str]()
    try:
        with victim:
            async with trio.open_nursery() as nursery:
                await nursery.start(here.run)
                await work(here, accepted)
                nursery.cancel_scope.cancel()
    except* Overloaded:
        # Whoever submits to a daemon on its way out is told so.
        assert victim.cancel_called
    here.assert_clean()
    told = {record.job_id: record for record in (await here.supervisor.list("tests", limit=100)).items}
    assert set(accepted) <= set(told)
    await go_on(here, told)


async def go_on(here: Room, told: Mapping[str, JobRecord]) -> None:
    """The next life of the daemon: what was told of an end stays, and everything else that was accepted gets one."""
    again = crowded(here.state)
    async with trio.open_nursery() as nursery:
        await nursery.start(again.run)
        with trio.fail_after(120):
            await again.supervisor.wait_idle()
        await check(again)
        nursery.cancel_scope.cancel()
    after = {record.job_id: record for record in (await again.supervisor.list("tests", limit=100)).items}
    assert set(told) <= set(after)
    for name, record in told.items():
        if record.state is JobState.DONE:
            assert after[name] == record
        assert after[name].created_at == record.created_at
        numbers = [attempt.n for attempt in after[name].attempts]
        assert numbers == sorted(set(numbers)), after[name]


async def cancel_the_client(victim: trio.CancelScope) -> None:
    """Only whoever submits and waits is cancelled; the jobs it left behind still end."""
    here, accepted = crowded(), list[str]()
    async with trio.open_nursery() as nursery:
        await nursery.start(here.run)
        with victim:
            await work(here, accepted)
        # A submit that is in the mailbox when its client leaves is still accepted.
        await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(60):
            await here.supervisor.wait_idle()
        await check(here)
        nursery.cancel_scope.cancel()
    assert set(accepted) <= {record.job_id for record in (await here.supervisor.list("tests", limit=100)).items}


async def cancel_the_jobs(victim: trio.CancelScope) -> None:
    """At the step every job is cancelled in one sweep; what was accepted by then ends cancelled or had its end."""
    here, accepted = crowded(), list[str]()
    async with trio.open_nursery() as nursery:
        await nursery.start(here.run)
        with victim:
            await work(here, accepted)
        here.supervisor.drain()
        await here.supervisor.cancel_many("tests", job_ids=None, group_id=None, reason="all of them")
        with trio.fail_after(60):
            await here.supervisor.wait_idle()
        with pytest.raises(Overloaded):
            await here.submit("late", {})
        await check(here)
        nursery.cancel_scope.cancel()
    with pytest.raises(Overloaded):
        await here.submit("later", {})


async def train(here: Room) -> None:
    """A pause, a resume and an update, in the middle of the work."""
    await trio.sleep(0.2)
    paused = await here.policies.pause("default", PausePolicy(mode="abort", pause_id="mine"), "tests")
    await trio.sleep(0.3)
    await here.policies.resume("default", ResumePolicy(pause_id=paused.pause_id, version=1))
    await trio.sleep(0.1)
    begun = await here.policies.update("default", UpdatePolicy(version=2, how="reload", path="/w"), "tests")
    await here.policies.wait_update("default", begun.update_id)


async def cancel_the_trainer(victim: trio.CancelScope) -> None:
    """Whoever pauses, resumes and updates the policy leaves at the step; what it began goes on, and all jobs end."""
    here, accepted = crowded(), list[str]()
    async with trio.open_nursery() as nursery:
        await nursery.start(here.run)
        with trio.fail_after(120):
            async with trio.open_nursery() as working:
                working.start_soon(work, here, accepted)
                with victim:
                    await train(here)
                await trio.sleep(1)
                if here.book.paused():
                    await here.policies.resume("default", ResumePolicy(pause_id="mine", version=1))
        assert here.book.gate("default").is_open
        assert {update.state for update in here.policies.updates("default").items} <= {"done"}
        await check(here)
        nursery.cancel_scope.cancel()


SCENARIOS: list[Callable[[trio.CancelScope], Awaitable[None]]] = [
    cancel_the_daemon,
    cancel_the_client,
    cancel_the_jobs,
    cancel_the_trainer,
]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_cancel_at_any_step_leaves_nothing(scenario: Callable[[trio.CancelScope], Awaitable[None]]) -> None:
    """Seeds beyond the first few are run by ``just sim``, which sets PRORLD_SWEEP_SEEDS."""
    byte_renderer()
    seeds = range(int(os.environ.get("PRORLD_SWEEP_SEEDS", "1")))
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    try:
        report = sweep(scenario, seeds=seeds)
    finally:
        structlog.reset_defaults()
    sys.stdout.write(f"{scenario.__name__}: {report.runs} runs of up to {report.steps_max} steps, {len(seeds)} seeds\n")
    assert report.runs > 200
