"""Messages between a policy and its environment, as people and chat exports read them. The token ids are the truth."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

import msgspec

Role = Literal["system", "user", "assistant", "tool"]


class CallStatus(StrEnum):
    """What the parser made of one attempted tool call. A malformed call is an action of the policy, not an error."""

    OK = "ok"
    INVALID_JSON = "invalid_json"
    UNCLOSED = "unclosed"
    MISSING_NAME = "missing_name"
    MALFORMED = "malformed"
    UNKNOWN_TOOL = "unknown_tool"


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One tool call that the policy wrote. ``raw`` is the exact text it wrote for it."""

    id: str
    name: str
    arguments: dict[str, Any] = {}
    status: CallStatus = CallStatus.OK
    raw: str = ""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation."""

    role: Role
    content: str
    reasoning: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None


class ToolSchema(msgspec.Struct, frozen=True, kw_only=True):
    """A tool as the policy sees it: a name, words, and a JSON schema of its arguments."""

    name: str
    description: str
    parameters: dict[str, Any]

    def as_function(self) -> dict[str, Any]:
        """The shape chat templates expect."""
        return {"type": "function", "function": msgspec.to_builtins(self)}


def system(content: str) -> Message:
    """A system message."""
    return Message(role="system", content=content)


def user(content: str) -> Message:
    """A user message."""
    return Message(role="user", content=content)


def tool_result(content: str, call_id: str) -> Message:
    """The result of a tool call."""
    return Message(role="tool", content=content, tool_call_id=call_id)
