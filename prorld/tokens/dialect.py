"""How tools are written where a chat template has no words for them.

A dialect turns tool schemas, tool calls and tool results into plain system, assistant and user text, and reads calls
back. It works on the messages a template sees, in which the texts may be stand-ins, so it never looks into them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from prorld.tokens.contract import ParsedTurn
from prorld.tokens.parsers import CALL_CLOSE, CALL_OPEN, parse_hermes

__all__ = ["HermesDialect", "ToolDialect"]

TemplateMessage = Mapping[str, Any]


class ToolDialect(Protocol):
    """One way to write tools as text."""

    @property
    def name(self) -> str:
        """For records."""
        ...

    def plain(self, messages: Sequence[TemplateMessage], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The same conversation without tools, tool calls and tool messages."""
        ...

    def parse(self, text: str, tools: Collection[str], *, reasoning_open: bool, complete: bool) -> ParsedTurn:
        """What the policy said. Never raises for what a policy wrote."""
        ...


class HermesDialect:
    """Schemas in ``<tools>``, calls as JSON in ``<tool_call>``, results in ``<tool_response>`` of a user message.

    Results that follow each other share one user message.
    """

    @property
    def name(self) -> str:
        """For records."""
        return "hermes"

    def plain(self, messages: Sequence[TemplateMessage], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The same conversation without tools, tool calls and tool messages."""
        out: list[dict[str, Any]] = []
        after_result = False
        for message in messages:
            is_result = message["role"] == "tool"
            if is_result:
                result = f"<tool_response>\n{message['content']}\n</tool_response>"
                if after_result:
                    out[-1]["content"] += "\n" + result
                else:
                    out.append({"role": "user", "content": result})
            else:
                out.append(_spoken(message))
            after_result = is_result
        return _with_tools(out, tools) if tools else out

    def parse(self, text: str, tools: Collection[str], *, reasoning_open: bool, complete: bool) -> ParsedTurn:
        """What the policy said. Never raises for what a policy wrote."""
        return parse_hermes(text, tools, reasoning_open=reasoning_open, complete=complete)


def _spoken(message: TemplateMessage) -> dict[str, Any]:
    calls = message.get("tool_calls") or ()
    parts = [message["content"]] if message["content"] or not calls else []
    parts += [_call_text(call["function"]) for call in calls]
    spoken = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
    return {**spoken, "content": "\n".join(parts)}


def _call_text(function: Mapping[str, Any]) -> str:
    body = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
    return f"{CALL_OPEN}\n{body}\n{CALL_CLOSE}"


def _with_tools(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    words = _tools_text(tools)
    if messages and messages[0]["role"] == "system":
        first = messages[0]
        return [{**first, "content": f"{first['content']}\n\n{words}"}, *messages[1:]]
    return [{"role": "system", "content": words}, *messages]


def _tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You can call these tools. Each line is a tool with the JSON schema of its arguments.\n"
        f"<tools>\n{schemas}\n</tools>\n\n"
        "To call a tool, write a JSON object with its name and arguments between these tags:\n"
        f'{CALL_OPEN}\n{{"name": "the tool\'s name", "arguments": {{"an argument": "its value"}}}}\n{CALL_CLOSE}\n'
        "The result comes back between <tool_response> and </tool_response>."
    )
