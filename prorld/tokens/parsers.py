"""What a policy said, read from the text of its turn: reasoning, content, and tool calls.

Calls are read in the hermes form, and as the bare JSON object that other policies have learnt to write.

Every attempt at a call is reported with a status; nothing that a policy writes raises, and the work is linear in the
length of the text. Arguments are taken as they stand: what a number or a text may be is the tool's business.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from typing import Any, cast

import msgspec

from prorld.domain.messages import CallStatus, ToolCall
from prorld.tokens.contract import ParsedTurn

__all__ = ["CALLS_MAX", "judged_call", "parse_hermes"]

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"

# What comes after these many attempts stays content.
CALLS_MAX = 128
DEPTH_MAX = 64

# What some policies write before a bare call.
PYTHON_TAG = "<|python_tag|>"

_BLANKS = " \t\r\n"
# MessagePack, in which trajectories are kept and sent, has no larger ones.
_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1


class _Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a call, and where the text goes on after it."""

    end: int
    status: CallStatus
    name: str = ""
    arguments: dict[str, Any] = {}


def parse_hermes(
    text: str, tools: Collection[str], *, reasoning_open: bool = False, complete: bool = True
) -> ParsedTurn:
    """Split a turn. ``reasoning_open``: the prompt has opened a think block already."""
    reasoning, at = _reasoning(text, reasoning_open=reasoning_open)
    bare = _bare_call(text, at, tools)
    if bare is not None:
        return ParsedTurn(content="", reasoning=reasoning, tool_calls=(bare,), complete=complete)
    said: list[str] = []
    calls: list[ToolCall] = []
    while len(calls) < CALLS_MAX:
        start = text.find(CALL_OPEN, at)
        if start < 0:
            break
        said.append(text[at:start])
        attempt = _attempt(text, start + len(CALL_OPEN), tools)
        calls.append(
            ToolCall(
                id=f"call_{len(calls)}",
                name=attempt.name,
                arguments=attempt.arguments,
                status=attempt.status,
                raw=text[start : attempt.end],
            )
        )
        at = attempt.end
    said.append(text[at:])
    return ParsedTurn(content="".join(said).strip(), reasoning=reasoning, tool_calls=tuple(calls), complete=complete)


def judged_call(
    call_id: str, name: Any, arguments: Any, *, status: CallStatus, raw: str, tools: Collection[str]
) -> ToolCall:
    """A call that another parser has found, by the rules that hold for all: plain values, an object of arguments."""
    if status in {CallStatus.OK, CallStatus.UNKNOWN_TOOL}:
        attempt = _judged({"name": name, "arguments": arguments}, 0, tools)
        return ToolCall(id=call_id, name=attempt.name, arguments=attempt.arguments, status=attempt.status, raw=raw)
    return ToolCall(
        id=call_id, name=name if isinstance(name, str) and _is_encodable(name) else "", status=status, raw=raw
    )


def _bare_call(text: str, at: int, tools: Collection[str]) -> ToolCall | None:
    """The turn as one call: an object with ``name`` and ``parameters``, and nothing beside it.

    An object without a tag is a call only where it names a tool; else it is an answer that happens to be JSON.
    """
    start = _skip_blanks(text, at)
    tagged = text.startswith(PYTHON_TAG, start)
    body = _skip_blanks(text, start + len(PYTHON_TAG)) if tagged else start
    if not text.startswith("{", body):
        return None
    parsed = _json_at(text.rstrip(_BLANKS), body, whole=True)
    raw = text[start:].rstrip(_BLANKS)
    if parsed is None:
        return ToolCall(id="call_0", name="", status=CallStatus.INVALID_JSON, raw=raw) if tagged else None
    value = parsed[0]
    fields = "parameters" if "parameters" in value else "arguments"
    if not tagged and (value.get("name") not in [*tools] or fields not in value):
        return None
    attempt = _judged({"name": value.get("name"), "arguments": value.get(fields)}, 0, tools)
    return ToolCall(id="call_0", name=attempt.name, arguments=attempt.arguments, status=attempt.status, raw=raw)


def _reasoning(text: str, *, reasoning_open: bool) -> tuple[str | None, int]:
    """The reasoning and where it ends. A think block that is never closed holds the rest of the turn."""
    start = _skip_blanks(text, 0)
    if text.startswith(THINK_OPEN, start):
        start += len(THINK_OPEN)
    elif not reasoning_open:
        return None, 0
    end = text.find(THINK_CLOSE, start)
    if end < 0:
        return text[start:].strip(), len(text)
    return text[start:end].strip(), end + len(THINK_CLOSE)


def _attempt(text: str, start: int, tools: Collection[str]) -> _Attempt:
    body = _skip_blanks(text, start)
    parsed = _json_at(text, body) if text.startswith("{", body) else None
    if parsed is not None:
        value, after = parsed
        after = _skip_blanks(text, after)
        # Read by its own grammar first, so that markers inside an argument's text are text.
        if text.startswith(CALL_CLOSE, after):
            return _judged(value, after + len(CALL_CLOSE), tools)
    close, reopened = text.find(CALL_CLOSE, start), text.find(CALL_OPEN, start)
    if close < 0 or 0 <= reopened < close:
        return _Attempt(end=reopened if reopened >= 0 else len(text), status=CallStatus.UNCLOSED)
    end = close + len(CALL_CLOSE)
    status = CallStatus.INVALID_JSON
    if parsed is None and _json_at(text[start:close].strip(), 0, whole=True) is not None:
        status = CallStatus.MALFORMED
    return _Attempt(end=end, status=status)


def _judged(value: dict[str, Any], end: int, tools: Collection[str]) -> _Attempt:
    if not _is_plain(value):
        return _Attempt(end=end, status=CallStatus.INVALID_JSON)
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return _Attempt(end=end, status=CallStatus.MISSING_NAME)
    arguments = _arguments(value.get("arguments"))
    if arguments is None:
        return _Attempt(end=end, status=CallStatus.MALFORMED, name=name)
    status = CallStatus.OK if name in tools else CallStatus.UNKNOWN_TOOL
    return _Attempt(end=end, status=status, name=name, arguments=arguments)


def _arguments(value: Any) -> dict[str, Any] | None:
    """The arguments as an object; some policies write the object as a text of JSON."""
    if value is None:
        return {}
    if isinstance(value, str):
        parsed = _json_at(value.strip(), 0, whole=True)
        value = parsed[0] if parsed is not None else None
    if not isinstance(value, dict):
        return None
    arguments = cast("dict[str, Any]", value)
    return arguments if _is_plain(arguments) else None


def _json_at(text: str, start: int, *, whole: bool = False) -> tuple[Any, int] | None:
    """One JSON value and where it ends; ``None`` where there is none."""
    try:
        value, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return None if whole and end != len(text) else (value, end)


def _is_plain(value: object) -> bool:
    """Whether it can go on as JSON and MessagePack: not too deep, no text without a code, no number out of reach."""
    stack: list[tuple[object, int]] = [(value, 1)]
    while stack:
        node, depth = stack.pop()
        if depth > DEPTH_MAX:
            return False
        if isinstance(node, str):
            if not _is_encodable(node):
                return False
        elif isinstance(node, float):
            if not math.isfinite(node):
                return False
        elif isinstance(node, int):
            if not _INT_MIN <= node <= _INT_MAX:
                return False
        elif isinstance(node, dict):
            stack.extend((part, depth + 1) for pair in cast("dict[str, object]", node).items() for part in pair)
        elif isinstance(node, list):
            stack.extend((part, depth + 1) for part in cast("list[object]", node))
    return True


def _is_encodable(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _skip_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at] in _BLANKS:
        at += 1
    return at


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError("not finite")
    return number


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse)
