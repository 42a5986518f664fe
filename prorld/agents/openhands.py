"""The tools of OpenHands: those of its CodeAct agent, and those of its later SDK."""

from __future__ import annotations

import re
import secrets
from typing import Annotated

import msgspec
from msgspec import Meta

from prorld.agents.editor import Editor
from prorld.agents.editor_tool import editor_tool
from prorld.agents.listing import visible
from prorld.agents.local_search import glob_tool, grep_tool
from prorld.agents.observation import Observation, clip_chars, clipped_bytes, command_facts, refusal
from prorld.agents.tools import Tool, make_tool, sandbox_tool, unusable
from prorld.agents.tracker import task_tracker
from prorld.sandbox.contract import CommandResult, Sandbox

__all__ = ["OUTPUT_CHARS", "codeact_tools", "sdk_tools"]

OUTPUT_CHARS = 30_000
_WHERE_SECONDS = 5.0

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
# The directory of the shell, and the Python that it would start. Builtins alone: a program more would cost each command
# more than the command itself. Nothing in it fails, for shells that end at a failure.
_WHERE = (
    "builtin printf '\\0%s\\0%s\\0' {nonce} \"$PWD\"; builtin type -P python || builtin type -P python3 || builtin :; "
    "builtin printf '\\0%s\\0' {nonce}"
)

_NO_INPUT = (
    "[Nothing was sent: no command is waiting for input. Every command runs to its end or to its time limit before its "
    "result is shown, and finds its standard input empty. Pass the input in the command itself, with a pipe, a here "
    "document or a file.]"
)
_RESTARTED = "[The session had ended and was started again: what was set in it is gone.]"

_Command = Annotated[str, Meta(description="The command to run in bash.")]
_Timeout = Annotated[float, Meta(ge=0, description="Stop it after so many seconds; 0 for the usual limit.")]
_Risk = Annotated[
    str,
    Meta(
        description="How risky you think this is; for the record.",
        extra_json_schema={"enum": ["LOW", "MEDIUM", "HIGH"]},
    ),
]


class _ExecuteBash(msgspec.Struct, frozen=True, kw_only=True):
    command: _Command
    is_input: Annotated[
        str,
        Meta(description="Whether this is input for a running command.", extra_json_schema={"enum": ["true", "false"]}),
    ] = "false"
    timeout: _Timeout = 0.0
    security_risk: _Risk = "LOW"


class _Terminal(msgspec.Struct, frozen=True, kw_only=True):
    command: _Command
    is_input: Annotated[bool, Meta(description="Whether this is input for a running command.")] = False
    timeout: _Timeout = 0.0
    reset: Annotated[bool, Meta(description="Begin a new shell session first.")] = False
    security_risk: _Risk = "LOW"


class _Cell(msgspec.Struct, frozen=True, kw_only=True):
    code: Annotated[str, Meta(description="The Python code of the cell; what a last expression is worth is shown.")]


class _Finish(msgspec.Struct, frozen=True, kw_only=True):
    message: Annotated[str, Meta(description="What you tell the user in the end.")]


class _Think(msgspec.Struct, frozen=True, kw_only=True):
    thought: Annotated[str, Meta(description="What you think.")]


def codeact_tools() -> tuple[Tool, ...]:
    """Those of the CodeAct agent, made for one episode; ``grep`` and ``glob`` are those of its read-only agent."""
    words = "Run a command in a bash session that stays: its directory, variables and background jobs are kept."
    cell = "Run a cell in an IPython session that stays: its variables and imports are kept."
    return (
        sandbox_tool("execute_bash", words, _ExecuteBash, _execute_bash),
        sandbox_tool("execute_ipython_cell", cell, _Cell, _run_cell),
        editor_tool(Editor()),
        _think(),
        _finish(),
        task_tracker(),
        grep_tool(),
        glob_tool(),
    )


def sdk_tools() -> tuple[Tool, ...]:
    """Those of the SDK, made for one episode."""
    words = "Run a command in a terminal session that stays: its directory, variables and background jobs are kept."
    return (
        sandbox_tool("terminal", words, _Terminal, _terminal),
        editor_tool(Editor(), name="file_editor"),
        _think(),
        _finish(),
        task_tracker(),
        grep_tool(),
        glob_tool(),
    )


def _think() -> Tool:
    def run(_given: _Think) -> Observation:
        return Observation(text="Your thought was noted.")

    return make_tool("think", "Think about something. It changes nothing.", _Think, run)


def _finish() -> Tool:
    def run(given: _Finish) -> Observation:
        return Observation(text=given.message, finished=True)

    return make_tool("finish", "Say that the task is done, or that it can't be done.", _Finish, run)


async def _execute_bash(given: _ExecuteBash, sandbox: Sandbox, limit_s: float) -> Observation:
    asked = given.is_input.strip().lower()
    if asked not in ("true", "false"):
        return refusal("[execute_bash was not called: is_input is true or false]", "bad_arguments")
    if asked == "true":
        return refusal(_NO_INPUT, "no_input")
    return await _command(given.command, given.timeout, sandbox, limit_s)


async def _terminal(given: _Terminal, sandbox: Sandbox, limit_s: float) -> Observation:
    if given.is_input and given.reset:
        return refusal("[terminal was not called: is_input and reset can't be given together]", "bad_arguments")
    if given.is_input:
        return refusal(_NO_INPUT, "no_input")
    if not given.reset:
        return await _command(given.command, given.timeout, sandbox, limit_s)
    # A shell that is killed is replaced at once; there is no milder way to be rid of all that was set in it.
    ended = await sandbox.bash("builtin kill -KILL $$", limit_s=limit_s)
    said = "[The session was started anew.]" if ended.restarted else "[The session could not be started anew.]"
    if not given.command.strip():
        return Observation(text=said, facts=command_facts(ended, 0))
    observation = await _command(given.command, given.timeout, sandbox, limit_s)
    facts = msgspec.structs.replace(observation.facts, restarted=ended.restarted or observation.facts.restarted)
    return msgspec.structs.replace(observation, text=f"{said}\n{observation.text}", facts=facts)


async def _command(command: str, wanted_s: float, sandbox: Sandbox, limit_s: float) -> Observation:
    if (problem := unusable(command)) is not None:
        return refusal(f"[The command was not run: {problem}]", "unusable")
    if not command.strip():
        return refusal(_NO_INPUT, "no_input")
    within = min(wanted_s or limit_s, limit_s)
    result = await sandbox.bash(command, limit_s=within)
    code = -1 if result.timed_out else result.exit_code
    output, shown = _output(result)
    lines = [output] if output else []
    if result.restarted:
        lines.append(_RESTARTED)
    if result.timed_out:
        lines.append(f"[The command has no new output after {within:g} seconds. It was stopped; the session goes on.]")
    else:
        lines.append(f"[The command completed with exit code {code}.]")
    where, died = await _whereabouts(sandbox)
    if died and not result.restarted:
        lines.append(_RESTARTED)
    lines += [*where, f"[Command finished with exit code {code}]"]
    facts = command_facts(result, shown)
    facts = msgspec.structs.replace(facts, restarted=facts.restarted or died)
    return Observation(text="\n".join(lines), facts=facts)


async def _whereabouts(sandbox: Sandbox) -> tuple[list[str], bool]:
    """Where the shell is and which Python it would start, as far as it says; and whether it had died meanwhile."""
    nonce = secrets.token_hex(8)
    result = await sandbox.bash(_WHERE.format(nonce=nonce), limit_s=_WHERE_SECONDS)
    mark = b"\0" + nonce.encode() + b"\0"
    _, begun, rest = result.output.partition(mark)
    said, ended, _ = rest.partition(mark)
    directory, found, more = said.partition(b"\0")
    if not (begun and ended and found):
        return [], result.restarted
    lines = [f"[Current working directory: {visible(directory)}]"]
    # A shell that traces or traps adds lines of its own; the path of a program is absolute.
    pythons = [line for line in more.split(b"\n") if line.startswith(b"/")]
    return [*lines, *(f"[Python interpreter: {visible(python)}]" for python in pythons[:1])], result.restarted


async def _run_cell(given: _Cell, sandbox: Sandbox, limit_s: float) -> Observation:
    if (problem := unusable(given.code)) is not None:
        return refusal(f"[The code was not run: {problem}]", "unusable")
    result = await sandbox.python(given.code, limit_s=limit_s)
    output, shown = _output(result)
    lines = [output] if output else []
    if result.restarted:
        lines.append(_RESTARTED)
    if result.timed_out:
        lines.append(f"[Execution timed out ({limit_s:g} seconds).]")
    elif not lines and result.exit_code == 0:
        lines.append("[Code executed successfully with no output]")
    elif not lines:
        lines.append(f"[The code ended with exit code {result.exit_code} and no output]")
    return Observation(text="\n".join(lines), facts=command_facts(result, shown))


def _output(result: CommandResult) -> tuple[str, int]:
    """What is shown of an output, and how many of its bytes that is."""
    text = _ANSI.sub("", result.text).rstrip("\n")
    shown = clip_chars(text, OUTPUT_CHARS, omitted_bytes=result.omitted_bytes)
    return shown, len(result.output) - clipped_bytes(text, OUTPUT_CHARS)
