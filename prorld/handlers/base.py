"""The handler: one kind of task. A plugin subclasses ``AgentHandler`` and names it under ``prorld.handlers``.

The life of a handler: constructed with its decoded config (no side effects) -> ``open`` entered once by the daemon ->
per job ``init``, ``run``, ``evaluate`` -> ``open`` left. One handler object serves all jobs at once, so what belongs to
a job goes into the ``JobContext``.

The least a task needs is ``prompt`` and ``evaluate``; ``run`` is then the multi-turn, tool-using loop.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import msgspec
import trio

from prorld.agents.dialect import Dialect
from prorld.agents.loop import TOOL_LIMIT_S, ToolUse, run_agent
from prorld.agents.observation import ToolFacts
from prorld.agents.presets import DEFAULT_PRESET, PRESETS, known_tools, preset, standard_tools
from prorld.agents.tools import Tool
from prorld.domain.job import AgentLimits, Sampling
from prorld.domain.messages import Message
from prorld.domain.outcome import Stage, StopReason
from prorld.errors import HandlerError, Impossible
from prorld.handlers.play import Play, common_plays
from prorld.handlers.signs import Watch
from prorld.inference.contract import Model, Turn
from prorld.sandbox.contract import Sandbox, SandboxSpec

__all__ = ["API_VERSION", "AgentHandler", "Grade", "JobContext", "Model", "NoConfig", "RunResult", "Turn"]

API_VERSION = 1
CARRY_BYTES = 16 << 20

InstanceT = TypeVar("InstanceT", bound=msgspec.Struct)
InstanceT_co = TypeVar("InstanceT_co", bound=msgspec.Struct, covariant=True)


class NoConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The config of a handler that has nothing to configure."""


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """How the episode ended, and what the handler's own ``evaluate`` wants to know of it."""

    stop: StopReason
    answer: str | None = None
    data: dict[str, Any] = {}


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    """What a grader that ran to its end says. ``step_rewards`` are (turn, reward) pairs."""

    reward: float
    parts: dict[str, float] = {}
    step_rewards: list[tuple[int, float]] = []

    def __post_init__(self) -> None:
        numbers = [self.reward, *self.parts.values(), *(reward for _, reward in self.step_rewards)]
        if not all(math.isfinite(number) for number in numbers):
            raise ValueError("a reward has to be a finite number")
        if len({turn for turn, _ in self.step_rewards}) != len(self.step_rewards):
            raise ValueError("two step rewards are for the same turn")


class JobContext(Protocol[InstanceT_co]):
    """One attempt at one job, as its handler sees it."""

    @property
    def job_id(self) -> str:
        """The job."""
        ...

    @property
    def attempt(self) -> int:
        """1 for the first try."""
        ...

    @property
    def instance(self) -> InstanceT_co:
        """The instance, decoded into the handler's type."""
        ...

    @property
    def sampling(self) -> Sampling:
        """How the policy samples."""
        ...

    @property
    def limits(self) -> AgentLimits:
        """What the policy may use up."""
        ...

    @property
    def metadata(self) -> dict[str, Any]:
        """What the client attached."""
        ...

    @property
    def model(self) -> Model:
        """The policy. Usable in RUN; a handler that talks to it in EVAL gets a ``HandlerError``."""
        ...

    @property
    def transcript(self) -> Sequence[Message]:
        """The conversation so far, in order."""
        ...

    @property
    def nursery(self) -> trio.Nursery:
        """The nursery of the stage that runs: children end with the stage, in time or cancelled."""
        ...

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox that ``open_sandbox`` made; ``HandlerError`` where there is none.

        In EVAL, where the handler gives a ``grading_sandbox``: that one.
        """
        ...

    @property
    def carried(self) -> Mapping[str, bytes]:
        """What ``carry`` has saved of the rollout's sandbox, by path; empty before EVAL."""
        ...

    async def open_sandbox(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox that lives until ``close_sandbox`` or the end of the attempt. One at a time."""
        ...

    async def close_sandbox(self) -> None:
        """End the sandbox now; every process in it is gone when this returns. Nothing happens where there is none."""
        ...

    def tool_used(self, name: str, seconds: float, facts: ToolFacts | None = None) -> None:
        """Count a tool call and its time; what became of it goes into the job's events."""
        ...

    def progress(self, what: str, **facts: Any) -> None:
        """Put a line into the job's events, for people who watch."""
        ...

    def measure(self, name: str, value: float) -> None:
        """Put a figure into the record's ``metrics``; it is no part of the reward, and there without a grade, too."""
        ...

    async def ask(
        self, policy: str, messages: Sequence[Message], *, max_tokens: int = 512, limit_s: float = 60.0
    ) -> str:
        """What another policy's engine answers, greedily; for graders that need a judge. Usable in EVAL.

        It is no part of the trajectory. Raises ``GraderError`` where that policy can't be asked or does not answer.
        """
        ...


class AgentHandler(ABC, Generic[InstanceT]):
    """One kind of task."""

    api_version: ClassVar[int] = API_VERSION
    name: ClassVar[str]
    instance_type: type[InstanceT]
    config_type: ClassVar[type[msgspec.Struct]] = NoConfig
    # Where an instance's ``data_source`` selects the handler; a name that ends in ``*`` stands for all that begin so.
    data_sources: ClassVar[tuple[str, ...]] = ()
    # Whose tools and texts the policy gets (docs/tools.md), and whether it calls them as its chat template writes calls
    # or in text of its own.
    preset: ClassVar[str] = DEFAULT_PRESET
    calls: ClassVar[Literal["native", "text"]] = "native"
    # The tools a job may name, and those it gets where it names none. A class that sets a preset has those of the
    # preset where it does not say otherwise.
    allowed_tools: ClassVar[frozenset[str]] = known_tools()
    default_tools: ClassVar[tuple[str, ...]] = ()
    # The longest that one call of a tool may take; a handler with a setting for it assigns it when it is made.
    tool_limit_s: float = TOOL_LIMIT_S
    # Whether ``evaluate`` looks into the rollout's own sandbox; where not, it is gone before the job waits for EVAL.
    grades_in_sandbox: ClassVar[bool] = False
    # The files of the rollout's sandbox, by path, that its grading sandbox starts with, and their bytes all together.
    carried_files: ClassVar[tuple[str, ...]] = ()
    carry_bytes_max: ClassVar[int] = CARRY_BYTES
    # Paths that only a grader has business with; a policy that names one is told of as ``suspicious.grader``.
    guarded_paths: ClassVar[tuple[str, ...]] = ()
    # A grade that took less than this is told of as ``suspicious.short_eval``.
    eval_s_min: ClassVar[float] = 0.0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        # ``check`` says so where there is no such preset; a class body is no place to fail in.
        if own.get("preset") in PRESETS:
            if "allowed_tools" not in own:
                cls.allowed_tools = known_tools(cls.preset)
            if "default_tools" not in own:
                cls.default_tools = preset(cls.preset).defaults

    def __init__(self, config: msgspec.Struct | None = None) -> None:
        self.config = config if config is not None else self.config_type()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Shared state of all jobs of this handler, entered once."""
        yield

    def accept(self, instance: InstanceT, limits: AgentLimits) -> None:
        """Called at submit: raise ``Impossible`` for what can never be done. Nothing may be started here."""
        refused = sorted(set(limits.tools or ()) - self.allowed_tools)
        if refused:
            there = ", ".join(sorted(self.allowed_tools)) or "none that can be chosen"
            message = f"{self.name} has no tool {', '.join(refused)}; it has {there}"
            raise Impossible(message, details={"path": "agent.tools"})

    def sandbox_spec(self, instance: InstanceT) -> SandboxSpec | None:
        """The sandbox that this instance needs; ``None`` for none."""
        return None

    def grading_sandbox(self, instance: InstanceT) -> SandboxSpec | None:
        """The fresh sandbox that ``evaluate`` finds in ``job.sandbox``, with what ``carry`` gave; ``None`` for none.

        The rollout's own is gone then, also where ``grades_in_sandbox``.
        """
        return None

    def tools(self, job: JobContext[InstanceT]) -> Sequence[Tool]:
        """The tools the policy is offered: those the job asks for by name, else ``default_tools``."""
        return standard_tools(self.default_tools if job.limits.tools is None else job.limits.tools, self.preset)

    def dialect(self, job: JobContext[InstanceT]) -> Dialect | None:
        """The task's own action language; ``None`` for the tool calls of the model's chat template.

        By default that of the preset where ``calls`` is ``text``; the prompt then has to ``explain`` the tools.
        """
        return preset(self.preset).text_dialect() if self.calls == "text" else None

    def used(self, job: JobContext[InstanceT], use: ToolUse) -> None:
        """Told of every call of a tool and of what became of it; by default the job counts it. Must not block."""
        job.tool_used(use.tool, use.seconds, use.facts)

    def plays(self, instance: InstanceT) -> Sequence[Play]:
        """Policies whose reward on this instance is known: for preflight and for tests.

        Add ``gold``, ``wrong`` and each ``cheat:...`` that the task has to withstand to what is here by default.
        """
        return common_plays()

    @abstractmethod
    def prompt(self, instance: InstanceT) -> Sequence[Message]:
        """The messages that open the conversation."""

    async def opening(self, job: JobContext[InstanceT]) -> Sequence[Message]:
        """What ``run`` opens with; by default the prompt. Override it where that depends on more than the instance."""
        return self.prompt(job.instance)

    async def init(self, job: JobContext[InstanceT]) -> None:
        """INIT: make what the rollout needs; by default the sandbox."""
        spec = self.sandbox_spec(job.instance)
        if spec is not None:
            await job.open_sandbox(spec)

    async def run(self, job: JobContext[InstanceT]) -> RunResult:
        """RUN: drive the policy; by default the tool-using loop of ``prorld.agents``."""
        tools = self.tools(job)
        sandbox = job.sandbox if any(tool.needs_sandbox for tool in tools) else None
        watch = Watch(self.guarded_paths)

        def used(use: ToolUse) -> None:
            watch.saw(use.arguments, use.said)
            self.used(job, use)

        try:
            end = await run_agent(
                job.model,
                await self.opening(job),
                tools=tools,
                sandbox=sandbox,
                max_turns=job.limits.max_turns,
                dialect=self.dialect(job),
                tool_limit_s=self.tool_limit_s,
                on_use=used,
            )
        finally:
            for name, calls in watch.metrics().items():
                job.measure(name, calls)
        return RunResult(stop=end.stop, answer=end.answer, data=end.data)

    async def carry(self, job: JobContext[InstanceT]) -> Mapping[str, bytes]:
        """RUN has ended and its sandbox lives: what EVAL may have of it, by path; by default ``carried_files``.

        Called where there is a ``grading_sandbox``. What is not there as a file that can be read, or is too large, is
        left out whole and never cut: a policy may leave anything at all, and must not get out of its grade by that.
        """
        files: dict[str, bytes] = {}
        left = self.carry_bytes_max
        for path in self.carried_files:
            try:
                files[path] = await _read_patiently(job.sandbox, path, left)
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError, ValueError) as exc:
                job.progress("not carried over", path=path, why=str(exc))
                continue
            except OSError as exc:
                raise HandlerError(f"{path} can't be carried over: {exc}", code="carry_refused") from exc
            left -= len(files[path])
        return files

    @abstractmethod
    async def evaluate(self, job: JobContext[InstanceT], result: RunResult) -> Grade:
        """EVAL: grade. Anything raised here is a grader error and the reward stays ``null``."""

    async def recover(self, job: JobContext[InstanceT], stage: Stage, error: Exception) -> RunResult | Grade | None:
        """A stage raised: return what it should have returned (``None`` for INIT) to go on, or raise to give up."""
        raise error

    def check(self) -> None:
        """Called once by the registry: a subclass that forgot something is refused with a readable line."""
        for attribute in ("name", "instance_type"):
            if not hasattr(type(self), attribute):
                raise HandlerError(f"{type(self).__qualname__} does not set {attribute}")
        preset(self.preset)
        for attribute in ("carried_files", "guarded_paths"):
            if isinstance(getattr(self, attribute), str):  # one pair of parentheses is no tuple
                raise HandlerError(f"{type(self).__qualname__}: {attribute} is text, and not a tuple of paths")
        if self.api_version != API_VERSION:
            raise HandlerError(
                f"{type(self).__qualname__} is written for handler API {self.api_version}, this is {API_VERSION}"
            )


async def _read_patiently(sandbox: Sandbox, path: str, max_bytes: int) -> bytes:
    """A file's content, also where a process of the rollout holds a lease on it.

    The kernel takes such a lease away, but only after longer than one read waits.
    """
    try:
        return await sandbox.read_file(path, max_bytes=max_bytes)
    except TimeoutError:
        return await sandbox.read_file(path, max_bytes=max_bytes)
