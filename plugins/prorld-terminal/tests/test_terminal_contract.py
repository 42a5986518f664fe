"""The contract of handlers, and what happens when tests or folders are not as they should be, in real sandboxes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from prorld.domain.messages import ToolCall
from prorld.handlers import GraderError, HandlerError, Turn
from prorld.sandbox.runtime import Runtime
from prorld.testing.handler_contract import HANDLER_CONTRACT, HandlerCheck, HandlerUnderTest
from prorld.testing.jobs import HandlerRun, run_handler
from prorld_terminal.handler import TerminalHandler, examples_dir
from prorld_terminal.instance import TerminalConfig

Change = Callable[[Path], object]


@pytest.mark.slow
@pytest.mark.parametrize("check", HANDLER_CONTRACT, ids=lambda check: check.__name__)
async def test_the_handler_contract(check: HandlerCheck, runtime: Runtime) -> None:
    """On the task whose tests run apart."""
    handler = TerminalHandler()
    await check(HandlerUnderTest(handler=handler, instances=[{"task_dir": "sales-report"}], runtime=runtime))


def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(examples_dir() / "find-the-key", tmp_path / "task"))


async def changed(tmp_path: Path, runtime: Runtime, change: Change, **config: Any) -> HandlerRun:
    """A rollout that does nothing, on a task that was changed."""
    task = await trio.to_thread.run_sync(copied, tmp_path)
    change(task)
    handler = TerminalHandler(TerminalConfig(tasks_dir=str(tmp_path), **config))
    return await run_handler(handler, {"task_dir": "task"}, turns=["Done."], runtime=runtime)


def with_tests(script: str) -> Change:
    return lambda task: (task / "tests" / "test.sh").write_text(f"#!/bin/bash\n{script}\n")


@pytest.mark.slow
async def test_tests_that_say_nothing_are_no_zero(tmp_path: Path, runtime: Runtime) -> None:
    """No reward, an empty one, or one that is no number."""
    for number, script in enumerate(
        ("true", "exit 3", ": >/logs/verifier/reward.txt", "echo x >/logs/verifier/reward.txt")
    ):
        place = tmp_path / str(number)
        place.mkdir()
        with pytest.RaisesGroup(GraderError):
            await changed(place, runtime, with_tests(script))


@pytest.mark.slow
async def test_numbers_by_name_win(tmp_path: Path, runtime: Runtime) -> None:
    """``reward.json`` before ``reward.txt``; what is not the reward is a part."""
    script = 'cd /logs/verifier; echo 0 >reward.txt; echo \'{"reward": 0.5, "speed": 2}\' >reward.json'
    run = await changed(tmp_path, runtime, with_tests(script))
    assert (run.grade.reward, run.grade.parts) == (0.5, {"speed": 2.0})


@pytest.mark.slow
async def test_tests_that_do_not_end(tmp_path: Path, runtime: Runtime) -> None:
    """Worth nothing in the task's own time, or no grade where the operator says so."""

    def endless(task: Path) -> None:
        with_tests("trap '' TERM INT; while :; do sleep 0.1; done")(task)
        toml = task / "task.toml"
        toml.write_text(toml.read_text().replace("timeout_sec = 60.0", "timeout_sec = 1.0"))

    for timeout in ("zero", "error"):
        (tmp_path / timeout).mkdir()
    run = await changed(tmp_path / "zero", runtime, endless)
    assert (run.grade.reward, run.grade.parts) == (0.0, {"timed_out": 1.0})
    with pytest.RaisesGroup(GraderError):
        await changed(tmp_path / "error", runtime, endless, timeout="error")


@pytest.mark.slow
async def test_what_tests_leave_running_does_not_change_what_they_said(tmp_path: Path, runtime: Runtime) -> None:
    """It is ended before the reward is read."""
    late = "echo 0 >/logs/verifier/reward.txt; (trap '' HUP; sleep 0.5; echo 1 >/logs/verifier/reward.txt) & disown"
    assert (await changed(tmp_path, runtime, with_tests(late))).grade.reward == 0.0


@pytest.mark.slow
async def test_a_folder_that_has_changed_is_refused(runtime: Runtime) -> None:
    """Where the instance says what it has to hold."""
    with pytest.RaisesGroup(HandlerError):
        await run_handler(
            TerminalHandler(), {"task_dir": "find-the-key", "digest": "0" * 64}, turns=["Done."], runtime=runtime
        )


@pytest.mark.slow
async def test_the_agent_sees_neither_tests_nor_solution(runtime: Runtime) -> None:
    """What is there before grading: the environment's files, and empty directories."""
    look = ToolCall(
        id="1", name="bash", arguments={"command": "find /app /tests /logs -type f | sort; ls -d /solution"}
    )
    for name, files in (("rotate-backups", ["/app/rotate.sh"]), ("sum-orders", ["/app/orders.json"])):
        run = await run_handler(
            TerminalHandler(),
            {"task_dir": name},
            turns=[Turn(content="", tool_calls=(look,)), "Done."],
            runtime=runtime,
        )
        seen = run.transcript[3].content.splitlines()
        assert [line for line in seen if line.startswith("/")] == files
        assert "No such file" in run.transcript[3].content
