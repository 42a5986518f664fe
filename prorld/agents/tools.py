"""Tools: typed arguments with a JSON schema, and what a call of them does.

Whatever the policy writes as arguments becomes an observation it can learn from, never an exception. What the sandbox
does wrong (``SandboxError``) is not the policy's fault and passes through.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import trio
from msgspec import Meta

from prorld.agents.observation import Observation, clip, describe
from prorld.domain.messages import ToolSchema
from prorld.errors import HandlerError, Impossible
from prorld.sandbox.contract import Sandbox

__all__ = ["CODE_BYTES", "Tool", "find_tool", "known_tools", "make_tool", "sandbox_tool", "standard_tools"]

# The longest command or cell that is handed to a sandbox. Larger files belong into several writes.
CODE_BYTES = 256 << 10

ALIASES: Mapping[str, str] = {"ipython": "python"}

Run = Callable[[Any, Sandbox | None, float], Awaitable[Observation]]
ArgumentsT = TypeVar("ArgumentsT", bound=msgspec.Struct)


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """One tool: what the policy reads about it, the type of its arguments, and what it does with them."""

    schema: ToolSchema
    arguments: type[msgspec.Struct]
    run: Run
    needs_sandbox: bool = False

    async def call(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, *, limit_s: float) -> Observation:
        """Decode what the policy wrote and do it; wrong arguments are an observation."""
        if self.needs_sandbox and sandbox is None:
            raise HandlerError(f"the tool {self.schema.name} needs a sandbox and the job has none")
        try:
            decoded = msgspec.convert(_lenient(arguments, self.schema), self.arguments, strict=False)
        except msgspec.ValidationError as exc:
            why = clip(str(exc), 500)
            return Observation(text=f"[{self.schema.name} was not called: {why}. {_usage(self.schema)}]")
        return await self.run(decoded, sandbox, limit_s)


def make_tool(
    name: str, description: str, arguments: type[ArgumentsT], run: Callable[[ArgumentsT], Observation]
) -> Tool:
    """A tool that only computes."""

    async def call(decoded: ArgumentsT, _sandbox: Sandbox | None, _limit_s: float) -> Observation:
        # A tool that only computes is still a place where a cancelled rollout stops.
        await trio.lowlevel.checkpoint()
        return run(decoded)

    return Tool(schema=_schema(name, description, arguments), arguments=arguments, run=call)


def sandbox_tool(
    name: str,
    description: str,
    arguments: type[ArgumentsT],
    run: Callable[[ArgumentsT, Sandbox, float], Awaitable[Observation]],
) -> Tool:
    """A tool that works in the sandbox, in at most the seconds it is given."""

    async def call(decoded: ArgumentsT, sandbox: Sandbox | None, limit_s: float) -> Observation:
        if sandbox is None:
            raise HandlerError(f"the tool {name} needs a sandbox and the job has none")
        return await run(decoded, sandbox, limit_s)

    return Tool(schema=_schema(name, description, arguments), arguments=arguments, run=call, needs_sandbox=True)


def find_tool(tools: Sequence[Tool], name: str) -> Tool | None:
    """The tool of that name, or of the name it is an alias of."""
    for wanted in (name, ALIASES.get(name)):
        for tool in tools:
            if tool.schema.name == wanted:
                return tool
    return None


# --- the standard tools ---------------------------------------------------------------------------------------------


class _Bash(msgspec.Struct, frozen=True, kw_only=True):
    command: Annotated[str, Meta(description="The command, as it would be typed into bash.")]
    timeout: Annotated[float, Meta(ge=0, description="Stop it after so many seconds; 0 for the usual limit.")] = 0.0


class _Python(msgspec.Struct, frozen=True, kw_only=True):
    code: Annotated[str, Meta(description="Python code; the value of a last expression is shown.")]
    timeout: Annotated[float, Meta(ge=0, description="Stop it after so many seconds; 0 for the usual limit.")] = 0.0


class _Finish(msgspec.Struct, frozen=True, kw_only=True):
    message: Annotated[str, Meta(description="The final answer.")] = ""


class _Think(msgspec.Struct, frozen=True, kw_only=True):
    thought: Annotated[str, Meta(description="What you want to keep in mind.")] = ""


async def _run_bash(arguments: _Bash, sandbox: Sandbox, limit_s: float) -> Observation:
    if (problem := _unusable(arguments.command)) is not None:
        return Observation(text=f"[the command was not run: {problem}]")
    within = min(arguments.timeout or limit_s, limit_s)
    result = await sandbox.bash(arguments.command, limit_s=within)
    return Observation(text=describe(result, limit_s=within, session="shell"))


async def _run_python(arguments: _Python, sandbox: Sandbox, limit_s: float) -> Observation:
    if (problem := _unusable(arguments.code)) is not None:
        return Observation(text=f"[the code was not run: {problem}]")
    within = min(arguments.timeout or limit_s, limit_s)
    result = await sandbox.python(arguments.code, limit_s=within)
    return Observation(text=describe(result, limit_s=within, session="interpreter"))


def _run_finish(arguments: _Finish) -> Observation:
    return Observation(text=arguments.message, finished=True)


def _run_think(_arguments: _Think) -> Observation:
    return Observation(text="[noted]")


def _bash() -> Tool:
    words = "Run a command in a bash session. Directory, variables and background jobs stay between calls."
    return sandbox_tool("bash", words, _Bash, _run_bash)


def _python() -> Tool:
    words = "Run code in a Python session. Variables and imports stay between calls."
    return sandbox_tool("python", words, _Python, _run_python)


def _finish() -> Tool:
    return make_tool("finish", "Say that the task is done and give the final answer.", _Finish, _run_finish)


def _think() -> Tool:
    return make_tool("think", "Write down a thought. It changes nothing.", _Think, _run_think)


_STANDARD: Mapping[str, Callable[[], Tool]] = {"bash": _bash, "python": _python, "finish": _finish, "think": _think}


def known_tools() -> frozenset[str]:
    """The names that a job may ask for, aliases included."""
    return frozenset(_STANDARD) | frozenset(ALIASES)


def standard_tools(names: Sequence[str]) -> tuple[Tool, ...]:
    """The tools of these names, each once, in the order they were asked for."""
    unknown = sorted(set(names) - known_tools())
    if unknown:
        raise Impossible(
            f"no such tool: {', '.join(unknown)}; there are {', '.join(sorted(known_tools()))}",
            details={"path": "agent.tools"},
        )
    canonical = dict.fromkeys(ALIASES.get(name, name) for name in names)
    return tuple(_STANDARD[name]() for name in canonical)


# --- arguments ------------------------------------------------------------------------------------------------------


def _schema(name: str, description: str, arguments: type[msgspec.Struct]) -> ToolSchema:
    whole = msgspec.json.schema(arguments)
    parameters = dict(whole["$defs"][whole["$ref"].rpartition("/")[2]])
    parameters.pop("title", None)
    return ToolSchema(name=name, description=description, parameters=parameters)


def _lenient(arguments: Mapping[str, Any], schema: ToolSchema) -> dict[str, Any]:
    """Where text is wanted, anything else counts as the JSON text it was written as."""
    properties: Mapping[str, Mapping[str, Any]] = schema.parameters.get("properties", {})
    given = dict(arguments)
    for name, value in given.items():
        if properties.get(name, {}).get("type") == "string" and value is not None and not isinstance(value, str):
            given[name] = msgspec.json.encode(value).decode()
    return given


def _usage(schema: ToolSchema) -> str:
    required = set(schema.parameters.get("required", ()))
    properties: Mapping[str, Mapping[str, Any]] = schema.parameters.get("properties", {})
    words = [
        f"{name} ({about.get('type', 'any')}{', required' if name in required else ''})"
        for name, about in properties.items()
    ]
    return f"Its arguments: {', '.join(words) or 'none'}"


def _unusable(code: str) -> str | None:
    """Why no sandbox could take this text, if so."""
    if "\0" in code:
        return "it contains a NUL character"
    try:
        size = len(code.encode())
    except UnicodeEncodeError:
        return "it contains a lone surrogate, which is not text"
    if size > CODE_BYTES:
        return f"it is {size} bytes long and at most {CODE_BYTES} can be taken"
    return None
