"""The tools of prorld's own preset: few words, brackets around what is not output, one way of writing for all."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from prorld.agents.editor import Editor
from prorld.agents.editor_text import EditRefused, as_bytes
from prorld.agents.editor_tool import editor_tool
from prorld.agents.local_search import glob_tool, grep_tool
from prorld.agents.observation import Observation, ToolFacts, clip, observe, refusal
from prorld.agents.tools import Tool, make_tool, sandbox_tool, unusable
from prorld.sandbox.contract import Sandbox

__all__ = ["READ_BYTES", "bash_tool", "finish_tool", "plain_tools", "python_tool", "think_tool"]

READ_BYTES = 1 << 20

_Timeout = Annotated[float, Meta(ge=0, description="Stop it after so many seconds; 0 for the usual limit.")]


class _Bash(msgspec.Struct, frozen=True, kw_only=True):
    command: Annotated[str, Meta(description="The command, as it would be typed into bash.")]
    timeout: _Timeout = 0.0


class _Python(msgspec.Struct, frozen=True, kw_only=True):
    code: Annotated[str, Meta(description="Python code; the value of a last expression is shown.")]
    timeout: _Timeout = 0.0


class _Finish(msgspec.Struct, frozen=True, kw_only=True):
    message: Annotated[str, Meta(description="The final answer.")] = ""


class _Think(msgspec.Struct, frozen=True, kw_only=True):
    thought: Annotated[str, Meta(description="What you want to keep in mind.")] = ""


class _ReadFile(msgspec.Struct, frozen=True, kw_only=True):
    path: Annotated[str, Meta(description="The file; a path that is not absolute begins where the session began.")]


class _WriteFile(msgspec.Struct, frozen=True, kw_only=True):
    path: Annotated[str, Meta(description="The file; a path that is not absolute begins where the session began.")]
    content: Annotated[str, Meta(description="All that the file will hold.")]


def plain_tools() -> tuple[Tool, ...]:
    """All of them, made for one episode."""
    return (
        bash_tool(),
        python_tool(),
        finish_tool(),
        think_tool(),
        editor_tool(Editor()),
        sandbox_tool("read_file", "Show what a text file holds.", _ReadFile, _read_file),
        sandbox_tool("write_file", "Write a file, over what was there.", _WriteFile, _write_file),
        grep_tool(),
        glob_tool(),
    )


def bash_tool() -> Tool:
    """A command in the shell."""
    words = "Run a command in a bash session. Directory, variables and background jobs stay between calls."
    return sandbox_tool("bash", words, _Bash, _run_bash)


def python_tool() -> Tool:
    """A cell in the interpreter."""
    words = "Run code in a Python session. Variables and imports stay between calls."
    return sandbox_tool("python", words, _Python, _run_python)


def finish_tool() -> Tool:
    """The end of the episode."""
    return make_tool("finish", "Say that the task is done and give the final answer.", _Finish, _run_finish)


def think_tool() -> Tool:
    """Nothing but a thought."""
    return make_tool("think", "Write down a thought. It changes nothing.", _Think, _run_think)


async def _run_bash(arguments: _Bash, sandbox: Sandbox, limit_s: float) -> Observation:
    if (problem := unusable(arguments.command)) is not None:
        return refusal(f"[the command was not run: {problem}]", "unusable")
    within = min(arguments.timeout or limit_s, limit_s)
    return observe(await sandbox.bash(arguments.command, limit_s=within), limit_s=within, session="shell")


async def _run_python(arguments: _Python, sandbox: Sandbox, limit_s: float) -> Observation:
    if (problem := unusable(arguments.code)) is not None:
        return refusal(f"[the code was not run: {problem}]", "unusable")
    within = min(arguments.timeout or limit_s, limit_s)
    return observe(await sandbox.python(arguments.code, limit_s=within), limit_s=within, session="interpreter")


def _run_finish(arguments: _Finish) -> Observation:
    return Observation(text=arguments.message, finished=True)


def _run_think(_arguments: _Think) -> Observation:
    return Observation(text="[noted]")


async def _read_file(arguments: _ReadFile, sandbox: Sandbox, _limit_s: float) -> Observation:
    try:
        content = await sandbox.read_file(arguments.path, max_bytes=READ_BYTES)
    except (OSError, ValueError) as exc:
        return refusal(f"[not read: {clip(str(exc), 500)}]", "not_read")
    text = content.decode("utf-8", "replace").replace("\0", "")
    shown = clip(text)
    facts = ToolFacts(output_bytes=len(content), omitted_bytes=max(0, len(content) - len(shown.encode())))
    return Observation(text=shown or "[the file is empty]", facts=facts)


async def _write_file(arguments: _WriteFile, sandbox: Sandbox, _limit_s: float) -> Observation:
    try:
        content = as_bytes(arguments.content, "content")
        await sandbox.write_file(arguments.path, content)
    except (EditRefused, OSError, ValueError) as exc:
        return refusal(f"[not written: {clip(str(exc), 500)}]", "not_written")
    return Observation(text=f"[{len(content)} bytes written to {clip(arguments.path, 500)}]")
