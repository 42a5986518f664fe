"""The life of a job: every way it can end, and that nothing is left when it has."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import trio

from prorld.domain.job import JobState
from prorld.domain.outcome import OutcomeKind, StopReason, Verdict
from prorld.handlers import RunResult
from prorld.testing.fake_backend import FakeBackend
from prorld.testing.fake_sandbox import FakeRuntime
from prorld.testing.handlers import FakeHandler
from prorld.testing.scripted_engine.script import Fault, Latency, Script
from prorld.wire.jobs import SubmitJob
from tests.rollout.support import Room, room


def says(*turns: str, **options: Any) -> list[FakeBackend]:
    """One engine that says these turns."""
    return [FakeBackend(Script(turns=list(turns), **options))]


async def test_a_job_is_graded_and_its_tokens_are_there(autojump_clock: trio.testing.MockClock) -> None:
    """INIT, RUN and EVAL happen in order, and the trajectory holds what the engine sampled."""
    async with room(backends=says("the answer is 42")) as here:
        record = await here.finish("a", {"expected": "42", "sandbox": True})
        assert (record.state, record.waiting_for) == (JobState.DONE, None)
        assert record.outcome is not None
        assert (record.outcome.kind, record.verdict, record.reward) == (OutcomeKind.OK, Verdict.USE, 1.0)
        assert record.stop_reason is StopReason.FINISHED
        assert [attempt.n for attempt in record.attempts] == [1]
        document = await here.supervisor.trajectory("a", "tests")
        (branch,) = document.branches
        assert len(branch.token_ids) == len(branch.mask) == len(branch.logprobs)
        assert sum(branch.mask) == record.tokens.sampled == sum(call.sampled_len for call in document.calls)
        sampled = bytes(i for i, bit in zip(branch.token_ids, branch.mask, strict=True) if bit and i < 256)
        assert sampled == b"the answer is 42"
        here.assert_clean()


async def test_events_tell_the_life_in_order_without_gaps(autojump_clock: trio.testing.MockClock) -> None:
    """The stages wait, are entered and left in turn, and the last event is the end."""
    async with room(backends=says("42")) as here:
        await here.finish("a")
        events = await here.supervisor.events("a", "tests")
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        assert (events[0].event, events[-1].event) == ("job.queued", "job.done")
        steps = [(event.data["stage"], event.data["what"]) for event in events if event.event == "job.stage"]
        assert steps == [(stage, what) for stage in ("init", "run", "eval") for what in ("waiting", "entered", "left")]
        assert [event.data["turn"] for event in events if event.event == "job.turn"] == [0]


@pytest.mark.parametrize(
    ("fail", "kind", "stage"),
    [
        ({"init": "sandbox"}, OutcomeKind.ENV_ERROR, "init"),
        ({"init": "bug"}, OutcomeKind.HANDLER_ERROR, "init"),
        ({"run": "engine"}, OutcomeKind.LLM_ERROR, "run"),
        ({"run": "handler"}, OutcomeKind.HANDLER_ERROR, "run"),
        ({"run": "bug"}, OutcomeKind.HANDLER_ERROR, "run"),
        ({"eval": "grader"}, OutcomeKind.GRADER_ERROR, "eval"),
        ({"eval": "bug"}, OutcomeKind.GRADER_ERROR, "eval"),
    ],
)
async def test_a_failure_is_named_and_never_a_zero(
    fail: dict[str, str], kind: OutcomeKind, stage: str, autojump_clock: trio.testing.MockClock
) -> None:
    """Whatever fails, the reward is null, the verdict is drop, and the stage is told."""
    async with room(backends=says("42")) as here:
        record = await here.finish("a", {"fail": fail, "sandbox": True})
        assert record.outcome is not None
        assert (record.outcome.kind, record.outcome.stage) == (kind, stage)
        assert (record.reward, record.verdict) == (None, Verdict.DROP)
        here.assert_clean()


async def test_infrastructure_is_tried_again_and_every_try_is_kept(autojump_clock: trio.testing.MockClock) -> None:
    """The second attempt succeeds; the record tells of both."""
    async with room(backends=says("42")) as here:
        record = await here.finish("a", {"fail": {"init": "sandbox"}, "failing_attempts": 1}, max_attempts=3)
        assert [attempt.outcome.kind for attempt in record.attempts] == [OutcomeKind.ENV_ERROR, OutcomeKind.OK]
        assert record.reward == 1.0


async def test_a_handlers_own_bug_is_not_tried_again(autojump_clock: trio.testing.MockClock) -> None:
    """The same code would fail the same way."""
    async with room() as here:
        record = await here.finish("a", {"fail": {"run": "bug"}}, max_attempts=5)
        assert len(record.attempts) == 1


async def test_a_handler_can_recover_a_stage(autojump_clock: trio.testing.MockClock) -> None:
    """What recovery returns stands for what the stage should have returned."""
    async with room(backends=says("42")) as here:
        record = await here.finish("a", {"fail": {"eval": "bug"}, "recovers": ["eval"]})
        assert record.outcome is not None
        assert (record.outcome.kind, record.reward) == (OutcomeKind.OK, 0.5)


async def test_trouble_of_the_infrastructure_is_not_for_a_handler_to_explain_away(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A lost engine or sandbox is recorded as such, whatever the handler would make of it."""
    async with room(backends=says("42")) as here:
        for stage, failure, kind in (
            ("run", "engine", OutcomeKind.LLM_ERROR),
            ("eval", "sandbox", OutcomeKind.ENV_ERROR),
        ):
            instance = {"fail": {stage: failure}, "recovers": [stage]}
            record = await here.finish(f"{stage}-{failure}", instance, max_attempts=1)
            assert record.outcome is not None
            assert (record.outcome.kind, record.reward) == (kind, None)


async def test_a_recovery_is_told_in_the_events(autojump_clock: trio.testing.MockClock) -> None:
    """Whoever reads the job sees that a stage failed and was recovered, and from what."""
    async with room(backends=says("42")) as here:
        await here.finish("a", {"fail": {"eval": "bug"}, "recovers": ["eval"]})
        (event,) = [e for e in await here.supervisor.events("a", "tests") if e.event == "job.recovered"]
        assert event.data["stage"] == "eval"
        assert "ZeroDivisionError" in event.data["error"]


class Silent(FakeHandler):
    """Never talks to the policy."""

    name = "silent"
    data_sources: ClassVar[tuple[str, ...]] = ()

    async def run(self, job):
        return RunResult(stop=StopReason.FINISHED)


async def test_a_rollout_without_a_call_is_not_ok(autojump_clock: trio.testing.MockClock) -> None:
    """Finishing RUN without ever asking the policy is a handler error, whatever the grader would say."""
    async with room() as here:
        here.registry.add(Silent())
        await here.supervisor.submit(SubmitJob(job_id="a", handler="silent", instance={}), "tests")
        record = await here.supervisor.wait_done("a", "tests")
        assert record.outcome is not None
        assert (record.outcome.kind, record.outcome.code) == (OutcomeKind.HANDLER_ERROR, "no_model_calls")
        assert record.reward is None


@pytest.mark.parametrize("stage", ["init", "run", "eval"])
async def test_a_stage_that_hangs_times_out_by_its_own_budget(
    stage: str, autojump_clock: trio.testing.MockClock
) -> None:
    """The time-out names the stage; a mask for training, never a zero; nothing is left."""
    async with room(backends=says("42")) as here:
        began = trio.current_time()
        record = await here.finish(
            "a", {"fail": {stage: "hang"}, "sandbox": True}, timeouts={f"{stage}_s": 5.0}, max_attempts=1
        )
        assert record.outcome is not None
        assert (record.outcome.kind, record.outcome.stage) == (OutcomeKind.TIMEOUT, stage)
        assert (record.reward, record.verdict) == (None, Verdict.MASK)
        assert 5.0 <= trio.current_time() - began < 6.0
        here.assert_clean()


async def test_waiting_at_a_gate_burns_no_budget(autojump_clock: trio.testing.MockClock) -> None:
    """A job that waits ten times its budget for another one still runs, and its queue time is told."""
    async with room(backends=says("42"), workers=(4, 1, 4)) as here:
        await here.submit("slow", {"seconds": {"run": 50.0}}, timeouts={"run_s": 60.0})
        record = await here.finish("quick", {"seconds": {"run": 1.0}}, timeouts={"run_s": 5.0, "total_s": 6.0})
        assert record.outcome is not None
        assert record.outcome.kind is OutcomeKind.OK
        assert record.timing.queue_run_s >= 49.0
        assert record.timing.run_s < 2.0


async def test_the_total_budget_spans_the_stages(autojump_clock: trio.testing.MockClock) -> None:
    """Seconds spent in INIT are missing in RUN."""
    async with room(backends=says("42")) as here:
        record = await here.finish("a", {"seconds": {"init": 3.0, "run": 3.0}}, timeouts={"total_s": 5.0})
        assert record.outcome is not None
        assert (record.outcome.kind, record.outcome.code) == (OutcomeKind.TIMEOUT, "total_timeout")
        assert record.outcome.stage == "run"


async def test_a_cancel_ends_everything_before_it_is_told(autojump_clock: trio.testing.MockClock) -> None:
    """When the record says cancelled, the engine call and the sandbox are gone."""
    backends = [FakeBackend(Script(latency=Latency(fixed_s=1000.0)))]
    async with room(backends=backends) as here:
        await here.submit("a", {"sandbox": True})
        await trio.sleep(1)
        assert backends[0].live
        assert here.runtime.live
        await here.supervisor.cancel("a", "tests", "enough")
        record = await here.supervisor.wait_done("a", "tests")
        assert not backends[0].live
        assert not here.runtime.live
        assert record.outcome is not None
        assert (record.outcome.kind, record.outcome.message) == (OutcomeKind.CANCELLED, "enough")
        assert (record.reward, record.verdict) == (None, Verdict.DROP)
        here.assert_clean()


async def test_the_sandbox_is_gone_before_the_job_waits_for_eval(autojump_clock: trio.testing.MockClock) -> None:
    """A handler that does not grade in it does not hold it in a queue."""
    async with room(backends=says("42"), workers=(4, 4, 0)) as here:
        await here.submit("a", {"sandbox": True})
        await trio.sleep(5)
        record = await here.supervisor.get("a", "tests")
        assert (record.state, record.waiting_for) == (JobState.RUNNING, "eval")
        assert not here.runtime.live


async def test_init_runs_ahead_of_run_within_a_bound(autojump_clock: trio.testing.MockClock) -> None:
    """However many jobs wait for a slow RUN, only so many hold a sandbox; those that are held back wait for INIT."""
    backends = [FakeBackend(Script(turns=["42"], latency=Latency(fixed_s=10.0)))]
    async with room(backends=backends, workers=(4, 2, 4), ahead=3) as here:
        for number in range(20):
            await here.submit(f"j{number}", {"sandbox": True})
        await trio.sleep(5)
        assert len(here.runtime.live) == 2 + 3
        waiting = [record.waiting_for for record in (await here.supervisor.list("tests", limit=100)).items]
        assert (waiting.count("run"), waiting.count("init"), waiting.count(None)) == (3, 15, 2)
        assert here.supervisor.stages().init.waiting == 15
        ends = [await here.supervisor.wait_done(f"j{number}", "tests") for number in range(20)]
        assert {record.reward for record in ends} == {1.0}
        assert max(record.timing.queue_init_s for record in ends) > 50
        here.assert_clean()


async def test_a_sandbox_that_dies_ends_the_attempt(autojump_clock: trio.testing.MockClock) -> None:
    """It is an environment error, even in the middle of a call to the engine."""
    backends = [FakeBackend(Script(latency=Latency(fixed_s=100.0)))]
    async with room(backends=backends, runtime=FakeRuntime(die_after_s=2.0)) as here:
        record = await here.finish("a", {"sandbox": True}, max_attempts=1)
        assert record.outcome is not None
        assert record.outcome.kind is OutcomeKind.ENV_ERROR
        here.assert_clean()


async def test_an_engine_that_dies_is_left_for_another_with_the_same_tokens(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The job goes on elsewhere and no token is lost or doubled."""
    dying = FakeBackend(Script(faults=[Fault(kind="die")]), url="fake://dying")
    spare = FakeBackend(Script(turns=["42"], latency=Latency(fixed_s=1.0)), url="fake://spare")
    async with room(backends=[dying, spare]) as here:
        for name in ("a", "b"):
            await here.submit(name)
        for name in ("a", "b"):
            record = await here.supervisor.wait_done(name, "tests")
            assert record.outcome is not None
            assert record.outcome.kind is OutcomeKind.OK
            assert record.tokens.sampled == 3
        assert {request.session for request in dying.requests} <= {request.session for request in spare.requests}


async def test_a_job_waits_for_an_engine_within_its_own_budget(autojump_clock: trio.testing.MockClock) -> None:
    """Without an engine RUN waits; that its time runs out so is the engines' fault, and is tried again."""
    async with room(backends=[]) as here:
        record = await here.finish("a", timeouts={"run_s": 7.0}, max_attempts=2)
        assert record.outcome is not None
        assert (record.outcome.kind, record.outcome.code) == (OutcomeKind.LLM_ERROR, "no_backend")
        assert (len(record.attempts), record.verdict) == (2, Verdict.DROP)


async def test_an_engine_that_is_busy_to_the_end_is_no_time_out_of_the_policy(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """503 until RUN's time is over is infrastructure; a job that is answered in time never notices."""
    busy = Script(faults=[Fault(kind="status", status=503, count=None)])
    async with room(backends=[FakeBackend(busy)]) as here:
        record = await here.finish("a", timeouts={"run_s": 7.0}, max_attempts=1)
        assert record.outcome is not None
        assert (record.outcome.kind, record.outcome.code) == (OutcomeKind.LLM_ERROR, "engine_busy")
    for_a_while = Script(turns=["42"], faults=[Fault(kind="status", status=503, count=5)])
    async with room(backends=[FakeBackend(for_a_while)]) as here:
        record = await here.finish("a", timeouts={"run_s": 60.0})
        assert record.outcome is not None
        assert record.outcome.kind is OutcomeKind.OK


async def test_jobs_overlap_in_different_stages(autojump_clock: trio.testing.MockClock) -> None:
    """With one worker per stage, three jobs of one second per stage take five seconds and not nine."""
    async with room(backends=says("42"), workers=(1, 1, 1)) as here:
        began = trio.current_time()
        for name in "abc":
            await here.submit(name, {"seconds": {"init": 1.0, "run": 1.0, "eval": 1.0}})
        for name in "abc":
            await here.supervisor.wait_done(name, "tests")
        assert 5.0 <= trio.current_time() - began < 6.0


async def test_a_daemon_that_goes_down_ends_what_jobs_hold_and_not_the_jobs(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Nothing of them is left running, and nobody is told an end that is none: they go on in the next life."""
    here = Room(backends=[FakeBackend(Script(latency=Latency(fixed_s=1000.0)))])
    async with trio.open_nursery() as nursery:
        await nursery.start(here.run)
        for name in "abc":
            await here.submit(name, {"sandbox": True})
        await trio.sleep(3)
        nursery.cancel_scope.cancel()
    for name in "abc":
        record = await here.supervisor.get(name, "tests")
        assert (record.state, record.outcome) == (JobState.RUNNING, None)
    assert not here.runtime.live
    assert not here.backends[0].live
