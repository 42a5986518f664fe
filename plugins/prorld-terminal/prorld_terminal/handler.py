"""The handler ``terminal``: tasks in folders, as Harbor and Terminal-Bench have them."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import ClassVar

import msgspec
import trio

from prorld.domain.job import AgentLimits
from prorld.domain.messages import Message, system, user
from prorld.domain.outcome import StopReason
from prorld.handlers import (
    AgentHandler,
    Grade,
    GraderError,
    HandlerError,
    Impossible,
    JobContext,
    Play,
    RunResult,
    SandboxSpec,
)
from prorld_terminal.carrying import bring, take
from prorld_terminal.environment import check_environment, prepare, spec_of
from prorld_terminal.folder import digest_of, tree_of
from prorld_terminal.instance import TerminalConfig, TerminalInstance
from prorld_terminal.plays import plays_of
from prorld_terminal.task import ARTIFACTS_DIR, Task, load_task
from prorld_terminal.verify import end_processes, verify

__all__ = ["TerminalHandler", "examples_dir"]

_SYSTEM = (
    "You work in a Linux shell, without a network and without anyone to ask. Do what the task says; when it is done,"
    " say so in a last message without a tool call. Hidden tests then look at the state that you have left."
)
READ_S = 120.0


def examples_dir() -> Path:
    """The tasks that come with this package."""
    return Path(str(files("prorld_terminal").joinpath("examples")))


class TerminalHandler(AgentHandler[TerminalInstance]):
    """Folders with an instruction, an environment and tests."""

    name = "terminal"
    instance_type = TerminalInstance
    config_type: ClassVar[type[msgspec.Struct]] = TerminalConfig
    data_sources: ClassVar[tuple[str, ...]] = ("terminal-bench*", "harbor*", "terminal")
    default_tools: ClassVar[tuple[str, ...]] = ("bash",)
    tool_limit_s = 180.0
    # Where a task's tests run in the agent's own sandbox there is no grading sandbox, and this one is kept.
    grades_in_sandbox: ClassVar[bool] = True

    def __init__(self, config: msgspec.Struct | None = None) -> None:
        super().__init__(config)
        assert isinstance(self.config, TerminalConfig)
        self._settings = self.config

    def accept(self, instance: TerminalInstance, limits: AgentLimits) -> None:
        """Refuse a folder that is not there, not whole, or asks for what can't be had here."""
        super().accept(instance, limits)
        try:
            check_environment(self._task(instance), self._settings)
        except HandlerError as exc:
            raise Impossible(exc.message, details={"path": "instance.task_dir"}) from exc

    def folder_of(self, instance: TerminalInstance) -> Path:
        """Where the task lies. Raises ``HandlerError`` for a place that the configuration does not open."""
        root = Path(self._settings.tasks_dir) if self._settings.tasks_dir else examples_dir()
        folder = Path(posixpath.normpath(root / instance.task_dir))
        try:
            root, folder = root.resolve(), folder.resolve(strict=True)
        except (OSError, RuntimeError, ValueError) as exc:
            raise HandlerError(f"there is no task folder {instance.task_dir!r}", code="no_task") from exc
        if not self._settings.anywhere and (folder == root or not folder.is_relative_to(root)):
            words = f"the task folder {instance.task_dir!r} is outside of tasks_dir; set tasks_dir, or anywhere = true"
            raise HandlerError(words, code="no_task")
        return folder

    def _task(self, instance: TerminalInstance) -> Task:
        return load_task(self.folder_of(instance))

    def _is_shared(self, task: Task) -> bool:
        asked = self._settings.verify
        return asked == "shared" or (asked == "as-task" and not task.separate)

    def _carried_paths(self, task: Task) -> tuple[str, ...]:
        """What tests in a fresh sandbox get of the agent's: artifacts, and its work where the task does not say so."""
        declared = (*task.artifacts, ARTIFACTS_DIR)
        if task.separate and self._settings.verify == "as-task":
            return tuple(dict.fromkeys(declared))
        return tuple(dict.fromkeys((task.workdir, *self._settings.carry, *declared)))

    def sandbox_spec(self, instance: TerminalInstance) -> SandboxSpec | None:
        """The task's environment."""
        return spec_of(self._task(instance), self._settings)

    def grading_sandbox(self, instance: TerminalInstance) -> SandboxSpec | None:
        """A fresh one, but for tests that run in the agent's own."""
        task = self._task(instance)
        return None if self._is_shared(task) else spec_of(task, self._settings, verifier=True)

    def plays(self, instance: TerminalInstance) -> Sequence[Play]:
        """The task's own solution, and what agents have done instead of solving tasks."""
        task = self._task(instance)
        return [*super().plays(instance), *plays_of(task, shared=self._is_shared(task))]

    def prompt(self, instance: TerminalInstance) -> Sequence[Message]:
        """The instruction, and where the shell starts."""
        task = self._task(instance)
        return [system(_SYSTEM), user(f"{task.instruction.strip()}\n\nYour shell starts in {task.workdir}.")]

    async def init(self, job: JobContext[TerminalInstance]) -> None:
        """Look at the whole folder, then make its environment. Tests and solution stay on this host."""
        task = self._task(job.instance)
        with trio.fail_after(READ_S):
            digest = await trio.to_thread.run_sync(_digest, Path(task.folder), abandon_on_cancel=True)
        if job.instance.digest not in {None, digest}:
            raise HandlerError(f"the folder of {task.name} has changed: its digest is {digest}", code="task_changed")
        sandbox = await job.open_sandbox(spec_of(task, self._settings))
        await prepare(sandbox, task, self._settings)

    async def run(self, job: JobContext[TerminalInstance]) -> RunResult:
        """The agent, for as long as the task gives it. Its work is verified also when that is over."""
        task = self._task(job.instance)
        limit_s = min(task.agent_s or self._settings.agent_s_max, self._settings.agent_s_max)
        result: RunResult | None = None
        with trio.move_on_after(limit_s):
            result = await super().run(job)
        if result is None:
            job.progress("the agent's time is over", limit_s=limit_s)
            job.measure("agent_timed_out", 1.0)
            result = RunResult(stop=StopReason.MAX_TURNS)
        return result

    async def carry(self, job: JobContext[TerminalInstance]) -> Mapping[str, bytes]:
        """The agent's work, read by the runtime and not by programs of the sandbox."""
        task = self._task(job.instance)
        await _look_for_rewards(job)
        return await take(job, self._carried_paths(task), self._settings.carry_bytes)

    async def evaluate(self, job: JobContext[TerminalInstance], result: RunResult) -> Grade:
        """Run the task's tests where they belong."""
        try:
            task = self._task(job.instance)
        except HandlerError as exc:
            raise GraderError(exc.message, code=exc.stable_code) from exc
        if self._is_shared(task):
            await _look_for_rewards(job)
            if not await end_processes(job.sandbox):
                job.progress("the agent's shell does not end")
                job.measure("suspicious.shell_held", 1.0)
                return Grade(reward=0.0, parts={"shell_held": 1.0})
            return await verify(job, task, self._settings, upload=True)
        own_image = task.verifier_image is not None and task.separate
        if not own_image:
            await prepare(job.sandbox, task, self._settings)
        await bring(job.sandbox, self._carried_paths(task), job.carried)
        return await verify(job, task, self._settings, upload=not own_image)

    @property
    def carry_bytes_max(self) -> int:  # type: ignore[override]
        """What ``carry`` may return: the files, and what archives add to them."""
        return self._settings.carry_bytes


def _digest(folder: Path) -> str:
    return digest_of(folder, tree_of(folder))


async def _look_for_rewards(job: JobContext[TerminalInstance]) -> None:
    """Rewards that the agent has written itself count for nothing, and are told."""
    for name in ("reward.txt", "reward.json"):
        try:
            await job.sandbox.read_file(f"/logs/verifier/{name}", max_bytes=1 << 16)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as exc:
            job.progress("something lies where rewards do", why=str(exc)[:200])
        job.measure("suspicious.reward_written", 1.0)
