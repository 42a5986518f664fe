"""One handler run by itself: a scripted policy, a job context in memory, and the three stages in order.

For authors of handlers. There is no daemon, no engine and no clock in it; what a stage raises comes out in an exception
group, that of the stage's nursery.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
import trio

from prorld.agents.observation import ToolFacts
from prorld.domain.branch import Rewrite
from prorld.domain.job import AgentLimits, Sampling
from prorld.domain.messages import Message, ToolSchema
from prorld.domain.outcome import StopReason
from prorld.errors import GraderError, HandlerError, SandboxError, leaves
from prorld.handlers.base import AgentHandler, Grade, RunResult
from prorld.handlers.grading import evaluate, open_grading_sandbox, take_along
from prorld.handlers.measures import put_measure
from prorld.handlers.play import Play
from prorld.handlers.registry import accept
from prorld.inference.contract import Turn
from prorld.sandbox.contract import USED_UP, Sandbox, SandboxRuntime, SandboxSpec
from prorld.testing.plays import turns_of

__all__ = ["FakeJob", "HandlerRun", "ScriptedModel", "ready_to_grade", "run_handler"]

InstanceT = TypeVar("InstanceT", bound=msgspec.Struct)


class ScriptedModel:
    """A ``Model`` that says what it was told to, one turn after the other; text stands for a turn without calls.

    When the script is over the context counts as full. What it was given is kept: ``transcript``, ``tools``. What it
    is asked as a sub-agent it answers from the same script; those conversations are in ``sub_agents``.
    """

    def __init__(self, turns: Sequence[Turn | str], *, script: deque[Turn] | None = None) -> None:
        """``script`` is that of another one, to be shared; ``turns`` are then added to it."""
        self._script = deque[Turn]() if script is None else script
        self._script.extend(Turn(content=turn, sampled=len(turn)) if isinstance(turn, str) else turn for turn in turns)
        self._begun = False
        self.sub_agents: list[ScriptedModel] = []
        self.transcript: list[Message] = []
        self.tools: tuple[ToolSchema, ...] = ()

    @property
    def turns_left(self) -> int:
        """How much of the script was not asked for."""
        return len(self._script)

    async def start(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> None:
        """Open the conversation; once."""
        await trio.lowlevel.checkpoint()
        if self._begun:
            raise HandlerError("the conversation was already started")
        self._begun = True
        self.transcript += messages
        self.tools = tuple(tools)

    async def turn(self, *, max_tokens: int | None = None) -> Turn:
        """The next turn of the script."""
        await trio.lowlevel.checkpoint()
        if not self._begun:
            raise HandlerError("the conversation was not started")
        if self.turns_left == 0:
            return Turn(content="", stop=StopReason.CONTEXT_FULL)
        turn = self._script.popleft()
        self.transcript.append(
            Message(role="assistant", content=turn.content, reasoning=turn.reasoning, tool_calls=list(turn.tool_calls))
        )
        return turn

    async def observe(self, messages: Sequence[Message]) -> None:
        """What the environment answered."""
        await trio.lowlevel.checkpoint()
        if not messages:
            raise HandlerError("an observation has at least one message")
        self.transcript += messages

    async def rewrite(self, messages: Sequence[Message], *, reason: Rewrite = "compaction") -> None:
        """Another history."""
        await trio.lowlevel.checkpoint()
        if not self._begun:
            raise HandlerError("the conversation was not started")
        if not messages or messages[-1].role == "assistant":
            raise HandlerError("a history ends with a message that the policy answers")
        self.transcript[:] = messages

    @asynccontextmanager
    async def sub_agent(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
    ) -> AsyncIterator[ScriptedModel]:
        """A conversation aside."""
        if not self._begun:
            raise HandlerError("the conversation was not started")
        child = ScriptedModel((), script=self._script)
        self.sub_agents.append(child)
        await child.start(messages, tools)
        yield child


class FakeJob:
    """A ``JobContext`` in memory. Its sandbox is one of ``runtime``, in a task of ``nursery``."""

    job_id = "job"
    attempt = 1

    def __init__(
        self,
        instance: Any,
        model: ScriptedModel,
        nursery: trio.Nursery,
        *,
        limits: AgentLimits | None = None,
        runtime: SandboxRuntime | None = None,
    ) -> None:
        self.instance = instance
        self.model = model
        self.nursery = nursery
        self.limits = limits or AgentLimits()
        self.sampling = Sampling()
        self.metadata: dict[str, Any] = {}
        self.tool_seconds: list[tuple[str, float]] = []
        self.tool_facts: list[ToolFacts | None] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.metrics: dict[str, float] = {}
        self.judge: Callable[[str, Sequence[Message]], str] | None = None
        self.carried: Mapping[str, bytes] = {}
        self.grades = False
        self._used_up: SandboxError | None = None
        self._runtime = runtime
        self._open: _OpenSandbox | None = None

    @property
    def transcript(self) -> Sequence[Message]:
        """What was said so far."""
        return self.model.transcript

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox, where one is open."""
        if self._used_up is not None:
            raise self._used_up
        if self._open is None:
            raise HandlerError("the job has no sandbox")
        return self._open.sandbox

    async def open_sandbox(self, spec: SandboxSpec) -> Sandbox:
        """Start one."""
        if self._open is not None:
            raise HandlerError("the job already has a sandbox")
        if self._runtime is None:
            raise HandlerError("run_handler was not given a runtime")
        opened: _OpenSandbox = await self.nursery.start(
            _keep_sandbox, self._runtime, spec, self._judges, name="sandbox"
        )
        self._open = opened
        return opened.sandbox

    def _judges(self, failure: SandboxError) -> bool:
        """Whether it is the grader's to judge that the sandbox is gone, as in the daemon; it is told then."""
        if not self.grades or self._open is None or failure.stable_code not in USED_UP:
            return False
        self._used_up = failure
        return True

    async def close_sandbox(self) -> None:
        """End it, and return when it is gone."""
        await trio.lowlevel.checkpoint()
        if self._open is not None:
            ending, self._open = self._open, None
            ending.scope.cancel()
            await ending.gone.wait()

    def tool_used(self, name: str, seconds: float, facts: ToolFacts | None = None) -> None:
        """Keep the name and the time, and what became of the call."""
        self.tool_seconds.append((name, seconds))
        self.tool_facts.append(facts)

    def progress(self, what: str, **facts: Any) -> None:
        """Keep the line."""
        self.events.append((what, facts))

    def measure(self, name: str, value: float) -> None:
        """Keep the figure, where it can be one."""
        put_measure(self.metrics, name, value)

    async def ask(
        self, policy: str, messages: Sequence[Message], *, max_tokens: int = 512, limit_s: float = 60.0
    ) -> str:
        """What ``judge`` says, where there is one; in EVAL, as in the daemon."""
        await trio.lowlevel.checkpoint()
        if not self.grades:
            raise HandlerError("a judge can be asked in EVAL only", code="no_judge_here")
        if self.judge is None:
            raise GraderError(f"there is no engine for the policy {policy}", code="no_judge")
        return self.judge(policy, messages)


class _OpenSandbox(NamedTuple):
    sandbox: Sandbox
    scope: trio.CancelScope
    gone: trio.Event


async def _keep_sandbox(
    runtime: SandboxRuntime,
    spec: SandboxSpec,
    judges: Callable[[SandboxError], bool],
    *,
    task_status: trio.TaskStatus[_OpenSandbox] = trio.TASK_STATUS_IGNORED,
) -> None:
    gone = trio.Event()
    try:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                sandbox: Sandbox = await nursery.start(
                    partial(runtime.run, spec, sandbox_id="sandbox-1", job_id=FakeJob.job_id)
                )
                task_status.started(_OpenSandbox(sandbox, scope, gone))
    except* SandboxError as group:
        failure = next(leaves(group))
        if not isinstance(failure, SandboxError) or not judges(failure):
            raise
    finally:
        gone.set()


async def ready_to_grade(handler: AgentHandler[Any], job: FakeJob) -> None:
    """What the daemon does between RUN and EVAL: end the rollout's sandbox, and make the fresh one with the files."""
    spec = handler.grading_sandbox(job.instance)
    if spec is not None:
        job.carried = await take_along(handler, job)
    if spec is not None or not handler.grades_in_sandbox:
        await job.close_sandbox()
    job.grades = True
    if spec is not None:
        await open_grading_sandbox(job, spec, job.carried)


class HandlerRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a handler made of a script."""

    result: RunResult
    grade: Grade
    transcript: list[Message]
    tool_calls: list[str]
    events: list[tuple[str, dict[str, Any]]]
    metrics: dict[str, float] = {}


async def run_handler(
    handler: AgentHandler[InstanceT],
    instance: Mapping[str, Any],
    *,
    turns: Sequence[Turn | str] | Play,
    runtime: SandboxRuntime | None = None,
    limits: AgentLimits | None = None,
    judge: Callable[[str, Sequence[Message]], str] | None = None,
) -> HandlerRun:
    """Run one instance through INIT, RUN and EVAL against a scripted policy. The handler has to be open.

    Calls of tools that are written in the texts of a play are calls, as they are of an engine's.
    The sandbox is closed before EVAL where the handler does not grade in it, and a fresh one made where the handler
    wants one, as in the daemon.
    """
    script = deque[Turn]()
    model = ScriptedModel(() if isinstance(turns, Play) else turns, script=script)
    async with trio.open_nursery() as nursery:
        decoded = accept(handler, instance, limits or AgentLimits())
        job = FakeJob(decoded, model, nursery, limits=limits, runtime=runtime)
        job.judge = judge
        await handler.init(job)
        if isinstance(turns, Play):
            script.extend(turns_of(turns.turns, [tool.schema.name for tool in handler.tools(job)]))
        result = await handler.run(job)
        await ready_to_grade(handler, job)
        grade = await evaluate(handler, job, result)
        await job.close_sandbox()
        nursery.cancel_scope.cancel()
    return HandlerRun(
        result=result,
        grade=grade,
        transcript=model.transcript,
        tool_calls=[name for name, _ in job.tool_seconds],
        events=job.events,
        metrics=job.metrics,
    )
