"""Two renderings of one conversation, cut into the template's parts and the texts of messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorld.domain.messages import CallStatus, Message, ToolCall, user
from prorld.errors import RendererError
from prorld.tokens.standins import Holder, Part, fill, template_messages


def holder(*texts: str) -> Holder:
    """Holds spoken texts, one a message."""
    made = Holder()
    for index, text in enumerate(texts):
        made.hold(text, index, "spoken")
    return made


ONE, TWO = "\ue0000\ue001", "\ue0001\ue001"


@given(
    st.lists(st.text(min_size=1, max_size=6), max_size=4),
    st.lists(st.text("<|ab>", max_size=4), min_size=5, max_size=5),
)
def test_the_parts_are_the_text(texts: list[str], around: list[str]) -> None:
    """Whatever the texts, their parts join to the rendering and are told from the template's."""
    held = Holder()
    standins = rendered = around[0]
    for index, (text, after) in enumerate(zip(texts, around[1:], strict=False)):
        standins += held.hold(text, index, "spoken") + after
        rendered += text + after
    parts = fill(standins, rendered, held.held)
    assert "".join(part.text for part in parts) == rendered
    assert [part.text for part in parts if part.message is not None] == texts


@pytest.mark.parametrize(
    ("standins", "rendered", "words"),
    [
        (f"a{ONE}b{TWO}", "axcy", "changes the text of message 0"),
        (f"a{ONE}b{TWO}c", "axbyd", "changes the text of message 1"),
        (f"a{ONE}b{TWO}", "axbyc", "more than it was given"),
        (f"a{ONE}b{TWO}", "bxby", "changes with the text"),
        (f"a{ONE}b{TWO}", "aXby", "changes the text of message 0"),
        (f"a{ONE}b", "axb", "message 1 0 times"),
        (f"a{ONE}b{TWO}{TWO}", "axbyy", "message 1 2 times"),
    ],
)
def test_renderings_that_do_not_fit(standins: str, rendered: str, words: str) -> None:
    """A template that looks into texts, changes, drops or repeats them is told why it is refused."""
    with pytest.raises(RendererError, match=words):
        fill(standins, rendered, holder("x", "y").held)


def test_what_a_template_may_do() -> None:
    """Strip spoken text, leave reasoning out, and escape data as JSON."""
    held = Holder()
    standins = held.hold(" x\n", 0, "spoken") + "|" + held.hold('"', 1, "data")
    held.hold("gone", 1, "reasoning")
    assert fill(standins, 'x|\\"', held.held) == [Part("x", 0), Part("|"), Part('\\"', 1)]


def test_every_text_of_a_message_is_held() -> None:
    """Content, reasoning, names, ids, and the leaves of arguments with their keys."""
    call = ToolCall(id="i", name="n", arguments={"k": ["v", 1, {"k2": None}]})
    held = Holder()
    template_messages([Message(role="assistant", content="c", reasoning="r", tool_calls=[call]), user("u")], held.hold)
    assert {text.text for text in held.held} == {"c", "r", "k", "v", "k2", "n", "i", "u"}


def test_a_broken_call_is_held_as_spoken() -> None:
    """Its own words follow the content."""
    call = ToolCall(id="i", name="n", status=CallStatus.UNCLOSED, raw="<tool_call>{")
    held = Holder()
    (message,) = template_messages([Message(role="assistant", content="c", tool_calls=[call])], held.hold)
    assert "tool_calls" not in message
    assert [(text.text, text.kind) for text in held.held] == [("c\n<tool_call>{", "spoken")]
