"""A grader asks another policy's engine; it gets an answer or a grader error, and the rollout knows nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, ClassVar

import pytest
import trio
import trio.testing

from prorld.domain.messages import Message, system, user
from prorld.domain.outcome import OutcomeKind
from prorld.errors import GraderError, HandlerError, NotFound
from prorld.handlers import Grade, JobContext, RunResult
from prorld.rollout import judge as judge_module
from prorld.testing.fake_backend import FakeBackend
from prorld.testing.handlers import FakeHandler, FakeInstance
from prorld.testing.jobs import run_handler
from prorld.testing.scripted_engine.engine import ScriptedEngine
from prorld.testing.scripted_engine.script import Fault, Latency, Script
from prorld.testing.sweep import sweep
from prorld.wire.looks import ReevaluateJob
from prorld.wire.ops import AddBackend
from tests.rollout.support import Room, byte_renderer, room

QUESTION = [system("Say yes or no."), user("Is 42 right?")]


class Judged(FakeHandler):
    """Its grade is what a judge says."""

    name = "judged"
    data_sources: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *, policy: str = "judge", messages: Sequence[Message] = QUESTION, **bounds: Any) -> None:
        super().__init__()
        self.policy = policy
        self.messages = messages
        self.bounds = bounds
        self.early: Callable[[JobContext[FakeInstance]], Any] | None = None
        self.answers: list[str] = []
        self.errors: list[Exception] = []

    async def run(self, job: JobContext[FakeInstance]) -> RunResult:
        result = await super().run(job)
        if self.early is not None:
            await self.early(job)
        return result

    async def evaluate(self, job: JobContext[FakeInstance], result: RunResult) -> Grade:
        try:
            self.answers.append(await job.ask(self.policy, self.messages, **self.bounds))
        except Exception as exc:
            self.errors.append(exc)
            raise
        return Grade(reward=float("yes" in self.answers[-1]))


def court() -> AbstractAsyncContextManager[Room]:
    """A room whose policy says one thing, and that knows another policy, which has no engine."""
    return room(backends=[FakeBackend(Script(turns=["the answer is 42"]))], also=["judge"])


def judge_engine(*turns: str, **script: Any) -> FakeBackend:
    return FakeBackend(Script(turns=list(turns), **script), url="fake://judge")


async def with_judge(here: Room, handler: FakeHandler, engine: FakeBackend | None) -> None:
    """The handler in the registry, and an engine of the policy ``judge``."""
    here.registry.add(handler)
    if engine is not None:
        here.engines[engine.url] = engine
        here.backends.append(engine)
        await here.pool.add(AddBackend(url=engine.url, kind="vllm", policy="judge"))


async def judged(here: Room, name: str = "a", **fields: Any):
    return await here.finish(name, handler="judged", max_attempts=1, **fields)


async def test_the_answer_is_greedy_and_no_part_of_the_rollout(autojump_clock: trio.testing.MockClock) -> None:
    """Tokens, turns, engines and versions of the record are the policy's alone; the judge is asked at temperature 0."""
    async with court() as here:
        handler, engine = Judged(max_tokens=77), judge_engine("yes, it is")
        await with_judge(here, handler, engine)
        record = await judged(here, sampling={"temperature": 1.0})
        assert (record.outcome.kind, record.reward, handler.answers) == (OutcomeKind.OK, 1.0, ["yes, it is"])
        (request,) = engine.requests
        assert (request.sampling.temperature, request.max_tokens) == (0.0, 77)
        alone = await here.finish("b")
        assert (record.turns, record.tokens, len(record.backends)) == (alone.turns, alone.tokens, 1)
        document = await here.supervisor.trajectory("a", "tests")
        assert len(document.branches) == 1
        assert {call.backend for call in document.calls} == set(record.backends)
        told = [event.data for event in await here.supervisor.events("a", "tests") if event.event == "job.progress"]
        assert [(data["what"], data["facts"]["policy"]) for data in told] == [("a judge answered", "judge")]
        here.assert_clean()


async def test_a_reevaluation_asks_again(autojump_clock: trio.testing.MockClock) -> None:
    """The judge of today decides, and the stored record stays."""
    async with court() as here:
        handler, engine = Judged(), judge_engine("yes")
        await with_judge(here, handler, engine)
        assert (await judged(here)).reward == 1.0
        engine.engine = ScriptedEngine(Script(turns=["no"]))
        begun = await here.looks.reevaluate("a", "tests", ReevaluateJob())
        found = await here.looks.wait_reevaluation("a", "tests", begun.n)
        assert found.reward == 0.0
        assert (await here.supervisor.get("a", "tests")).reward == 1.0
        assert len({request.request_id for request in engine.requests}) == 2
        here.assert_clean()


@pytest.mark.parametrize(
    ("handler", "engine", "code", "retryable"),
    [
        (Judged(policy="nobody"), None, "no_judge", False),
        (Judged(limit_s=5.0), None, "no_judge", True),
        (Judged(limit_s=5.0), judge_engine("yes", latency=Latency(fixed_s=100.0)), "judge_timeout", True),
        (Judged(), judge_engine("yes", faults=[Fault(kind="status", status=400, count=99)]), "judge_failed", False),
        (Judged(), judge_engine("yes", faults=[Fault(kind="status", status=500, count=99)]), "judge_failed", True),
        (Judged(messages=[user("x" * 5000)]), judge_engine("yes", max_model_len=1000), "judge_failed", False),
        (Judged(), judge_engine(" \n"), "judge_failed", False),
        (Judged(messages=[]), judge_engine("yes"), "judge_failed", False),
        (Judged(messages=[user("x" * (1 << 20)), user("x")]), judge_engine("yes"), "judge_failed", False),
        (Judged(max_tokens=0), judge_engine("yes"), "judge_failed", False),
        (Judged(limit_s=float("nan")), judge_engine("yes"), "judge_failed", False),
    ],
    ids=["unknown policy", "no engine", "slow", "refuses", "fails", "too long", "says nothing", "no question",
         "endless question", "no tokens", "no limit"],
)  # fmt: skip
async def test_a_judge_that_fails_is_a_grader_error(
    handler: Judged, engine: FakeBackend | None, code: str, retryable: bool, autojump_clock: trio.testing.MockClock
) -> None:
    """Never a zero: the reward is null and the code says which failure it was."""
    async with court() as here:
        await with_judge(here, handler, engine)
        record = await judged(here)
        assert (record.outcome.kind, record.outcome.code, record.outcome.retryable) == (
            OutcomeKind.GRADER_ERROR, code, retryable,
        )  # fmt: skip
        assert record.reward is None
        assert [type(error) for error in handler.errors] == [GraderError]
        if engine is not None:
            assert not engine.live
        handler.errors.clear()


async def test_infrastructure_of_the_judge_is_tried_again(autojump_clock: trio.testing.MockClock) -> None:
    """A judge that has no engine at first costs an attempt and no grade."""
    async with court() as here:
        handler = Judged(limit_s=5.0)
        await with_judge(here, handler, None)
        await here.submit("a", handler="judged", max_attempts=2)
        await trio.sleep(5.1)
        assert len(handler.errors) == 1
        late = judge_engine("yes")
        here.engines[late.url] = late
        await here.pool.add(AddBackend(url=late.url, kind="vllm", policy="judge"))
        record = await here.supervisor.wait_done("a", "tests")
        assert (record.reward, len(record.attempts)) == (1.0, 2)


async def test_a_judge_is_asked_in_eval_only(autojump_clock: trio.testing.MockClock) -> None:
    """In RUN it would be help for the policy that no trajectory shows."""
    async with court() as here:
        handler = Judged()
        handler.early = lambda job: job.ask("judge", QUESTION)
        await with_judge(here, handler, judge_engine("yes"))
        record = await judged(here)
        assert (record.outcome.kind, record.outcome.code) == (OutcomeKind.HANDLER_ERROR, "no_judge_here")


async def test_a_cancel_aborts_the_request(autojump_clock: trio.testing.MockClock) -> None:
    """The engine's call ends with the job, and the lease is given back."""
    async with court() as here:
        engine = judge_engine("yes", latency=Latency(fixed_s=500.0))
        await with_judge(here, Judged(limit_s=1000.0), engine)
        await here.submit("a", handler="judged")
        await trio.sleep(5.0)
        assert engine.live
        await here.supervisor.cancel("a", "tests", "enough")
        record = await here.supervisor.wait_done("a", "tests")
        assert record.outcome is not None
        assert record.outcome.kind is OutcomeKind.CANCELLED
        here.assert_clean()


async def test_so_many_questions_at_a_time(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others wait; all are answered."""

    class Many(Judged):
        async def evaluate(self, job: JobContext[FakeInstance], result: RunResult) -> Grade:
            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(super().evaluate, job, result)
            return Grade(reward=float(len(self.answers)))

    async with court() as here:
        engine, most = judge_engine("yes", latency=Latency(fixed_s=1.0)), 0
        generate = engine.generate

        async def counted(request: Any) -> Any:
            nonlocal most
            most = max(most, len(engine.live) + 1)
            return await generate(request)

        monkeypatch.setattr(engine, "generate", counted)
        await with_judge(here, Many(), engine)
        assert (await judged(here)).reward == 20.0
        assert 1 < most <= judge_module.ASKS_AT_ONCE


async def test_without_a_daemon_the_test_plays_the_judge() -> None:
    """``run_handler`` hands the question to a function; without one there is no judge."""
    seen: list[tuple[str, Sequence[Message]]] = []

    def says(policy: str, messages: Sequence[Message]) -> str:
        seen.append((policy, messages))
        return "yes"

    found = await run_handler(Judged(), {}, turns=["42"], judge=says)
    assert (found.grade.reward, seen) == (1.0, [("judge", QUESTION)])
    early = Judged()
    early.early = lambda job: job.ask("judge", QUESTION)
    for handler, expected, judge in ((Judged(), GraderError, None), (early, HandlerError, says)):
        with pytest.RaisesGroup(expected):
            await run_handler(handler, {}, turns=["42"], judge=judge)


@pytest.mark.slow
def test_a_cancel_at_any_step_leaves_no_call() -> None:
    """Once for each scheduler step of a job whose grader asks a judge: one end, and a reward only with a grade."""
    byte_renderer()

    async def scenario(victim: trio.CancelScope) -> None:
        async with court() as here:
            await with_judge(here, Judged(), judge_engine("yes"))
            with victim:
                await here.submit("a", handler="judged")
                await trio.sleep(100.0)
            while not here.supervisor.is_idle:
                # On its way to the disk it is not there for anybody yet.
                with suppress(NotFound):
                    await here.supervisor.cancel("a", "tests", "swept")
                    record = await here.supervisor.wait_done("a", "tests")
                    assert record.outcome is not None
                    assert record.outcome.kind in (OutcomeKind.CANCELLED, OutcomeKind.OK)
                    assert (record.reward is None) == (record.outcome.kind == OutcomeKind.CANCELLED)
                await trio.sleep(0.01)
            here.assert_clean()

    assert sweep(scenario, seeds=range(1)).runs > 50
