"""The tools of R2E-Gym."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from prorld.agents.editor import Editor
from prorld.agents.editor_tool import EditorArguments, editor_tool
from prorld.agents.local_search import search_tool
from prorld.agents.observation import Observation, observe, refusal
from prorld.agents.tools import Tool, make_tool, sandbox_tool, unusable
from prorld.sandbox.contract import Sandbox

__all__ = ["r2e_tools"]


class _ExecuteBash(msgspec.Struct, frozen=True, kw_only=True):
    cmd: Annotated[str, Meta(description="The command to run in bash.")]


class _FileEditor(EditorArguments, frozen=True, kw_only=True):
    concise: Annotated[bool, Meta(description="For `view` of a Python file: its imports and definitions alone.")] = (
        False
    )


class _Finish(msgspec.Struct, frozen=True, kw_only=True):
    command: Annotated[str, Meta(description="`submit`.")]
    result: Annotated[str, Meta(description="What you tell in the end.")] = ""


def r2e_tools() -> tuple[Tool, ...]:
    """All of them, made for one episode."""
    words = "Run a command in a bash session that stays: its directory, variables and background jobs are kept."
    return (
        sandbox_tool("execute_bash", words, _ExecuteBash, _execute_bash),
        editor_tool(Editor(), name="file_editor", arguments=_FileEditor),
        search_tool(),
        make_tool("finish", "Hand in what you have done. This ends the task.", _Finish, _finish),
    )


async def _execute_bash(given: _ExecuteBash, sandbox: Sandbox, limit_s: float) -> Observation:
    if (problem := unusable(given.cmd)) is not None:
        return refusal(f"[the command was not run: {problem}]", "unusable")
    return observe(await sandbox.bash(given.cmd, limit_s=limit_s), limit_s=limit_s, session="shell")


def _finish(given: _Finish) -> Observation:
    return Observation(text=given.result, finished=True, data={"submitted": given.command.strip() == "submit"})
