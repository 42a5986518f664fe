"""What the tests of tools share: a sandbox in name, and results to give."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from prorld.agents import Observation, Tool
from prorld.sandbox.contract import CommandResult, Sandbox
from prorld.testing.fake_sandbox import Answer, FakeRuntime, FakeSandbox, SessionName
from prorld.testing.sandbox_contract import open_sandbox


@asynccontextmanager
async def pretended(answer: Callable[[SessionName, str], Answer] | None = None) -> AsyncIterator[FakeSandbox]:
    """A sandbox that answers what it is told and keeps files."""
    runtime = FakeRuntime(boot_s=0, close_s=0) if answer is None else FakeRuntime(answer, boot_s=0, close_s=0)
    async with open_sandbox(runtime) as sandbox:
        assert isinstance(sandbox, FakeSandbox)
        yield sandbox


def result(output: str | bytes = b"", exit_code: int = 0, **more: Any) -> CommandResult:
    """What a command did."""
    raw = output.encode() if isinstance(output, str) else output
    return CommandResult(exit_code=exit_code, output=raw, **more)


# How a command begins that a tool runs for itself.
ASIDE = ("'/bin/bash' --norc", "builtin printf")


def always(given: CommandResult) -> Callable[[SessionName, str], Answer]:
    """The same answer to everything but a helper's script, which nobody runs."""
    return lambda session, code: result(exit_code=127) if code.startswith(ASIDE) else given


async def use(tool: Tool, sandbox: Sandbox | None, limit_s: float = 30, **arguments: Any) -> Observation:
    """A call with these arguments."""
    return await tool.call(arguments, sandbox, limit_s=limit_s)


def named(tools: tuple[Tool, ...], name: str) -> Tool:
    """The one of that name."""
    (found,) = [tool for tool in tools if tool.schema.name == name]
    return found
