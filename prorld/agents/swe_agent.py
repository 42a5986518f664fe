"""The tools of SWE-agent, and the one of mini-swe-agent."""

from __future__ import annotations

import shlex
from typing import Annotated

import msgspec
from msgspec import Meta

from prorld.agents.editor import Editor
from prorld.agents.editor_tool import editor_tool
from prorld.agents.local_search import find_file_tool, search_dir_tool, search_file_tool
from prorld.agents.observation import Observation, also_omitted, clip_chars, clipped_bytes, command_facts, refusal
from prorld.agents.tools import Tool, make_tool, sandbox_tool, unusable
from prorld.agents.window import Window
from prorld.sandbox.contract import Sandbox

__all__ = ["MINI_CHARS", "OUTPUT_CHARS", "SUBMIT_MARK", "mini_tools", "swe_agent_tools"]

OUTPUT_CHARS = 100_000
MINI_CHARS = 10_000
SUBMIT_MARK = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

_QUIET = "Your command ran successfully and did not produce any output."
_RESTARTED = "The shell had ended and was started again: what was set in it is gone."


class _Bash(msgspec.Struct, frozen=True, kw_only=True):
    command: Annotated[str, Meta(description="The command to run in bash.")]


class _Nothing(msgspec.Struct, frozen=True, kw_only=True):
    pass


def swe_agent_tools() -> tuple[Tool, ...]:
    """All of them, made for one episode: the editor in one tool, and the window with its own."""
    editor = Editor()
    window = Window(editor)
    words = "Run a command in a bash session that stays: its directory, variables and background jobs are kept."
    tools = (
        sandbox_tool("bash", words, _Bash, _bash),
        editor_tool(editor),
        make_tool("submit", "Hand in what you have done. This ends the task.", _Nothing, _submit),
        make_tool("exit_forfeit", "Give up. This ends the task.", _Nothing, _forfeit),
        find_file_tool(),
        search_dir_tool(),
        search_file_tool(lambda: window.path),
        *window.tools(),
    )
    return tuple(msgspec.structs.replace(tool, frame=_observation) for tool in tools)


def mini_tools() -> tuple[Tool, ...]:
    """The one tool: each command in a shell of its own, where the session began."""
    words = (
        "Run a command in a new bash. Nothing stays between calls: begin with cd where another directory is meant. To "
        f"finish, run a command that succeeds and prints {SUBMIT_MARK} as its first line, and after it what you submit."
    )
    return (sandbox_tool("bash", words, _Bash, _mini),)


def _observation(text: str) -> str:
    return text if text == _QUIET else f"OBSERVATION:\n{text}"


def _submit(_given: _Nothing) -> Observation:
    return Observation(text="", finished=True, data={"submitted": True})


def _forfeit(_given: _Nothing) -> Observation:
    return Observation(text="", finished=True, data={"forfeited": True})


async def _bash(given: _Bash, sandbox: Sandbox, limit_s: float) -> Observation:
    if (problem := unusable(given.command)) is not None:
        return refusal(f"The command was not run: {problem}.", "unusable")
    result = await sandbox.bash(given.command, limit_s=limit_s)
    text = result.text.rstrip("\n")
    lines = [clip_chars(text, OUTPUT_CHARS, omitted_bytes=result.omitted_bytes)] if text else []
    if result.restarted:
        lines.append(_RESTARTED)
    if result.timed_out:
        lines.append(f"The command was stopped after {limit_s:g} seconds; the session goes on.")
    elif not lines and result.exit_code == 0:
        lines.append(_QUIET)
    elif not lines:
        lines.append(f"Your command did not produce any output and ended with exit code {result.exit_code}.")
    return Observation(
        text="\n".join(lines), facts=command_facts(result, len(result.output) - clipped_bytes(text, OUTPUT_CHARS))
    )


async def _mini(given: _Bash, sandbox: Sandbox, limit_s: float) -> Observation:
    if (problem := unusable(given.command)) is not None:
        return refusal(f"The command was not run: {problem}.", "unusable")
    # A subshell changes nothing in the session, and takes a longer command than a new program could be given.
    result = await sandbox.bash(f"( builtin eval {shlex.quote(given.command)} )", limit_s=limit_s)
    text = result.text
    first, _, rest = text.lstrip().partition("\n")
    if first.strip() == SUBMIT_MARK and result.exit_code == 0 and not result.timed_out:
        data = {"submitted": True, "submission_omitted_bytes": result.omitted_bytes}
        return Observation(text=rest, finished=True, data=data, facts=command_facts(result, len(result.output)))
    code = -1 if result.timed_out else result.exit_code
    notes = [f"<returncode>{code}</returncode>"]
    if result.timed_out:
        notes.insert(0, f"The command was stopped after {limit_s:g} seconds.")
    if result.restarted:
        notes.insert(0, _RESTARTED)
    facts = command_facts(result, len(result.output) - clipped_bytes(text, MINI_CHARS))
    return Observation(text="\n".join([*notes, _mini_output(text, result.omitted_bytes)]), facts=facts)


def _mini_output(text: str, omitted_bytes: int) -> str:
    if len(text) <= MINI_CHARS:
        return f"<output>\n{text}</output>" if text.endswith("\n") or not text else f"<output>\n{text}\n</output>"
    half = MINI_CHARS // 2
    return "\n".join(
        [
            f"<output_head>\n{text[:half]}\n</output_head>",
            f"<elided_chars>\n{len(text) - 2 * half} characters{also_omitted(omitted_bytes)} elided\n</elided_chars>",
            f"<output_tail>\n{text[-half:]}\n</output_tail>",
        ]
    )
