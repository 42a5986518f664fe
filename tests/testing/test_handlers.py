"""The fakes for authors of handlers do what the daemon would do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio

from prorld.domain.job import AgentLimits
from prorld.domain.messages import Message, ToolCall, system, user
from prorld.domain.outcome import StopReason
from prorld.errors import BackendError, BadRequest, GraderError, HandlerError, SandboxError
from prorld.handlers import Grade, JobContext, RunResult
from prorld.inference.contract import Turn
from prorld.testing.fake_sandbox import FakeRuntime
from prorld.testing.handlers import FakeHandler, FakeInstance, check_handler
from prorld.testing.jobs import ScriptedModel, run_handler
from prorld.testing.sweep import sweep


async def test_the_fake_handler_keeps_the_handler_contract():
    """It is the example that authors start from."""
    await check_handler(FakeHandler(), [{}, {"sandbox": True, "prompt": "x"}])


async def test_a_run_goes_through_the_three_stages():
    """The script's last turn is the answer, and the answer is graded."""
    right = await run_handler(FakeHandler(), {"expected": "4"}, turns=["It is 4."])
    wrong = await run_handler(FakeHandler(), {"expected": "4"}, turns=["It is 5."])
    assert (right.grade.reward, right.result.stop) == (1.0, StopReason.FINISHED)
    assert wrong.grade.reward == 0.0
    assert [message.role for message in right.transcript] == ["user", "assistant"]


async def test_a_script_that_is_over_is_a_full_context():
    """The handler ends as it would for want of tokens."""
    calling = Turn(content="", tool_calls=(ToolCall(id="1", name="nothing"),), sampled=3)
    run = await run_handler(FakeHandler(), {}, turns=[calling])
    assert run.result.stop is StopReason.CONTEXT_FULL


@pytest.mark.parametrize("stage", ["init", "run", "eval"])
@pytest.mark.parametrize(
    ("failure", "error"),
    [
        ("sandbox", SandboxError),
        ("engine", BackendError),
        ("handler", HandlerError),
        ("grader", GraderError),
        ("bug", ZeroDivisionError),
    ],
)
async def test_a_stage_fails_as_its_instance_says(stage: str, failure: str, error: type[Exception]):
    """Every family of errors can be had in every stage."""
    with pytest.RaisesGroup(error):
        await run_handler(FakeHandler(), {"fail": {stage: failure}}, turns=["hello"])


async def test_a_stage_takes_the_seconds_it_is_told_or_for_ever(autojump_clock: trio.testing.MockClock):
    """Deadlines can be tested with it on virtual time."""
    await run_handler(FakeHandler(), {"seconds": {"init": 1, "run": 2, "eval": 4}}, turns=["hello"])
    assert trio.current_time() == pytest.approx(7)
    with trio.move_on_after(100) as scope:
        await run_handler(FakeHandler(), {"fail": {"eval": "hang"}}, turns=["hello"])
    assert scope.cancelled_caught


async def test_a_handler_without_its_sandbox_says_so():
    """The author forgot to hand one in."""
    with pytest.RaisesGroup(pytest.RaisesExc(HandlerError, match="not given a runtime")):
        await run_handler(FakeHandler(), {"sandbox": True}, turns=["hello"])


class Peeking(FakeHandler):
    """Looks into its sandbox in RUN and, wrongly, in EVAL."""

    async def run(self, job: JobContext[FakeInstance]) -> RunResult:
        assert (await job.sandbox.bash("echo here")).text == "here\n"
        return await super().run(job)

    async def evaluate(self, job: JobContext[FakeInstance], result: RunResult) -> Grade:
        await job.sandbox.bash("echo still here")
        return Grade(reward=1.0)


class PeekingAllowed(Peeking):
    """Says that it does."""

    grades_in_sandbox = True


async def test_a_sandbox_is_there_in_run_and_gone_in_eval_unless_the_handler_grades_in_it():
    """As in the daemon, a handler finds out before it is used; at the end nothing is left."""
    runtime = FakeRuntime()
    with pytest.RaisesGroup(pytest.RaisesExc(HandlerError, match="no sandbox")):
        await run_handler(Peeking(), {"sandbox": True}, turns=["hello"], runtime=runtime)
    run = await run_handler(PeekingAllowed(), {"sandbox": True}, turns=["hello"], runtime=runtime)
    assert run.grade.reward == 1.0
    assert runtime.starts == 2
    assert not runtime.live


async def test_an_instance_is_decoded_as_in_the_daemon():
    """A wrong one is a bad request, before anything runs."""
    with pytest.RaisesGroup(BadRequest):
        await run_handler(FakeHandler(), {"prompt": 3}, turns=["hello"])


class Rude(FakeHandler):
    """Ends its prompt with a system message."""

    def prompt(self, instance: FakeInstance) -> Sequence[Message]:
        return [user("x"), system("y")]


class Fickle(FakeHandler):
    """Asks something else each time."""

    def prompt(self, instance: FakeInstance) -> Sequence[Message]:
        self.times = getattr(self, "times", 0) + 1
        return [user(str(self.times))]


@pytest.mark.parametrize(("handler", "words"), [(Rude(), "ends with system"), (Fickle(), "the prompt changes")])
async def test_the_contract_check_finds_what_is_wrong(handler: FakeHandler, words: str):
    """It names the instance and the fault."""
    with pytest.raises(AssertionError, match=f"instance 0: .*{words}"):
        await check_handler(handler, [{}])


async def test_a_scripted_model_is_strict_about_its_order():
    """A handler that speaks before it starts, starts twice, or observes nothing is told so."""
    model = ScriptedModel(["x"])
    with pytest.raises(HandlerError, match="not started"):
        await model.turn()
    await model.start([user("x")])
    with pytest.raises(HandlerError, match="already started"):
        await model.start([user("x")])
    with pytest.raises(HandlerError, match="at least one"):
        await model.observe([])


def test_a_run_that_is_cancelled_anywhere_leaves_no_sandbox():
    """Cancelled once at each step, with a tool call under way in some of them."""

    async def scenario(victim: trio.CancelScope) -> None:
        runtime = FakeRuntime()
        call = Turn(
            content="", tool_calls=(ToolCall(id="1", name="bash", arguments={"command": "sleep 5"}),), sampled=3
        )
        with victim:
            await run_handler(
                PeekingAllowed(),
                {"sandbox": True},
                turns=[call, "done"],
                runtime=runtime,
                limits=AgentLimits(tools=["bash"]),
            )
        assert not runtime.live

    report = sweep(scenario)
    assert report.runs > 50
