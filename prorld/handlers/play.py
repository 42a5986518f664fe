"""Policies that are written down: what one says from its first turn to its last, and what that is worth.

A handler that knows how its tasks are solved, and how they are cheated, says so in ``plays``. Preflight runs them
before any engine is paid for, tests run them, and the scripted engine says them through the whole daemon.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

__all__ = ["EMPTY", "GOLD", "MALFORMED", "WRONG", "Play", "common_plays", "tool_call"]

GOLD: Final = "gold"
EMPTY: Final = "empty"
WRONG: Final = "wrong"
MALFORMED: Final = "malformed"

TURNS_MAX: Final = 64


class Play(msgspec.Struct, frozen=True, kw_only=True):
    """One policy, written down.

    ``name`` is ``gold``, ``empty``, ``wrong``, ``malformed``, or ``cheat:WHAT``. A turn is the text that the policy
    samples; it calls tools as ``tool_call`` writes it, or in the handler's own dialect. ``reward`` is what an honest
    grade of it is.
    """

    name: Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_:-]{0,63}$")]
    turns: Annotated[tuple[str, ...], Meta(min_length=1, max_length=TURNS_MAX)]
    reward: float = 0.0


def tool_call(name: str, **arguments: Any) -> str:
    """A call as the scripted policies write it, and chat templates of the Hermes kind."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    # Text that looks like a control token, or like the end of the call, stays text.
    escaped = call.replace("<", "\\u003c")
    return f"<tool_call>\n{escaped}\n</tool_call>"


def common_plays() -> tuple[Play, ...]:
    """Those that are the same for every task: to say nothing at all, and calls that can't be read, to the end."""
    broken = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"\n</tool_call>'
    unknown = tool_call("no_such_tool", why="none")
    return (
        Play(name=EMPTY, turns=("",)),
        Play(name=MALFORMED, turns=(broken, unknown, tool_call("bash", words=1), "I could not call a tool.")),
    )
