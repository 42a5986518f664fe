"""Stand-ins: what a template sees instead of the texts of a conversation.

A template is rendered twice, once with stand-ins and once with the texts. The first rendering says which parts are the
template's own and may hold control tokens; the second must say the same with the texts in place, stripped at most.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from prorld.domain.messages import CallStatus, Message, ToolCall
from prorld.errors import RendererError

__all__ = ["MARK", "Held", "Holder", "Part", "as_is", "fill", "template_messages"]

# Private-use characters: no template transforms them, and a template that holds one is refused.
MARK = "\ue000"
_END = "\ue001"
_STANDIN = re.compile(f"{MARK}([0-9]+){_END}")

# Spoken text may be stripped by a template; data (names, ids, arguments) may be escaped as JSON.
Kind = Literal["spoken", "reasoning", "data"]


class Held(msgspec.Struct, frozen=True):
    """One text that was replaced, the index of its message, and what a template may do to it."""

    text: str
    message: int
    kind: Kind


class Part(msgspec.Struct, frozen=True):
    """A run of rendered text: the template's own where ``message`` is ``None``, else a text of that message."""

    text: str
    message: int | None = None


class Holder:
    """Takes texts and gives stand-ins for them, numbered in order."""

    def __init__(self) -> None:
        self.held: list[Held] = []

    def hold(self, text: str, message: int, kind: Kind) -> str:
        """The stand-in of a text. An empty text stays empty, since templates ask whether there is any."""
        if not text:
            return text
        self.held.append(Held(text, message, kind))
        return f"{MARK}{len(self.held) - 1}{_END}"


Hold = Callable[[str, int, Kind], str]


def as_is(text: str, _message: int, _kind: Kind) -> str:
    """No stand-in."""
    return text


def template_messages(messages: Sequence[Message], hold: Hold) -> list[dict[str, Any]]:
    """The messages as chat templates expect them."""
    return [_template_message(message, index, hold) for index, message in enumerate(messages)]


def fill(standins: str, texts: str, held: Sequence[Held]) -> list[Part]:
    """Cut the rendering with texts by the rendering with stand-ins. Raises ``RendererError`` where they don't fit."""
    pieces = list(_pieces(standins))
    _check_spoken(pieces, held)
    parts: list[Part] = []
    at = 0
    for index, piece in enumerate(pieces):
        if isinstance(piece, str):
            if not texts.startswith(piece, at):
                raise RendererError("the chat template changes with the text of a message")
            parts.append(Part(piece))
            at += len(piece)
            continue
        following = pieces[index + 1] if index + 1 < len(pieces) else ""
        text = _found(held[piece], texts, at, following if isinstance(following, str) else "")
        parts.append(Part(text, held[piece].message))
        at += len(text)
    if at != len(texts):
        raise RendererError("the chat template writes more than it was given")
    return parts


def _template_message(message: Message, index: int, hold: Hold) -> dict[str, Any]:
    calls = message.tool_calls
    content = message.content
    if any(call.status is not CallStatus.OK for call in calls):
        # A template can't write a call that was no call; its own words can.
        content = "\n".join(part for part in (content, *(call.raw for call in calls)) if part)
        calls = []
    out: dict[str, Any] = {"role": message.role, "content": hold(content, index, "spoken")}
    if message.reasoning:
        out["reasoning_content"] = hold(message.reasoning, index, "reasoning")
    if calls:
        out["tool_calls"] = [_template_call(call, index, hold) for call in calls]
    if message.tool_call_id is not None:
        out["tool_call_id"] = hold(message.tool_call_id, index, "data")
    return out


def _template_call(call: ToolCall, index: int, hold: Hold) -> dict[str, Any]:
    arguments = _held_leaves(call.arguments, index, hold)
    function = {"name": hold(call.name, index, "data"), "arguments": arguments}
    return {"id": hold(call.id, index, "data"), "type": "function", "function": function}


def _held_leaves(value: Any, index: int, hold: Hold) -> Any:
    if isinstance(value, str):
        return hold(value, index, "data")
    if isinstance(value, dict):
        return {hold(str(key), index, "data"): _held_leaves(part, index, hold) for key, part in value.items()}
    if isinstance(value, list):
        return [_held_leaves(part, index, hold) for part in value]
    return value


def _pieces(standins: str) -> Iterator[str | int]:
    """Template text and numbers of stand-ins, in order."""
    at = 0
    for match in _STANDIN.finditer(standins):
        if match.start() > at:
            yield standins[at : match.start()]
        yield int(match[1])
        at = match.end()
    if at < len(standins):
        yield standins[at:]


def _check_spoken(pieces: Sequence[str | int], held: Sequence[Held]) -> None:
    written = Counter(piece for piece in pieces if isinstance(piece, int))
    for number, text in enumerate(held):
        times = written[number]
        if text.kind == "spoken" and times != 1:
            raise RendererError(f"the chat template writes the text of message {text.message} {times} times")
        if text.kind == "reasoning" and times > 1:
            raise RendererError(f"the chat template writes the reasoning of message {text.message} {times} times")


def _found(held: Held, texts: str, at: int, following: str) -> str:
    for form in _forms(held):
        if texts.startswith(form, at) and texts.startswith(following, at + len(form)):
            return form
    raise RendererError(f"the chat template changes the text of message {held.message}")


def _forms(held: Held) -> Iterator[str]:
    text = held.text
    yield text
    if held.kind == "data":
        yield json.dumps(text, ensure_ascii=False)[1:-1]
        return
    for blanks in (None, "\n"):
        yield text.strip(blanks)
        yield text.lstrip(blanks)
        yield text.rstrip(blanks)
