"""Tools: typed arguments with a JSON schema, and what a call of them does.

Whatever the policy writes as arguments becomes an observation it can learn from, never an exception. What the sandbox
does wrong (``SandboxError``) is not the policy's fault and passes through.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
import trio

from prorld.agents.observation import Observation, clip, refusal
from prorld.domain.messages import ToolSchema
from prorld.errors import HandlerError
from prorld.sandbox.contract import Sandbox

__all__ = ["ALIASES", "CODE_BYTES", "Tool", "async_tool", "find_tool", "make_tool", "sandbox_tool", "unusable"]

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
    # How a preset words what the policy reads; a text that ends the episode is left as it is.
    frame: Callable[[str], str] | None = None

    async def call(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, *, limit_s: float) -> Observation:
        """Decode what the policy wrote and do it; wrong arguments are an observation."""
        if self.needs_sandbox and sandbox is None:
            raise HandlerError(f"the tool {self.schema.name} needs a sandbox and the job has none")
        observation = await self._call(arguments, sandbox, limit_s)
        if self.frame is None or observation.finished:
            return observation
        return msgspec.structs.replace(observation, text=self.frame(observation.text))

    async def _call(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, limit_s: float) -> Observation:
        try:
            decoded = msgspec.convert(_lenient(arguments, self.schema), self.arguments, strict=False)
        except msgspec.ValidationError as exc:
            why = clip(str(exc), 500)
            return refusal(f"[{self.schema.name} was not called: {why}. {_usage(self.schema)}]", "bad_arguments")
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


def async_tool(
    name: str,
    description: str,
    arguments: type[ArgumentsT],
    run: Callable[[ArgumentsT, float], Awaitable[Observation]],
) -> Tool:
    """A tool that asks something outside of the sandbox, in at most the seconds it is given."""

    async def call(decoded: ArgumentsT, _sandbox: Sandbox | None, limit_s: float) -> Observation:
        return await run(decoded, limit_s)

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


# --- arguments ------------------------------------------------------------------------------------------------------


def _schema(name: str, description: str, arguments: type[msgspec.Struct]) -> ToolSchema:
    return ToolSchema(name=name, description=description, parameters=msgspec.json.decode(_parameters(arguments)))


@lru_cache(maxsize=256)
def _parameters(arguments: type[msgspec.Struct]) -> bytes:
    """Remembered: tools are made anew for each rollout, their types are not, and this takes half a millisecond.

    As text, so that what one handler changes in a schema of its own changes nobody else's.
    """
    whole = msgspec.json.schema(arguments)
    parameters = dict(whole["$defs"][whole["$ref"].rpartition("/")[2]])
    parameters.pop("title", None)
    return msgspec.json.encode(parameters)


def _lenient(arguments: Mapping[str, Any], schema: ToolSchema) -> dict[str, Any]:
    """What a policy writes for what is meant.

    Where text is wanted, anything else counts as the JSON text it was written as; where a list or an object is wanted,
    JSON in a text counts as what it holds; a null for what need not be given counts as not given.
    """
    properties: Mapping[str, Mapping[str, Any]] = schema.parameters.get("properties", {})
    required = schema.parameters.get("required", ())
    given: dict[str, Any] = {}
    for name, value in arguments.items():
        wanted = properties.get(name, {}).get("type")
        if value is None:
            if name in required:
                given[name] = None
        elif wanted == "string" and not isinstance(value, str):
            given[name] = msgspec.json.encode(value).decode()
        elif wanted in ("array", "object") and isinstance(value, str):
            given[name] = _json_within(value)
        elif wanted in ("integer", "number", "boolean") and isinstance(value, str):
            given[name] = value.strip()
        else:
            given[name] = value
    return given


def _json_within(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return text


def _usage(schema: ToolSchema) -> str:
    required = set(schema.parameters.get("required", ()))
    properties: Mapping[str, Mapping[str, Any]] = schema.parameters.get("properties", {})
    words = [
        f"{name} ({about.get('type', 'any')}{', required' if name in required else ''})"
        for name, about in properties.items()
    ]
    return f"Its arguments: {', '.join(words) or 'none'}"


def unusable(code: str) -> str | None:
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
