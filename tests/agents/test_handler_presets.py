"""A handler chooses its tools by one line, and hears of what became of each call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec
import pytest
import trio

from prorld.agents import NativeCalls, ToolFacts, ToolUse, XmlCalls, known_tools
from prorld.domain.job import AgentLimits
from prorld.domain.messages import Message, ToolCall, user
from prorld.errors import HandlerError, Impossible
from prorld.handlers import AgentHandler, Grade, JobContext, RunResult, SandboxSpec, Turn
from prorld.handlers.registry import accept
from prorld.testing.fake_sandbox import FakeRuntime
from prorld.testing.jobs import FakeJob, ScriptedModel, run_handler
from tests.agents.support import result


class Nothing(msgspec.Struct, frozen=True):
    pass


class Plain(AgentHandler[Nothing]):
    """The least handler with a sandbox."""

    name: ClassVar[str] = "plain"
    instance_type = Nothing

    def sandbox_spec(self, instance: Nothing) -> SandboxSpec | None:
        return SandboxSpec()

    def prompt(self, instance: Nothing) -> Sequence[Message]:
        return [user("go")]

    async def evaluate(self, job: JobContext[Nothing], result: RunResult) -> Grade:
        return Grade(reward=1.0)


class Hands(Plain):
    """One line."""

    preset: ClassVar[str] = "openhands"


class Few(Hands):
    """Says itself what it has of the preset."""

    preset: ClassVar[str] = "swe-agent"
    default_tools: ClassVar[tuple[str, ...]] = ("open", "goto")
    allowed_tools: ClassVar[frozenset[str]] = frozenset({"open", "goto", "bash"})


class Spoken(Plain):
    """Calls in text."""

    preset: ClassVar[str] = "r2e"
    calls: ClassVar[Literal["native", "text"]] = "text"


class Wrong(Plain):
    preset: ClassVar[str] = "none such"


def test_a_preset_brings_its_tools_and_those_a_job_may_name():
    """A handler that says nothing has what it always had; one that says more is heard."""
    assert (Plain.default_tools, Plain.allowed_tools) == ((), known_tools())
    assert Hands.allowed_tools == known_tools("openhands")
    assert Hands.default_tools[0] == "execute_bash"
    assert (Few.default_tools, len(Few.allowed_tools)) == (("open", "goto"), 3)
    with pytest.raises(HandlerError, match="no such preset of tools: none such"):
        Wrong().check()
    for handler in (Plain(), Hands(), Few(), Spoken()):
        handler.check()


def test_what_a_job_names_is_judged_by_the_preset():
    """At submit, in the names of the handler's own set."""
    accept(Hands(), {}, AgentLimits(tools=["execute_bash", "glob"]))
    accept(Plain(), {}, AgentLimits(tools=["preset:mini"]))
    with pytest.raises(Impossible, match="plain has no tool python"):
        accept(Hands(), {}, AgentLimits(tools=["python"]))
    with pytest.raises(Impossible, match="has no tool preset:mini"):
        accept(Few(), {}, AgentLimits(tools=["preset:mini"]))


async def play(handler: AgentHandler[Nothing], turns: Sequence[Turn | str], **more: Any) -> Any:
    runtime = FakeRuntime(lambda session, code: result("hi\n"), boot_s=0, close_s=0)
    return await run_handler(handler, {}, turns=turns, runtime=runtime, **more)


def calling(tool: str, **arguments: Any) -> Turn:
    return Turn(content="", sampled=1, tool_calls=(ToolCall(id="c", name=tool, arguments=arguments),))


async def test_a_rollout_with_the_tools_of_a_preset():
    """Names and texts are the preset's, down to the end of the episode."""
    run = await play(Hands(), [calling("execute_bash", command="ls"), calling("finish", message="done")])
    assert run.result.answer == "done"
    assert run.tool_calls == ["execute_bash", "finish"]
    assert run.transcript[2].content.startswith("hi\n[The command completed with exit code 0.]")


async def test_a_job_may_ask_for_another_preset():
    """By its name, in the place of a tool's."""
    limits = AgentLimits(tools=["preset:swe-agent"])
    run = await play(Plain(), [calling("bash", command="ls"), calling("submit")], limits=limits)
    assert run.transcript[2].content == "OBSERVATION:\nhi"
    assert run.result.data == {"submitted": True}


async def test_a_rollout_whose_calls_are_text():
    """Without schemas in the template, and with results that the user says."""
    run = await play(
        Spoken(),
        [
            "<function=execute_bash>\n<parameter=cmd>ls</parameter>\n",
            "<function=finish><parameter=command>submit</parameter>",
        ],
    )
    assert run.transcript[2] == user("EXECUTION RESULT of [execute_bash]:\nhi")
    assert run.result.data == {"submitted": True}
    job: Any = None
    assert isinstance(Spoken().dialect(job), XmlCalls)
    assert Hands().dialect(job) is None
    assert NativeCalls().offers_schemas


class Counting(Plain):
    """Wants to know which commands failed."""

    default_tools: ClassVar[tuple[str, ...]] = ("bash", "think")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[ToolUse] = []

    def used(self, job: JobContext[Nothing], use: ToolUse) -> None:
        super().used(job, use)
        self.seen.append(use)


async def test_a_handler_hears_of_every_call_as_data():
    """And the job counts it all the same."""
    handler = Counting()
    run = await play(handler, [calling("bash", command="ls"), calling("bash"), calling("think"), "done"])
    assert run.tool_calls == ["bash", "bash", "think"]
    facts = [use.facts for use in handler.seen]
    assert [each.refused for each in facts if each is not None] == ["", "bad_arguments", ""]
    assert facts[0] is not None
    assert (facts[0].exit_code, facts[0].output_bytes) == (0, 3)


def test_facts_of_a_call_that_went_well_are_few():
    """An event names what is not as usual and the exit code."""
    assert msgspec.to_builtins(ToolFacts()) == {}
    assert msgspec.to_builtins(ToolFacts(exit_code=0, output_bytes=3)) == {"exit_code": 0, "output_bytes": 3}


async def test_a_fake_job_keeps_the_facts():
    """For the tests of an author."""
    async with trio.open_nursery() as nursery:
        job = FakeJob(Nothing(), ScriptedModel([]), nursery)
        job.tool_used("bash", 0.5, ToolFacts(exit_code=1))
        job.tool_used("bash", 0.5)
    assert job.tool_facts == [ToolFacts(exit_code=1), None]
