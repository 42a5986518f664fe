"""The handler ``swe``: a repository with a defect, an agent's tools, and a grade by pinned tests in a fresh sandbox."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import msgspec
import trio

from prorld.agents import explain, preset
from prorld.domain.job import AgentLimits
from prorld.domain.messages import Message
from prorld.handlers import (
    AgentHandler,
    Grade,
    GraderError,
    HandlerError,
    Impossible,
    JobContext,
    Play,
    RunResult,
    Sandbox,
    SandboxLimits,
    SandboxSpec,
)
from prorld_swe.carrying import NotCarried, take_diff
from prorld_swe.config import SweConfig
from prorld_swe.diff import parse_diff
from prorld_swe.grading import Examiner, Marks
from prorld_swe.images import find_image
from prorld_swe.instance import SweInstance
from prorld_swe.judging import Verdict
from prorld_swe.paths import Sifted, changed_paths, sift
from prorld_swe.plays import swe_plays
from prorld_swe.prompts import opening
from prorld_swe.repository import PATCH, ROOT, Base, make_repository, prepare_image
from prorld_swe.sources import Tree, Trees, require_package
from prorld_swe.task import SweTask

__all__ = ["SweHandler"]

# Out of the repository, where nothing of it gets in the way of the preparation.
DIFF: str = "/tmp/.prorld-work/patch.diff"  # noqa: S108 - of the sandbox
WHY: str = "/tmp/.prorld-work/why"  # noqa: S108 - of the sandbox
_PLAIN_TOOLS = ("bash", "str_replace_editor", "think", "finish")


class SweHandler(AgentHandler[SweInstance]):
    """Repositories to be repaired."""

    name = "swe"
    instance_type = SweInstance
    config_type: ClassVar[type[msgspec.Struct]] = SweConfig
    data_sources: ClassVar[tuple[str, ...]] = (
        *("swebench", "swe-bench*", "SWE-bench*", "princeton-nlp/SWE-bench*", "SWE-bench/SWE-bench*", "swebench*"),
        *("swegym", "swe-gym*", "SWE-Gym*", "swegym*", "r2egym", "r2e-gym*", "R2E-Gym*", "r2e*", "swesmith"),
        *("swe-smith*", "SWE-smith*", "SWE-bench/SWE-smith*", "swesmith*", "mutation", "mutation*"),
    )
    preset: ClassVar[str] = "openhands"
    tool_limit_s = 120.0
    guarded_paths: ClassVar[tuple[str, ...]] = ("prorld_swe", PATCH)

    def __init__(self, config: msgspec.Struct | None = None) -> None:
        super().__init__(config)
        assert isinstance(self.config, SweConfig)
        self._settings = self.config
        chosen = preset(self._settings.preset)
        # What is a choice of the class for most handlers is one of the operator here.
        vars(self).update(
            preset=chosen.name,
            calls=self._settings.calls,
            allowed_tools=chosen.names | {f"preset:{chosen.name}"},
            default_tools=chosen.defaults or _PLAIN_TOOLS,
        )
        self._trees: Trees | None = None
        self._unpacking = trio.CapacityLimiter(1)
        self._bases: WeakKeyDictionary[JobContext[SweInstance], Base] = WeakKeyDictionary()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Keep unpacked distributions for all jobs."""
        self._trees = trees = Trees()
        try:
            yield
        finally:
            self._trees = None
            trees.close()

    def accept(self, instance: SweInstance, limits: AgentLimits) -> None:
        """Refuse what lacks its image or its distribution."""
        super().accept(instance, limits)
        task = instance.task
        if task.sdist is not None:
            require_package(task.sdist)
        elif self._image(task) is None:
            message = f"there is no image for {task.instance_id}: pull one of {', '.join(task.images) or 'its names'}"
            raise Impossible(message, code="no_image", details={"path": "instance.image"})

    def sandbox_spec(self, instance: SweInstance) -> SandboxSpec:
        """The image, where there is one, with wide limits."""
        settings = self._settings
        limits = SandboxLimits(
            memory_bytes=settings.memory_bytes, scratch_bytes=settings.scratch_bytes, processes=settings.processes
        )
        return SandboxSpec(image=self._image(instance.task), workdir=ROOT, limits=limits)

    def grading_sandbox(self, instance: SweInstance) -> SandboxSpec:
        """The same again, fresh."""
        return self.sandbox_spec(instance)

    def prompt(self, instance: SweInstance) -> Sequence[Message]:
        """The issue and the rules."""
        messages = opening(instance.task, self._settings.preset)
        if self._settings.calls == "text":
            tools = preset(self._settings.preset).tools(list(self.default_tools))
            first = msgspec.structs.replace(messages[0], content=f"{messages[0].content}\n\n{explain(tools)}")
            messages = [first, *messages[1:]]
        return messages

    def plays(self, instance: SweInstance) -> Sequence[Play]:
        """The repair, a harmless change, and the known cheats."""
        return [*super().plays(instance), *swe_plays(instance.task, self._settings.preset)]

    async def init(self, job: JobContext[SweInstance]) -> None:
        """The repository, with nothing in it that tells what the repair is."""
        sandbox = await job.open_sandbox(self.sandbox_spec(job.instance))
        base = await self._prepared(sandbox, job.instance.task)
        self._bases[job] = base
        job.progress("the repository is ready", commit=base.commit, commits=base.history.commits)

    async def _prepared(self, sandbox: Sandbox, task: SweTask) -> Base:
        settings = self._settings
        tree = await self._tree(task)
        if tree is not None:
            return await make_repository(sandbox, task, tree, hide=True, limit_s=settings.prepare_s)
        squash = settings.history == "squash"
        return await prepare_image(sandbox, task, squash=squash, hide=True, limit_s=settings.prepare_s)

    async def carry(self, job: JobContext[SweInstance]) -> Mapping[str, bytes]:
        """The policy's changes as one diff, or why there is none."""
        base = self._bases.pop(job, None)
        if base is None:
            raise HandlerError("the repository of this job was never prepared", code="no_repository")
        try:
            return {DIFF: await take_diff(job.sandbox, base, max_bytes=self._settings.patch_bytes)}
        except NotCarried as exc:
            job.progress("no patch", why=str(exc))
            return {WHY: str(exc).encode()}

    async def evaluate(self, job: JobContext[SweInstance], result: RunResult) -> Grade:
        """1 where every expected test passes, exactly once, and nobody had a hand in how that was found out."""
        task = job.instance.task
        sifted = self._sifted(job, task)
        if isinstance(sifted, str):
            return self._grade(job, Marks(applied=False, verdict=Verdict(why=sifted)))
        if sifted.tests_touched:
            job.measure("suspicious.tests_touched", sifted.tests_touched)
        for path, why in sifted.left_out[:20]:
            job.progress("left out of the patch", path=path, why=why)
        if not sifted.changes:
            left = f"; {len(sifted.left_out)} changes are not taken" if sifted.left_out else ""
            return self._grade(job, Marks(applied=False, verdict=Verdict(why=f"nothing was changed{left}")))
        examiner = Examiner(self._settings, task, job.sandbox, await self._tree(task))
        return self._grade(job, await examiner.examine(sifted))

    # -----------------------------------------------------------------------------------------------------------------

    def _image(self, task: SweTask) -> str | None:
        place = self._settings.images_dir
        found = find_image(task, Path(place) if place is not None else None)
        return found if found is not None else self._settings.image

    async def _tree(self, task: SweTask) -> Tree | None:
        if task.sdist is None:
            return None
        if self._trees is None:
            raise HandlerError("the handler swe is not open")
        return await trio.to_thread.run_sync(self._trees.get, task.sdist, limiter=self._unpacking)

    def _sifted(self, job: JobContext[SweInstance], task: SweTask) -> Sifted | str:
        diff = job.carried.get(DIFF)
        if diff is None:
            return job.carried.get(WHY, b"there is no patch").decode("utf-8", "replace")[:500]
        job.measure("patch_bytes", len(diff))
        tests = {*task.test_files, *task.hidden_files}
        return sift(parse_diff(diff), tests=tests, right=changed_paths(task.gold), roots=task.python_path)

    def _grade(self, job: JobContext[SweInstance], marks: Marks) -> Grade:
        verdict = marks.verdict
        for what, count in verdict.suspicious.items():
            job.measure(f"suspicious.{what}", count)
        for finding in marks.findings:
            job.measure(f"suspicious.code_{finding}", 1)
        if verdict.timed_out and self._settings.on_timeout == "error":
            raise GraderError(verdict.why, code="tests_timeout")
        why = "all tests are as expected" if verdict.resolved else verdict.why
        job.progress("graded", resolved=verdict.resolved, why=why, missed=list(verdict.missed[:5]))
        reward = float(verdict.resolved) if self._settings.reward == "resolved" else verdict.fraction
        parts: dict[str, Any] = {
            "applied": float(marks.applied),
            "f2p": 0.0 if verdict.cheat else verdict.f2p,
            "p2p": 0.0 if verdict.cheat else verdict.p2p,
            "resolved": float(verdict.resolved),
            "timed_out": float(verdict.timed_out),
        }
        return Grade(reward=reward, parts=parts)
