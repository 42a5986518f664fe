"""All plays of all example tasks, in real sandboxes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import pytest

from prorld.handlers import Play
from prorld.sandbox.runtime import Runtime
from prorld.testing.jobs import HandlerRun, run_handler
from prorld_terminal.handler import TerminalHandler, examples_dir
from prorld_terminal.instance import TerminalConfig, TerminalInstance

EXAMPLES = sorted(path.name for path in examples_dir().iterdir() if path.is_dir())
Verify = Literal["as-task", "shared", "fresh"]


async def played(runtime: Runtime, handler: TerminalHandler, name: str, play: Play) -> HandlerRun:
    return await run_handler(handler, {"task_dir": name}, turns=play, runtime=runtime)


async def judged(runtime: Runtime, name: str, verify: Verify, wanted: Collection[str]) -> None:
    """Play those that are wanted, or all, and hold each to its worth."""
    handler = TerminalHandler(TerminalConfig(verify=verify))
    plays = handler.plays(TerminalInstance(task_dir=name))
    assert {"gold", "empty", "wrong", "malformed"} <= {play.name for play in plays}
    plays = [play for play in plays if not wanted or play.name in wanted]
    found = {}
    for play in plays:
        run = await played(runtime, handler, name, play)
        found[play.name] = run.grade.reward
    assert found == {play.name: play.reward for play in plays}
    assert runtime.list() == ()


@pytest.mark.slow
@pytest.mark.parametrize("verify", ["as-task", "fresh"])
@pytest.mark.parametrize("name", EXAMPLES)
async def test_a_solution_is_worth_1_and_anything_else_nothing(name: str, verify: Verify, runtime: Runtime) -> None:
    """Every example task, in sandboxes without an image."""
    await judged(runtime, name, verify, {"gold", "empty", "wrong"})


@pytest.mark.slow
@pytest.mark.parametrize("verify", ["shared", "fresh"])
@pytest.mark.parametrize("name", ["rotate-backups", "shared-notes"])
async def test_every_cheat_is_worth_nothing(name: str, verify: Verify, runtime: Runtime) -> None:
    """In the agent's own sandbox, too; one task of each format."""
    await judged(runtime, name, verify, ())
