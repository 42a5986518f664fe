"""Handlers at their worst: what they raise, return, say and swallow stays with their job."""

from __future__ import annotations

import sys
from decimal import Decimal
from typing import Any, ClassVar, cast

import msgspec
import pytest
import trio

from prorld.domain.job import StageTimeouts
from prorld.domain.outcome import OutcomeKind, StopReason
from prorld.errors import HandlerError, Impossible
from prorld.handlers import Grade, RunResult
from prorld.testing.fake_backend import FakeBackend
from prorld.testing.handlers import FakeHandler
from prorld.testing.scripted_engine.script import Script
from prorld.wire.jobs import SubmitJob
from tests.rollout.support import room


def says(*turns: str) -> list[FakeBackend]:
    """One engine that says these turns."""
    return [FakeBackend(Script(turns=list(turns)))]


class Quitter(FakeHandler):
    """Calls ``sys.exit`` wherever its instance says: in a stage, or in a task it started."""

    name = "quitter"
    data_sources: ClassVar[tuple[str, ...]] = ()

    async def init(self, job):
        if job.instance.prompt == "task":
            job.nursery.start_soon(self.leave)
            await trio.sleep(1)
        if job.instance.prompt == "init":
            sys.exit(3)
        if job.instance.prompt == "strange":
            raise BaseExceptionGroup("both", [KeyboardInterrupt(), ValueError()])
        if job.instance.prompt == "generator":
            raise GeneratorExit

    async def leave(self):
        await trio.sleep(0.1)
        sys.exit(3)

    def accept(self, instance, limits):
        if instance.prompt == "accept":
            sys.exit(3)

    async def recover(self, job, stage, error):
        if job.instance.prompt == "recover":
            sys.exit(3)
        raise error


@pytest.mark.parametrize("where", ["init", "task", "recover", "strange", "generator"])
async def test_a_plugin_that_exits_ends_its_job_and_not_the_daemon(
    where: str, autojump_clock: trio.testing.MockClock
) -> None:
    """``sys.exit``, or what is no Exception at all, in a handler is a handler error; the next job is served."""
    async with room(backends=says("42")) as here:
        here.registry.add(Quitter())
        instance = {"prompt": where, "fail": {"run": "bug"} if where == "recover" else {}}
        await here.supervisor.submit(SubmitJob(job_id="q", handler="quitter", instance=instance), "tests")
        record = await here.supervisor.wait_done("q", "tests")
        assert record.outcome is not None
        codes = {"strange": "internal", "generator": "not_an_exception"}
        assert (record.outcome.kind, record.outcome.code) == (OutcomeKind.HANDLER_ERROR, codes.get(where, "sys_exit"))
        assert (await here.finish("next")).reward == 1.0
        with pytest.raises(Impossible, match=r"sys\.exit"):
            await here.supervisor.submit(SubmitJob(handler="quitter", instance={"prompt": "accept"}), "tests")
        here.assert_clean()


class Liar(FakeHandler):
    """Returns from RUN or EVAL what its instance says, whatever the types are."""

    name = "liar"
    data_sources: ClassVar[tuple[str, ...]] = ()
    results: ClassVar[dict[str, Any]] = {
        "stop": RunResult(stop=cast("StopReason", "bananas")),
        "no stop": RunResult(stop=cast("StopReason", None)),
        "answer": RunResult(stop=StopReason.FINISHED, answer="\ud800"),
    }
    grades: ClassVar[dict[str, Any]] = {
        "nothing": None,
        "decimal": Grade(reward=cast("float", Decimal("1.5"))),
        "truth": Grade(reward=True),
        "key": Grade(reward=1.0, parts={"\ud800": 1.0}),
        "turn": Grade(reward=1.0, step_rewards=[(cast("int", "first"), 1.0)]),
    }

    async def run(self, job):
        await super().run(job)
        return self.results.get(job.instance.prompt, RunResult(stop=StopReason.FINISHED))

    async def evaluate(self, job, result):
        return self.grades.get(job.instance.prompt, Grade(reward=1.0))


@pytest.mark.parametrize("what", [*Liar.results, *Liar.grades])
async def test_what_can_not_be_told_gets_into_no_record(what: str, autojump_clock: trio.testing.MockClock) -> None:
    """A result of wrong types is the handler's error, a grade of wrong types the grader's; all can be encoded."""
    async with room(backends=says("42")) as here:
        here.registry.add(Liar())
        body = SubmitJob(job_id="a", handler="liar", instance={"prompt": what})
        await here.supervisor.submit(body, "tests")
        record = await here.supervisor.wait_done("a", "tests")
        assert record.outcome is not None
        expected = OutcomeKind.HANDLER_ERROR if what in Liar.results else OutcomeKind.GRADER_ERROR
        assert (record.outcome.kind, record.outcome.code, record.reward) == (expected, "wrong_result", None)
        for told in (
            record,
            await here.supervisor.trajectory("a", "tests"),
            await here.supervisor.events("a", "tests"),
        ):
            assert msgspec.json.decode(msgspec.json.encode(told))


class Chatty(FakeHandler):
    """Tells its progress in ways that no wire takes, and fails with such words."""

    name = "chatty"
    data_sources: ClassVar[tuple[str, ...]] = ()

    async def init(self, job):
        job.progress("\ud800", a=object(), event="x", at="y", long="z" * 100_000)
        loop: list[Any] = []
        loop.append(loop)
        job.progress("loop", loop=loop)
        raise HandlerError("\ud800" + "w" * 1_000_000)


async def test_words_of_a_plugin_are_told_whatever_they_are(autojump_clock: trio.testing.MockClock) -> None:
    """Events and the outcome of a handler with strange words can be encoded, and are bounded."""
    async with room() as here:
        here.registry.add(Chatty())
        await here.supervisor.submit(SubmitJob(job_id="a", handler="chatty", instance={}), "tests")
        record = await here.supervisor.wait_done("a", "tests")
        assert record.outcome is not None
        assert record.outcome.kind is OutcomeKind.HANDLER_ERROR
        events = await here.supervisor.events("a", "tests")
        assert [event.event for event in events].count("job.progress") == 2
        assert len(msgspec.json.encode(record)) + len(msgspec.json.encode(events)) < 32_000


class Deaf(FakeHandler):
    """Swallows its cancellation in EVAL and gives a grade all the same; or cancels its own stage."""

    name = "deaf"
    data_sources: ClassVar[tuple[str, ...]] = ()

    async def evaluate(self, job, result):
        if job.instance.prompt == "itself":
            job.nursery.cancel_scope.cancel()
            await trio.sleep(1)
        with trio.CancelScope() as scope:
            scope.shield = True
            await trio.sleep(20)
        return Grade(reward=1.0)


async def test_a_grade_after_the_time_is_no_grade(autojump_clock: trio.testing.MockClock) -> None:
    """A grader that hears no cancellation is not rewarded for it, neither after a time-out nor after a cancel."""
    async with room(backends=says("42")) as here:
        here.registry.add(Deaf())
        bodies = {
            "late": SubmitJob(job_id="late", handler="deaf", instance={}, timeouts=StageTimeouts(eval_s=5.0)),
            "gone": SubmitJob(job_id="gone", handler="deaf", instance={}),
            "itself": SubmitJob(job_id="itself", handler="deaf", instance={"prompt": "itself"}),
        }
        for body in bodies.values():
            await here.supervisor.submit(body, "tests")
        await trio.sleep(1)
        await here.supervisor.cancel("gone", "tests", "enough")
        ends = {name: await here.supervisor.wait_done(name, "tests") for name in bodies}
        kinds = {name: record.outcome.kind for name, record in ends.items() if record.outcome is not None}
        assert kinds == {
            "late": OutcomeKind.TIMEOUT,
            "gone": OutcomeKind.CANCELLED,
            "itself": OutcomeKind.GRADER_ERROR,
        }
        assert {record.reward for record in ends.values()} == {None}
