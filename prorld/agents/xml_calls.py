"""Tool calls for models whose chat template has none: ``<function=NAME><parameter=P>value</parameter></function>``.

The form is that of OpenHands and R2E. A job that samples with the stop word ``</function`` gets turns that end before
it, which are read as well. Reading is linear in what was written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from prorld.agents.dialect import Act, Action, Answer, Malformed, NativeCalls, Reply
from prorld.agents.tools import Tool
from prorld.domain.messages import Message, user
from prorld.inference.contract import Turn

__all__ = ["STOP_WORD", "XmlCalls", "explain"]

STOP_WORD = "</function"
NAME_CHARS = 100

_OPEN = "<function="
_PARAMETER = "<parameter="
# A value may hold the closing word itself: it ends where something of the call follows.
_END_OF_VALUE = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function|\Z))")
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,100}")
_SPACE = re.compile(r"\s*")
_CLOSE = re.compile(r"</function\s*>?")


class _UnreadableError(Exception):
    """Why a call can't be read; never leaves this module."""


class XmlCalls:
    """Calls in the text of a turn; a turn without one is the answer. Results are said by the user."""

    @property
    def offers_schemas(self) -> bool:
        """No: the prompt explains the tools, with ``explain``."""
        return False

    def read(self, turn: Turn) -> Sequence[Action]:
        """The calls in order. What stands between them is what the policy thinks."""
        if turn.tool_calls:  # a parser of the engine's side knew the form and took them out of the text
            return NativeCalls().read(turn)
        text = turn.content
        actions: list[Action] = []
        at = text.find(_OPEN)
        while at >= 0:
            try:
                act, end = _read_call(text, at, cut=turn.truncated)
            except _UnreadableError as exc:
                actions.append(Malformed(hint=f"[not called: {exc}]"))
                break
            actions.append(act)
            at = text.find(_OPEN, end)
        return actions or [Answer(text=text)]

    def say(self, replies: Sequence[Reply]) -> Sequence[Message]:
        """One message of the user, with a result for each call under its name."""
        return [user("\n\n".join(_said(reply) for reply in replies))]


def explain(tools: Sequence[Tool]) -> str:
    """What a prompt tells a policy of its tools and of how they are called."""
    parts = ["You have these functions:"]
    for tool in tools:
        parts.append(f"---- {tool.schema.name}\n{tool.schema.description}")
        required = tool.schema.parameters.get("required", ())
        for name, about in tool.schema.parameters.get("properties", {}).items():
            must = "required" if name in required else "optional"
            choice = f" One of: {', '.join(map(str, about['enum']))}." if "enum" in about else ""
            parts.append(f"  {name} ({about.get('type', 'any')}, {must}): {about.get('description', '')}{choice}")
    parts.append(
        "To call one, write it in this form, at the end of what you say, and nothing after it:\n\n"
        "<function=NAME>\n<parameter=FIRST>value</parameter>\n<parameter=SECOND>a value\nof two lines</parameter>\n"
        "</function>\n\nGive every required parameter. Call one function at a time; the next message has its result."
    )
    return "\n".join(parts)


def _said(reply: Reply) -> str:
    match reply.action:
        case Act(tool=name):
            return f"EXECUTION RESULT of [{name[:NAME_CHARS]}]:\n{reply.text}"
        case Malformed():
            return reply.text


def _read_call(text: str, at: int, *, cut: bool) -> tuple[Act, int]:
    """The call that begins there, and where it ends."""
    name, at = _read_name(text, at + len(_OPEN), "function")
    arguments: dict[str, str] = {}
    while True:
        at = _skip(text, at)
        if text.startswith(_PARAMETER, at):
            key, at = _read_name(text, at + len(_PARAMETER), "parameter")
            end = _END_OF_VALUE.search(text, at)
            if end is None:
                raise _UnreadableError(f"the parameter {key} of {name} is not closed with </parameter>")
            if key in arguments:
                raise _UnreadableError(f"the parameter {key} of {name} is given twice")
            # The newlines after the opening and before the closing word belong to the form.
            arguments[key] = text[at : end.start()].removeprefix("\n").removesuffix("\n")
            at = end.end()
        elif (close := _CLOSE.match(text, at)) is not None:
            return Act(tool=name, arguments=arguments), close.end()
        elif at == len(text) and not cut:
            return Act(tool=name, arguments=arguments), at  # a stop word ended the turn before the closing one
        elif at == len(text):
            raise _UnreadableError(f"the call of {name} is not closed")
        else:
            raise _UnreadableError(f"in {name} there is something that is no parameter")


def _read_name(text: str, at: int, what: str) -> tuple[str, int]:
    match = _NAME.match(text, at)
    if match is None or not text.startswith(">", match.end()):
        raise _UnreadableError(f"a {what} has no name, or its name is not closed with >")
    return match[0], match.end() + 1


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()
