"""The handler ``code``: a problem, tools in a sandbox, and hidden tests in another one that the policy never sees."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from prorld.domain.job import AgentLimits
from prorld.domain.messages import Message
from prorld.handlers import (
    USED_UP,
    AgentHandler,
    Grade,
    HandlerError,
    Impossible,
    JobContext,
    Play,
    RunResult,
    SandboxError,
    SandboxLimits,
    SandboxSpec,
)
from prorld_code.answer import SOURCE_BYTES, code_block, odd_words
from prorld_code.bundle import make_bundle
from prorld_code.instance import CodeInstance
from prorld_code.judge import STACK_BYTES, Assignment, Judge, Outcome, Trouble
from prorld_code.plays import plays_of
from prorld_code.problem import Bounds, Problem, Test, chosen
from prorld_code.prompting import opening, shown_files

__all__ = ["CodeConfig", "CodeHandler"]

GIB = 1 << 30
# What the problem's own limit is raised to: limits are made for languages that take less than an interpreter does.
MEMORY_MIN = 256 << 20
CPU_S_MIN = 1.0
# Beside a solution: the runner, the session, and what they write.
ROOM_BYTES = GIB


class CodeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is graded how; ``README.md`` has a line for each."""

    reward: Literal["all", "fraction"] = "all"
    answer: Literal["block", "file", "either"] = "either"
    max_tests: Annotated[int, Meta(ge=1, le=10_000)] = 64
    which_tests: Literal["largest", "evenly"] = "largest"
    test_bytes: Annotated[int, Meta(ge=1 << 10, le=8 << 20)] = 4 << 20
    tests_bytes: Annotated[int, Meta(ge=1 << 10, le=256 << 20)] = 32 << 20
    test_s: Annotated[float, Meta(gt=0, le=600)] = 6.0
    time_factor: Annotated[float, Meta(ge=1, le=100)] = 2.0
    test_s_max: Annotated[float, Meta(gt=0, le=600)] = 20.0
    total_s: Annotated[float, Meta(gt=0, le=3600)] = 240.0
    timeouts_max: Annotated[int, Meta(ge=1)] = 3
    memory_bytes: Annotated[int, Meta(ge=MEMORY_MIN, le=16 * GIB)] = GIB
    memory_bytes_max: Annotated[int, Meta(ge=MEMORY_MIN, le=64 * GIB)] = 2 * GIB
    tolerance: Annotated[float, Meta(ge=0, le=0.1)] = 1e-6
    python: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_./+-]{1,200}$")] = "python3"
    image: str | None = None
    grading_image: str | None = None


class CodeHandler(AgentHandler[CodeInstance]):
    """Programming problems."""

    name = "code"
    instance_type = CodeInstance
    config_type: ClassVar[type[msgspec.Struct]] = CodeConfig
    data_sources: ClassVar[tuple[str, ...]] = (
        "deepcoder",
        "codecontests",
        "apps",
        "codeforces",
        "taco",
        "livecodebench",
        "humaneval",
    )
    default_tools: ClassVar[tuple[str, ...]] = ("bash", "python")
    carried_files: ClassVar[tuple[str, ...]] = ("solution.py",)
    carry_bytes_max: ClassVar[int] = SOURCE_BYTES

    def __init__(self, config: msgspec.Struct | None = None) -> None:
        super().__init__(config)
        assert isinstance(self.config, CodeConfig)
        self._settings = self.config
        self._judge: Judge | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Read the runner once."""
        self._judge = Judge(make_bundle())
        yield

    def accept(self, instance: CodeInstance, limits: AgentLimits) -> None:
        """Refuse a row whose tests can't be read, or are all too large."""
        super().accept(instance, limits)
        problem = _decoded(instance)
        if problem.kind != "check" and not self._tests(problem):
            raise Impossible("no test is small enough to be used", details={"path": "instance"})

    def prompt(self, instance: CodeInstance) -> Sequence[Message]:
        """The rules and the problem."""
        return opening(instance, _outlined(instance), self._settings.answer)

    def plays(self, instance: CodeInstance) -> Sequence[Play]:
        """Right where the row brings a solution, wrong, and what was tried to get around the tests."""
        as_file = self._settings.answer == "file"
        return [*super().plays(instance), *plays_of(instance, _outlined(instance), as_file=as_file)]

    def grading_sandbox(self, instance: CodeInstance) -> SandboxSpec | None:
        """One that is large enough for a solution at its limit; in whole GiB, so that more jobs want the same."""
        needed = self._memory(_outlined(instance)) + STACK_BYTES + ROOM_BYTES
        limits = SandboxLimits(memory_bytes=-(-needed // GIB) * GIB, processes=64)
        return SandboxSpec(image=self._settings.grading_image, limits=limits)

    async def init(self, job: JobContext[CodeInstance]) -> None:
        """A sandbox with the public examples, where one of the tools needs it."""
        if not self._has_sandbox(job):
            return
        sandbox = await job.open_sandbox(SandboxSpec(image=self._settings.image))
        for path, data in shown_files(_outlined(job.instance)).items():
            await sandbox.write_file(path, data)

    async def carry(self, job: JobContext[CodeInstance]) -> Mapping[str, bytes]:
        """The file with the solution, where one may be left."""
        if self._settings.answer == "block" or not self._has_sandbox(job):
            return {}
        return await super().carry(job)

    async def evaluate(self, job: JobContext[CodeInstance], result: RunResult) -> Grade:
        """Run the tests."""
        if self._judge is None:
            raise HandlerError("the handler code is not open")
        problem = _decoded(job.instance)
        tests = self._tests(problem)
        source, where = self._solution(job, result)
        stop = (job.instance.reward or self._settings.reward) == "all"
        outcome = Outcome(tests=1 if problem.kind == "check" else len(tests))
        if source is None:
            job.progress("graded", why=where, passed=0, tests=outcome.tests)
            return _grade(outcome, compiled=False, stop=stop)
        work = self._assignment(problem, tests, source, stop=stop)
        try:
            outcome = await self._judge.judge(job.sandbox, work)
        except SandboxError as exc:
            if exc.stable_code not in USED_UP:
                raise
            outcome.first = Trouble(test=0, kind=exc.stable_code)
        self._tell(job, outcome, source, where)
        return _grade(outcome, compiled=outcome.syntax is None, stop=stop)

    def _has_sandbox(self, job: JobContext[CodeInstance]) -> bool:
        return any(tool.needs_sandbox for tool in self.tools(job))

    def _tests(self, problem: Problem) -> list[Test]:
        return chosen(
            problem.tests,
            Bounds(
                tests=self._settings.max_tests,
                test_bytes=self._settings.test_bytes,
                all_bytes=self._settings.tests_bytes,
                which=self._settings.which_tests,
            ),
        )

    def _memory(self, problem: Problem) -> int:
        own = problem.memory_bytes
        wanted = self._settings.memory_bytes if own is None else max(own, MEMORY_MIN)
        return min(wanted, self._settings.memory_bytes_max)

    def _assignment(self, problem: Problem, tests: list[Test], source: str, *, stop: bool) -> Assignment:
        own = problem.cpu_s
        cpu_s = self._settings.test_s if own is None else max(own * self._settings.time_factor, CPU_S_MIN)
        cpu_s = min(cpu_s, self._settings.test_s_max)
        return Assignment(
            problem=problem,
            tests=tests,
            code=source,
            python=self._settings.python,
            stop=stop,
            cpu_s=cpu_s,
            wall_s=2 * cpu_s + 1,
            total_s=self._settings.total_s,
            memory_bytes=self._memory(problem),
            timeouts_max=self._settings.timeouts_max,
            tolerance=self._settings.tolerance,
        )

    def _solution(self, job: JobContext[CodeInstance], result: RunResult) -> tuple[str | None, str]:
        """The text that is judged and where it was found, or why there is none."""
        source = None if self._settings.answer == "file" else code_block(result.answer or "")
        where = "answer"
        if source is None and (data := job.carried.get(self.carried_files[0])) is not None:
            source, where = data.decode("utf-8", "replace"), "file"
        if source is None or not source.strip():
            return None, "no solution"
        # What JSON, or a source file, can't hold.
        source = source.encode("utf-8", "replace").decode("utf-8").replace("\0", "\N{REPLACEMENT CHARACTER}")
        if len(source) > SOURCE_BYTES:
            return None, "the solution is too long"
        return source, where

    def _tell(self, job: JobContext[CodeInstance], outcome: Outcome, source: str, where: str) -> None:
        facts: dict[str, object] = {"passed": outcome.passed, "tests": outcome.tests, "run": outcome.run}
        if outcome.syntax is not None:
            facts["why"] = f"it does not compile: {outcome.syntax[:200]}"
        elif outcome.first is not None:
            facts |= {"why": outcome.first.kind, "test": outcome.first.test, "note": outcome.first.note}
        job.progress("graded", solution=where, **facts)
        if outcome.run:
            job.measure("code.run_ms", 1000 * outcome.wall_s / outcome.run)
        if odd := odd_words(source):
            job.progress("odd words in the solution", words=odd)
            job.measure("suspicious.code", len(odd))


def _decoded(instance: CodeInstance) -> Problem:
    return _outlined(instance, whole=True)


def _outlined(instance: CodeInstance, *, whole: bool = False) -> Problem:
    try:
        return instance.decoded(whole=whole)
    except ValueError as exc:
        raise Impossible(f"the tests can't be read: {exc}", details={"path": "instance"}) from None


def _grade(outcome: Outcome, *, compiled: bool, stop: bool) -> Grade:
    reward = float(outcome.passed == outcome.tests) if stop else outcome.passed / outcome.tests
    return Grade(
        reward=reward,
        parts={
            "passed": float(outcome.passed),
            "tests": float(outcome.tests),
            "compiled": float(compiled),
            "timeouts": float(outcome.timeouts),
        },
    )
