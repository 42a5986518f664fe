"""What a policy said, however it said it."""

from __future__ import annotations

import json
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorld.domain.messages import CallStatus
from prorld.tokens.parsers import CALLS_MAX, parse_hermes

TOOLS = frozenset({"bash", "finish"})
GOOD = '{"name": "bash", "arguments": {"command": "ls"}}'


def call(body: str) -> str:
    """A body between the tags."""
    return f"<tool_call>{body}</tool_call>"


def statuses(text: str) -> list[str]:
    """The statuses of all attempts."""
    return [attempt.status.value for attempt in parse_hermes(text, TOOLS).tool_calls]


def test_a_good_call() -> None:
    """Name, arguments and the very text of the call are reported; the words around it are the content."""
    text = f"Let me look.\n{call(GOOD)}\nDone."
    turn = parse_hermes(text, TOOLS)
    (attempt,) = turn.tool_calls
    assert (attempt.name, attempt.arguments, attempt.status) == ("bash", {"command": "ls"}, CallStatus.OK)
    assert attempt.raw == call(GOOD)
    assert turn.content == "Let me look.\n\nDone."


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (f"\n  {GOOD}\r\n", "ok"),
        ('{"arguments": {}, "name": "finish", "more": 1}', "ok"),
        ('{"name": "finish"}', "ok"),
        ('{"name": "finish", "arguments": null}', "ok"),
        ('{"name": "bash", "arguments": "{\\"command\\": \\"ls\\"}"}', "ok"),
        ('{"name": "bash", "arguments": {"command": "echo </tool_call><tool_call>"}}', "ok"),
        ('{"name": "rm", "arguments": {}}', "unknown_tool"),
        ('{"name": "bash", "arguments": [1]}', "malformed"),
        ('{"name": "bash", "arguments": "ls"}', "malformed"),
        ('{"name": "bash", "arguments": 3}', "malformed"),
        ("[1, 2]", "malformed"),
        ('"bash"', "malformed"),
        ('{"arguments": {}}', "missing_name"),
        ('{"name": "", "arguments": {}}', "missing_name"),
        ('{"name": 3, "arguments": {}}', "missing_name"),
        ("", "invalid_json"),
        ("bash ls", "invalid_json"),
        (GOOD + "}", "invalid_json"),
        ("{'name': 'bash'}", "invalid_json"),
        ('{"name": "bash", "arguments": {"n": NaN}}', "invalid_json"),
        ('{"name": "bash", "arguments": {"n": 1e999}}', "invalid_json"),
        ('{"name": "bash", "arguments": {"n": ' + "9" * 5000 + "}}", "invalid_json"),
        ('{"name": "bash", "arguments": {"s": "\\ud800"}}', "invalid_json"),
        ('{"name": "bash", "arguments": ' + '{"a":' * 70 + "1" + "}" * 70 + "}", "invalid_json"),
        ('{"name": "bash", "arguments": ' + '{"a":' * 9000 + "1" + "}" * 9000 + "}", "invalid_json"),
    ],
)
def test_every_attempt_has_a_status(body: str, status: str) -> None:
    """What is wrong with a call is told apart, so that the policy can be told."""
    assert statuses(call(body)) == [status]


def test_a_call_that_is_not_closed() -> None:
    """It reaches to the next one, or to the end of the turn; the next one is still read."""
    assert statuses("<tool_call>" + GOOD) == ["unclosed"]
    assert statuses("<tool_call>{" + call(GOOD)) == ["unclosed", "ok"]
    assert statuses("<tool_call>" + call(GOOD)) == ["unclosed", "ok"]
    turn = parse_hermes("a<tool_call>b", TOOLS)
    assert (turn.content, turn.tool_calls[0].raw) == ("a", "<tool_call>b")


def test_several_calls_have_several_ids() -> None:
    """Calls keep their order, good ones among bad ones."""
    turn = parse_hermes(call(GOOD) + call("x") + call(GOOD), TOOLS)
    assert [attempt.status.value for attempt in turn.tool_calls] == ["ok", "invalid_json", "ok"]
    assert len({attempt.id for attempt in turn.tool_calls}) == 3


def test_what_comes_after_the_last_call_that_counts_stays_content() -> None:
    """A turn that calls without end is read up to a bound."""
    turn = parse_hermes(call(GOOD) * (CALLS_MAX + 2), TOOLS)
    assert len(turn.tool_calls) == CALLS_MAX
    assert turn.content == call(GOOD) * 2


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, "hm", "yes"),
        ("hm</think>yes", True, "hm", "yes"),
        ("<think>hm</think>yes", True, "hm", "yes"),
        ("<think>never closed", False, "never closed", ""),
        ("never closed", True, "never closed", ""),
        ("no thought", False, None, "no thought"),
        ("later <think>x</think>", False, None, "later <think>x</think>"),
        ("", False, None, ""),
    ],
)
def test_reasoning_comes_first_or_not_at_all(text: str, opened: bool, reasoning: str | None, content: str) -> None:
    """A think block that opens the turn, or that the prompt opened, is reasoning; calls inside it are not calls."""
    turn = parse_hermes(text, TOOLS, reasoning_open=opened)
    assert (turn.reasoning, turn.content) == (reasoning, content)
    assert not parse_hermes(f"<think>{call(GOOD)}</think>", TOOLS).tool_calls


scraps = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        GOOD,
        "{",
        "}",
        '"',
        "\\",
        "[",
        "]",
        ":",
        ",",
        '"name"',
        "\n",
        "é",
        "\ud800",
    ]
)


@given(st.lists(st.one_of(scraps, st.text(max_size=5)), max_size=40).map("".join), st.booleans(), st.booleans())
def test_nothing_a_policy_writes_raises(text: str, opened: bool, complete: bool) -> None:
    """Any text gives a turn, whose calls stand in it word for word and can be written as JSON."""
    turn = parse_hermes(text, TOOLS, reasoning_open=opened, complete=complete)
    assert turn.complete is complete
    at = 0
    for attempt in turn.tool_calls:
        at = text.index(attempt.raw, at) + len(attempt.raw)
        msgspec.json.encode(attempt.arguments)
        assert attempt.status is not CallStatus.OK or attempt.name in TOOLS


@given(
    st.dictionaries(
        st.text(max_size=8),
        st.recursive(
            st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=8), st.lists, max_leaves=5
        ),
    )
)
def test_arguments_come_out_as_they_went_in(arguments: dict[str, object]) -> None:
    """Whatever JSON object the arguments are, it is read exactly, in escaped form or not."""
    for ascii_only in (True, False):
        body = json.dumps({"name": "bash", "arguments": arguments}, ensure_ascii=ascii_only)
        (attempt,) = parse_hermes(call(body), TOOLS).tool_calls
        assert (attempt.status, attempt.arguments) == (CallStatus.OK, arguments)


@pytest.mark.parametrize(
    "unit",
    ["<tool_call>", "<tool_call>{", '<tool_call>{"a', "</tool_call>", '<tool_call>{"a":[', "<think>", " ", "{" * 40],
)
def test_the_work_is_linear(unit: str) -> None:
    """Eight times the text takes nowhere near sixty-four times as long."""

    def spent(copies: int) -> float:
        text = unit * copies
        began = time.perf_counter()
        parse_hermes(text, TOOLS)
        return time.perf_counter() - began

    spent(1000)
    small, large = min(spent(10_000) for _ in range(3)), min(spent(80_000) for _ in range(3))
    assert large < 0.02 + 30 * small


@pytest.mark.parametrize(
    ("text", "statuses"),
    [
        ('{"name": "bash", "parameters": {"command": "ls"}}', ["ok"]),
        ('\n {"name": "bash", "arguments": {}} \n', ["ok"]),
        ('<|python_tag|>{"name": "bash", "parameters": {}}', ["ok"]),
        ('<|python_tag|> {"name": "zsh", "parameters": {}}', ["unknown_tool"]),
        ('<|python_tag|>{"parameters": {}}', ["missing_name"]),
        ('<|python_tag|>{"name": "bash", "parameters": 7}', ["malformed"]),
        ('<|python_tag|>{"name": "bash"', ["invalid_json"]),
        ('<think>hm</think>{"name": "bash", "parameters": {}}', ["ok"]),
        ('{"name": "Ann", "parameters": {}}', []),
        ('{"name": "bash"}', []),
        ('{"name": ["bash"], "parameters": {}}', []),
        ('{"name": "bash", "parameters": {}} and more', []),
        ('well: {"name": "bash", "parameters": {}}', []),
        ('[{"name": "bash", "parameters": {}}]', []),
        ("{" * 10_000, []),
        ("<|python_tag|>print(1)", []),
    ],
)
def test_a_bare_object_is_a_call_where_it_is_all_there_is(text: str, statuses: list[str]) -> None:
    """It has to name a tool, or stand behind the tag; an answer that happens to be JSON stays an answer."""
    turn = parse_hermes(text, {"bash"})
    assert [call.status.value for call in turn.tool_calls] == statuses
    assert bool(turn.content) == (not statuses)
    assert all(call.raw in text for call in turn.tool_calls)


def test_a_number_that_no_wire_has_is_no_argument() -> None:
    """Trajectories are kept in MessagePack, which has 64 bits: such a call is malformed, and the rollout goes on."""
    big = '{"name": "bash", "arguments": {"command": 1' + "0" * 30 + "}}"
    (status,) = statuses(call(big))
    assert status != "ok"
