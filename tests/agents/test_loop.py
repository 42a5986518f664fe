"""The loop executes calls in order, and each way of ending is told apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from prorld.agents import (
    Act,
    Action,
    Answer,
    Malformed,
    Observation,
    Reply,
    Tool,
    ToolFacts,
    ToolUse,
    make_tool,
    run_agent,
    sandbox_tool,
    standard_tools,
)
from prorld.agents.loop import CALLS_PER_TURN, AgentEnd, end_of_turn
from prorld.domain.messages import CallStatus, Message, ToolCall, user
from prorld.domain.outcome import StopReason
from prorld.errors import HandlerError
from prorld.inference.contract import Turn
from prorld.sandbox.contract import Sandbox
from prorld.testing.jobs import ScriptedModel


class Note(msgspec.Struct, frozen=True):
    word: str = "?"


def noting(words: list[str]) -> Tool:
    """A tool that writes its argument down."""

    def note(arguments: Note) -> Observation:
        words.append(arguments.word)
        return Observation(text=f"noted {arguments.word}", data={"last": arguments.word})

    return make_tool("note", "Note a word.", Note, note)


def call(name: str = "note", status: CallStatus = CallStatus.OK, number: int = 0, **arguments: Any) -> ToolCall:
    return ToolCall(id=f"c{number}", name=name, arguments=arguments, status=status)


def calling(*calls: ToolCall, content: str = "", **more: Any) -> Turn:
    return Turn(content=content, tool_calls=calls, sampled=5, **more)


async def drive(turns: Sequence[Turn | str], *, tools: Sequence[Tool] = (), max_turns: int = 9, **more: Any):
    model = ScriptedModel(turns)
    end = await run_agent(model, [user("go")], tools=tools, max_turns=max_turns, **more)
    return end, model


async def test_a_turn_without_a_call_is_the_answer():
    """The episode is finished and nothing is observed."""
    end, model = await drive(["It is 4."])
    assert end == AgentEnd(stop=StopReason.FINISHED, answer="It is 4.")
    assert [message.role for message in model.transcript] == ["user", "assistant"]


async def test_calls_run_in_order_and_results_carry_their_ids():
    """Two calls of one turn are answered by two tool messages in the same order."""
    words: list[str] = []
    turns: list[Turn | str] = [calling(call(word="a", number=1), call(word="b", number=2)), "done"]
    end, model = await drive(turns, tools=[noting(words)])
    assert words == ["a", "b"]
    assert [(m.content, m.tool_call_id) for m in model.transcript if m.role == "tool"] == [
        ("noted a", "c1"),
        ("noted b", "c2"),
    ]
    assert end.data == {"last": "b"}
    assert [schema.name for schema in model.tools] == ["note"]


async def test_finish_ends_the_episode_and_later_calls_do_not_run():
    """The message of ``finish`` is the answer."""
    words: list[str] = []
    turn = calling(call("finish", message="42"), call(word="late"))
    end, model = await drive([turn], tools=[*standard_tools(["finish"]), noting(words)])
    assert (end.stop, end.answer) == (StopReason.FINISHED, "42")
    assert not words
    assert model.transcript[-1].role == "assistant"


async def test_an_unknown_tool_is_answered_with_those_there_are():
    """It is not malformed: the policy may go on for as long as it has turns."""
    turns = [calling(call("browser", CallStatus.UNKNOWN_TOOL)) for _ in range(6)]
    end, model = await drive(turns, tools=[noting([])], max_turns=6)
    assert end.stop is StopReason.MAX_TURNS
    assert model.transcript[2].content == "[there is no tool named 'browser'; there are: note]"


async def test_malformed_calls_are_answered_first_and_end_the_episode_when_they_go_on():
    """Three in a row by default, and the first two get a hint."""
    turns = [calling(call(status=CallStatus.INVALID_JSON)) for _ in range(5)]
    end, model = await drive(turns, tools=[noting([])])
    assert end.stop is StopReason.MALFORMED
    assert model.turns_left == 2
    hints = [message.content for message in model.transcript if message.role == "tool"]
    assert hints == ["[not called: the arguments of this tool call are not valid JSON]"] * 2


async def test_a_good_call_starts_the_count_of_malformed_turns_anew():
    """Only turns in which nothing could be read count, and only in a row."""
    bad, good = calling(call(status=CallStatus.UNCLOSED)), calling(call(word="x"))
    mixed = calling(call(status=CallStatus.MALFORMED), call(word="y"))
    words: list[str] = []
    end, _ = await drive([bad, bad, good, bad, bad, mixed, bad, bad, "ok"], tools=[noting(words)])
    assert end.stop is StopReason.FINISHED
    assert words == ["x", "y"]


async def test_the_last_turn_acts_but_nobody_is_told():
    """Results after the last turn would only be tokens that nobody reads."""
    words: list[str] = []
    turns = [calling(call(word="a"), content="first"), calling(call(word="b"))]
    end, model = await drive(turns, tools=[noting(words)], max_turns=2)
    assert (end.stop, end.answer) == (StopReason.MAX_TURNS, "first")
    assert words == ["a", "b"]
    assert [message.role for message in model.transcript] == ["user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize("stop", [StopReason.CONTEXT_FULL, StopReason.MAX_TOKENS])
async def test_a_budget_that_ran_out_ends_the_episode_after_the_calls(stop: StopReason):
    """What the policy did with its last tokens still happens."""
    words: list[str] = []
    end, _ = await drive([calling(call(word="a"), stop=stop), "never"], tools=[noting(words)])
    assert end.stop is stop
    assert words == ["a"]


async def test_finishing_with_the_last_token_is_finishing():
    """A budget that is gone when the policy has said all it wanted did no harm."""
    turn = calling(call("finish", message="42"), stop=StopReason.MAX_TOKENS)
    end, _ = await drive([turn], tools=standard_tools(["finish"]))
    assert (end.stop, end.answer) == (StopReason.FINISHED, "42")


@pytest.mark.parametrize(
    ("turn", "stop"),
    [
        (Turn(content="4", sampled=2), StopReason.FINISHED),
        (Turn(content="4", sampled=2, stop=StopReason.MAX_TOKENS), StopReason.FINISHED),
        (Turn(content="", sampled=0), StopReason.FINISHED),
        (Turn(content="4 and", sampled=2, truncated=True), StopReason.MAX_TOKENS),
        (Turn(content="4 and", sampled=2, truncated=True, stop=StopReason.CONTEXT_FULL), StopReason.CONTEXT_FULL),
        (Turn(content="", sampled=0, stop=StopReason.CONTEXT_FULL), StopReason.CONTEXT_FULL),
    ],
)
def test_the_end_of_a_turn_without_calls(turn: Turn, stop: StopReason):
    """Cut off or empty for want of budget is a limit; everything else is the end the policy chose."""
    assert end_of_turn(turn) is stop


async def test_a_cut_off_turn_leaves_what_was_said_as_the_answer():
    """The grader may look at it; the outcome says that it was a limit."""
    end, _ = await drive([Turn(content="It is", sampled=2, truncated=True)])
    assert end == AgentEnd(stop=StopReason.MAX_TOKENS, answer="It is")


async def test_only_so_many_calls_of_one_turn_are_made():
    """A turn of repeated calls can't keep a sandbox busy for ever."""
    words: list[str] = []
    turn = calling(*(call(word=str(n), number=n) for n in range(CALLS_PER_TURN + 3)))
    _, model = await drive([turn, "ok"], tools=[noting(words)])
    assert len(words) == CALLS_PER_TURN
    results = [message for message in model.transcript if message.role == "tool"]
    assert len(results) == CALLS_PER_TURN + 3
    assert f"at most {CALLS_PER_TURN}" in results[-1].content


async def test_tool_seconds_are_told_even_when_the_tool_fails(autojump_clock: trio.testing.MockClock):
    """Time in tools is accounted for, however a call ends."""

    async def slow(arguments: Note, sandbox: Sandbox, limit_s: float) -> Observation:
        await trio.sleep(limit_s)
        if arguments.word == "boom":
            raise OSError("boom")
        return Observation(text="ok")

    told: list[tuple[str, float]] = []
    tool = sandbox_tool("slow", "Slow.", Note, slow)
    turns = [calling(call("slow", word="fine")), calling(call("slow", word="boom"))]
    sandbox: Any = object()
    with pytest.raises(OSError, match="boom"):
        await run_agent(
            ScriptedModel(turns),
            [user("go")],
            tools=[tool],
            sandbox=sandbox,
            max_turns=5,
            tool_limit_s=7,
            on_tool=lambda name, seconds: told.append((name, seconds)),
        )
    assert [name for name, _ in told] == ["slow", "slow"]
    assert [seconds for _, seconds in told] == pytest.approx([7, 7])


async def test_tools_that_do_not_fit_together_are_refused_before_anything_is_sampled():
    """Two of one name, or one without its sandbox, is the handler's mistake."""
    model = ScriptedModel(["never"])
    with pytest.raises(HandlerError, match="one name"):
        await run_agent(model, [user("go")], tools=[noting([]), noting([])], max_turns=1)
    with pytest.raises(HandlerError, match="needs a sandbox"):
        await run_agent(model, [user("go")], tools=standard_tools(["bash"]), max_turns=1)
    assert model.turns_left == 1
    assert not model.transcript


class Shouting:
    """A dialect of one word: NOTE w; a question is malformed; everything else is the answer."""

    offers_schemas = False

    def read(self, turn: Turn) -> Sequence[Action]:
        if turn.content.startswith("NOTE "):
            return [Act(tool="note", arguments={"word": turn.content[5:]})]
        return [Malformed(hint="NO QUESTIONS")] if turn.content.endswith("?") else [Answer(text=turn.content.lower())]

    def say(self, replies: Sequence[Reply]) -> Sequence[Message]:
        return [user(reply.text.upper()) for reply in replies]


async def test_a_dialect_reads_turns_and_says_results_in_its_own_way():
    """The template gets no schemas, results are user messages, and the answer is what the dialect read."""
    words: list[str] = []
    end, model = await drive(["NOTE a", "WHY?", "BYE"], tools=[noting(words)], dialect=Shouting())
    assert (end.stop, end.answer) == (StopReason.FINISHED, "bye")
    assert words == ["a"]
    assert [(m.role, m.content) for m in model.transcript[1:]] == [
        ("assistant", "NOTE a"),
        ("user", "NOTED A"),
        ("assistant", "WHY?"),
        ("user", "NO QUESTIONS"),
        ("assistant", "BYE"),
    ]
    assert model.tools == ()


turns_of_any_kind = st.lists(
    st.builds(
        Turn,
        content=st.sampled_from(["", "x"]),
        tool_calls=st.lists(
            st.builds(
                ToolCall,
                id=st.just("c"),
                name=st.sampled_from(["note", "finish", "no"]),
                status=st.sampled_from(CallStatus),
            ),
            max_size=3,
        ).map(tuple),
        truncated=st.booleans(),
        sampled=st.integers(0, 3),
        stop=st.none() | st.sampled_from([StopReason.CONTEXT_FULL, StopReason.MAX_TOKENS]),
    ),
    max_size=8,
)


@given(turns_of_any_kind, st.integers(1, 6))
async def test_every_script_ends_within_its_turns_and_every_call_is_answered(turns: list[Turn], max_turns: int):
    """Whatever a policy does, the loop stops, and no observed turn leaves one of its calls without a result."""
    end, model = await drive(turns, tools=[noting([]), *standard_tools(["finish"])], max_turns=max_turns)
    spoken = [message for message in model.transcript if message.role == "assistant"]
    assert len(spoken) <= max_turns
    if end.stop is StopReason.MAX_TURNS:
        assert len(spoken) == max_turns
    asked = sum(len(message.tool_calls) for message in spoken[:-1])
    assert sum(message.role == "tool" for message in model.transcript) in {
        asked,
        asked + len(spoken[-1:] and spoken[-1].tool_calls),
    }


async def test_what_became_of_each_call_is_told_beside_the_text():
    """Names, seconds and facts of every call, no facts of one that raised; the policy is shown none of it."""

    async def work(arguments: Note, sandbox: Sandbox, limit_s: float) -> Observation:
        if arguments.word == "boom":
            raise OSError("boom")
        return Observation(text="ok", facts=ToolFacts(exit_code=7, timed_out=True))

    uses: list[ToolUse] = []
    turns = [calling(call("work", word="fine"), call("work", word="x", number=1)), calling(call("work", word="boom"))]
    sandbox: Any = object()
    model = ScriptedModel(turns)
    with pytest.raises(OSError, match="boom"):
        await run_agent(
            model,
            [user("go")],
            tools=[sandbox_tool("work", "Work.", Note, work)],
            sandbox=sandbox,
            max_turns=5,
            on_use=uses.append,
        )
    facts = ToolFacts(exit_code=7, timed_out=True)
    assert [(use.tool, use.facts) for use in uses] == [("work", facts), ("work", facts), ("work", None)]
    assert all(use.seconds >= 0 for use in uses)
    assert [message.content for message in model.transcript if message.role == "tool"] == ["ok", "ok"]
