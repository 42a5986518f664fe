"""The handler ``math``: a problem, Python in the sandbox, an answer that is checked in a killable child."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from prorld.domain.messages import Message
from prorld.handlers import AgentHandler, Grade, Grader, HandlerError, JobContext, RunResult, SandboxSpec, open_grader
from prorld_math.instance import MathInstance
from prorld_math.paper import MathPaper, MathVerdict

__all__ = ["MathConfig", "MathHandler"]

# The end of a long monologue; the answer is looked for in less.
SAID_CHARS = 100_000

_SYSTEM = (
    "Solve the problem. You may use the tools you are offered to compute and to check. At the end put the final answer,"
    " and nothing but it, into \\boxed{}."
)


class MathConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of the grader, and whether a plain number must be given as one."""

    graders: Annotated[int, Meta(ge=1, le=64)] = 2
    grade_s: Annotated[float, Meta(gt=0, le=600)] = 5.0
    memory_bytes: Annotated[int, Meta(ge=256 << 20)] = 1 << 30
    simplified: bool = True


class MathHandler(AgentHandler[MathInstance]):
    """Problems with an answer."""

    name = "math"
    instance_type = MathInstance
    config_type: ClassVar[type[msgspec.Struct]] = MathConfig
    data_sources: ClassVar[tuple[str, ...]] = ("deepscaler", "math_dapo", "dapo-math*", "aime*")
    default_tools: ClassVar[tuple[str, ...]] = ("python",)

    def __init__(self, config: msgspec.Struct | None = None) -> None:
        super().__init__(config)
        assert isinstance(self.config, MathConfig)
        self._settings = self.config
        self._grader: Grader[MathVerdict] | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Keep the grader's children for all jobs."""
        async with open_grader(
            "prorld_math.grading:grade",
            MathVerdict,
            children=self._settings.graders,
            limit_s=self._settings.grade_s,
            memory_bytes=self._settings.memory_bytes,
        ) as grader:
            self._grader = grader
            yield

    def prompt(self, instance: MathInstance) -> Sequence[Message]:
        """The rules and the problem; a conversation that brings its own system message keeps it."""
        messages = [Message(role=message.role, content=message.content) for message in instance.messages]
        return messages if messages[0].role == "system" else [Message(role="system", content=_SYSTEM), *messages]

    async def init(self, job: JobContext[MathInstance]) -> None:
        """A sandbox, where one of the tools needs it."""
        if any(tool.needs_sandbox for tool in self.tools(job)):
            await job.open_sandbox(SandboxSpec())

    async def evaluate(self, job: JobContext[MathInstance], result: RunResult) -> Grade:
        """1 for a right answer."""
        if self._grader is None:
            raise HandlerError("the handler math is not open")
        paper = MathPaper(
            said=(result.answer or "")[-SAID_CHARS:], gold=job.instance.gold, simplified=self._settings.simplified
        )
        verdict = await self._grader.grade(paper)
        job.progress("graded", answer=verdict.answer, how=verdict.how)
        return Grade(
            reward=float(verdict.correct),
            parts={"correct": float(verdict.correct), "answered": float(verdict.answer is not None)},
        )
