"""Calls written as text are read as they were meant, and what can't be read is said."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorld.agents import Act, Action, Answer, Malformed, Reply, XmlCalls, explain, preset, run_agent
from prorld.agents.xml_calls import STOP_WORD
from prorld.domain.messages import ToolCall, user
from prorld.domain.outcome import StopReason
from prorld.inference.contract import Turn
from prorld.testing.jobs import ScriptedModel
from tests.agents.support import always, pretended, result


def read(text: str, *, truncated: bool = False) -> Sequence[Action]:
    return XmlCalls().read(Turn(content=text, sampled=5, truncated=truncated))


CALL = (
    "<function=execute_bash>\n<parameter=command>\nls\ncat f\n</parameter>\n"
    "<parameter=timeout>5</parameter>\n</function>"
)
ACT = Act(tool="execute_bash", arguments={"command": "ls\ncat f", "timeout": "5"})


@pytest.mark.parametrize(
    "text",
    [
        CALL,
        f"I will look.\n{CALL}",
        f"{CALL}\nAnd then I stop.",
        CALL.removesuffix("</function>"),
        CALL.removesuffix("</function>").rstrip(),
        CALL.removesuffix(">"),
    ],
)
def test_a_call_is_read_with_or_without_its_closing_word(text: str):
    """A turn that a stop word ended has none."""
    assert read(text) == [ACT]


def test_calls_are_read_in_order():
    """Where no stop word is set, a turn may hold more than one."""
    assert read(f"{CALL}\n<function=submit>\n</function>") == [ACT, Act(tool="submit")]


def test_a_turn_without_a_call_is_the_answer():
    """As it stands."""
    assert read("It is <b>4</b>.") == [Answer(text="It is <b>4</b>.")]


@pytest.mark.parametrize(
    "value", ["", "a</parameter>b", "<parameter=x>", "x < y > z", "  indented\n\n", "\ttab", "</functional", "a\nb\nc"]
)
def test_a_value_is_taken_as_it_stands(value: str):
    """Spaces, tabs, tags and closing words that close nothing; one newline at each end belongs to the form."""
    (act,) = read(f"<function=f>\n<parameter=p>\n{value}\n</parameter>\n</function>")
    assert act == Act(tool="f", arguments={"p": value})


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("<function=>", "a function has no name"),
        ("<function=f", "its name is not closed"),
        ("<function=f x>", "its name is not closed"),
        ("<function=f><parameter=>x</parameter></function>", "a parameter has no name"),
        ("<function=f><parameter=p>x</function>", "the parameter p of f is not closed"),
        ("<function=f>ls</function>", "in f there is something that is no parameter"),
        ("<function=f><parameter=p>1</parameter><parameter=p>2</parameter></function>", "p of f is given twice"),
        ("<function=" + "x" * 200 + ">", "its name is not closed"),
    ],
)
def test_what_can_not_be_read_is_a_failed_attempt_with_a_hint(text: str, hint: str):
    """The policy learns what was wrong; nothing is called."""
    (action,) = read(text)
    assert isinstance(action, Malformed)
    assert hint in action.hint


def test_a_turn_that_was_cut_short_calls_nothing_that_was_not_closed():
    """Half of the arguments may be missing."""
    (action,) = read("<function=f><parameter=p>x</parameter>\n", truncated=True)
    assert isinstance(action, Malformed)
    assert read(CALL, truncated=True) == [ACT]


def test_calls_that_an_engine_has_parsed_are_taken():
    """Some parsers know this form and take it out of the text."""
    call = ToolCall(id="c", name="f", arguments={"p": 1})
    assert XmlCalls().read(Turn(content="", tool_calls=(call,))) == [Act(tool="f", arguments={"p": 1}, call_id="c")]


def test_results_are_one_message_of_the_user():
    """Each under the name of its call."""
    (message,) = XmlCalls().say([Reply(action=ACT, text="f"), Reply(action=Malformed(hint="h"), text="h")])
    assert message == user("EXECUTION RESULT of [execute_bash]:\nf\n\nh")


async def test_an_episode_in_text():
    """The template gets no schemas; calls, results and the end go through the loop."""
    model = ScriptedModel([CALL.partition(STOP_WORD)[0], "<function=finish><parameter=message>done</parameter>\n"])
    async with pretended(always(result("hi\n"))) as sandbox:
        end = await run_agent(
            model,
            [user("go")],
            tools=preset("openhands").tools(),
            sandbox=sandbox,
            max_turns=5,
            dialect=preset("openhands").text_dialect(),
        )
    assert (end.stop, end.answer) == (StopReason.FINISHED, "done")
    assert model.tools == ()
    assert model.transcript[2].role == "user"
    assert model.transcript[2].content.startswith("EXECUTION RESULT of [execute_bash]:\nhi\n")


def test_a_prompt_explains_every_tool_in_a_form_that_is_read():
    """Names, types, what is required, what there is to choose from; and the example is a call."""
    words = explain(preset("openhands").tools())
    assert "---- execute_bash" in words
    assert "command (string, required)" in words
    assert "One of: true, false." in words
    (act,) = read(words)
    assert act == Act(tool="NAME", arguments={"FIRST": "value", "SECOND": "a value\nof two lines"})


pieces = st.lists(
    st.sampled_from(
        [
            "<function=f>",
            "<parameter=p>",
            "</parameter>",
            "</function>",
            "</function",
            "\n",
            " ",
            "x",
            "<function=",
            ">",
        ]
    ),
    max_size=20,
).map("".join)


@given(pieces, st.booleans())
def test_reading_never_raises_and_never_makes_anything_up(text: str, truncated: bool):
    """Acts stand in the text; one answer is the whole of it."""
    actions = read(text, truncated=truncated)
    assert actions
    for action in actions:
        match action:
            case Act(tool=tool, arguments=arguments):
                assert f"<function={tool}>" in text
                assert all(value in text for value in arguments.values())
            case Answer(text=said):
                assert actions == [Answer(text=text)]
                assert said == text


@pytest.mark.parametrize(
    "text",
    [
        "<function=f>" * 100_000,
        "<function=f><parameter=p>" + "</parameter> x" * 100_000,
        "<function=f><parameter=p>" + "</parameter>" + " " * 1_000_000 + "x",
        "<function=f>" + "<parameter=p>" * 100_000,
    ],
)
def test_hostile_text_is_read_in_one_pass(text: str):
    """A reader that went back and forth would not come to an end here."""
    assert isinstance(read(text)[-1], Malformed)
