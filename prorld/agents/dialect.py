"""How a turn is read and how results are said: the seam between what a policy writes and what the loop does.

``NativeCalls`` is the tool calling of the model's own chat template. A task with an action language of its own
implements ``Dialect``; its results then go back as user messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from prorld.domain.messages import CallStatus, Message, ToolCall, tool_result
from prorld.inference.contract import Turn

__all__ = ["Act", "Action", "Answer", "Dialect", "Malformed", "NativeCalls", "Reply"]


class Act(msgspec.Struct, frozen=True, kw_only=True):
    """The policy calls a tool."""

    tool: str
    arguments: dict[str, Any] = {}
    call_id: str = ""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The policy calls nothing: this is what it says in the end."""

    text: str


class Malformed(msgspec.Struct, frozen=True, kw_only=True):
    """The policy tried to act and can't be understood; ``hint`` tells it how to do better."""

    hint: str
    call_id: str = ""


Action = Act | Answer | Malformed


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What the environment says to one action."""

    action: Act | Malformed
    text: str


class Dialect(Protocol):
    """How a policy's turns are read and answered."""

    @property
    def offers_schemas(self) -> bool:
        """Whether the tools' schemas are given to the chat template."""
        ...

    def read(self, turn: Turn) -> Sequence[Action]:
        """What the policy does in this turn: one ``Answer``, or acts and failed attempts in order. Never raises."""
        ...

    def say(self, replies: Sequence[Reply]) -> Sequence[Message]:
        """The messages that carry the results of a turn, in order."""
        ...


_HINTS: Mapping[CallStatus, str] = {
    CallStatus.INVALID_JSON: "the arguments of this tool call are not valid JSON",
    CallStatus.UNCLOSED: "this tool call was not closed",
    CallStatus.MISSING_NAME: "this tool call does not name a tool",
    CallStatus.MALFORMED: "this tool call can't be read",
}


class NativeCalls:
    """Tool calls as the model's chat template writes them; a turn without one is the answer."""

    @property
    def offers_schemas(self) -> bool:
        """Always: the template renders them."""
        return True

    def read(self, turn: Turn) -> Sequence[Action]:
        """One action for each call; the parser has already looked at their form."""
        return [self._action(call) for call in turn.tool_calls] or [Answer(text=turn.content)]

    def say(self, replies: Sequence[Reply]) -> Sequence[Message]:
        """One tool message for each call."""
        return [tool_result(reply.text, reply.action.call_id) for reply in replies]

    def _action(self, call: ToolCall) -> Act | Malformed:
        # An unknown name is well-formed: the loop answers it with the names there are.
        if call.status in (CallStatus.OK, CallStatus.UNKNOWN_TOOL):
            return Act(tool=call.name, arguments=call.arguments, call_id=call.id)
        return Malformed(hint=f"[not called: {_HINTS[call.status]}]", call_id=call.id)
