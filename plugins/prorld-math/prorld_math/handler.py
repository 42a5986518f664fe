"""The handler ``math``: a problem, Python in the sandbox, an answer that is checked in a killable child."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from prorld.domain.messages import Message
from prorld.handlers import (
    AgentHandler,
    Grade,
    HandlerError,
    JobContext,
    Play,
    RewardServer,
    RunResult,
    SandboxSpec,
    open_grader,
    open_reward_server,
)
from prorld_math.answer import boxes, final_answer
from prorld_math.examiner import WAIT_FACTOR, Examiner
from prorld_math.instance import MathInstance
from prorld_math.libraries import find_libraries, words_for
from prorld_math.paper import MathPaper, MathVerdict
from prorld_math.plays import math_plays

__all__ = ["MathConfig", "MathHandler"]

# The end of a long monologue; the answer is looked for in less.
SAID_CHARS = 100_000
# Reasoning may box what it finds on the way; more different answers than these are a way to try many.
BOXES_USUAL = 3

_SYSTEM = (
    "Solve the problem. You may use the tools you are offered to compute and to check. At the end put the final answer,"
    " and nothing but it, into \\boxed{}."
)


class MathConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of the grader, what answers are worth, and the sandbox.

    A ``reward_server`` grades in the place of math-verify, and its score is the reward as it is.
    """

    graders: Annotated[int, Meta(ge=1, le=64)] = 2
    grade_s: Annotated[float, Meta(ge=1, le=600)] = 5.0
    memory_bytes: Annotated[int, Meta(ge=256 << 20)] = 1 << 30
    simplified: bool = True
    reward_wrong: Annotated[float, Meta(ge=-1, le=0)] = 0.0
    reward_server: Annotated[str, Meta(min_length=1, max_length=1_000)] | None = None
    reward_server_s: Annotated[float, Meta(gt=0, le=600)] = 60.0
    image: str | None = None
    kernel: Literal["auto", "ipython", "plain"] = "auto"
    tool_s: Annotated[float, Meta(gt=0, le=3600)] = 60.0


class MathHandler(AgentHandler[MathInstance]):
    """Problems with an answer."""

    name = "math"
    instance_type = MathInstance
    config_type: ClassVar[type[msgspec.Struct]] = MathConfig
    data_sources: ClassVar[tuple[str, ...]] = (
        "deepscaler",
        "math_dapo",
        "dapo-math*",
        "aime*",
        "hmmt*",
        "minif2f",
        "numina_*",
        "math",
    )
    default_tools: ClassVar[tuple[str, ...]] = ("python",)

    def __init__(self, config: msgspec.Struct | None = None) -> None:
        super().__init__(config)
        assert isinstance(self.config, MathConfig)
        self._settings = self.config
        self.tool_limit_s = self._settings.tool_s
        self._examiner: Examiner | None = None
        self._server: RewardServer | None = None
        # What the sandboxes have, once one was asked: they are all made of the same image.
        self._libraries: tuple[str, ...] | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Keep what grades for all jobs: the grader's children, or the way to the reward server."""
        self._libraries = None
        settings = self._settings
        async with AsyncExitStack() as stack:
            if settings.reward_server is not None:
                opened = open_reward_server(settings.reward_server, limit_s=settings.reward_server_s)
                self._server = await stack.enter_async_context(opened)
            else:
                grader = open_grader(
                    "prorld_math.grading:grade",
                    MathVerdict,
                    children=settings.graders,
                    limit_s=WAIT_FACTOR * settings.grade_s,
                    memory_bytes=settings.memory_bytes,
                )
                self._examiner = Examiner(await stack.enter_async_context(grader))
            yield

    def plays(self, instance: MathInstance) -> Sequence[Play]:
        """Right, wrong, and the cheats that are known."""
        return [*super().plays(instance), *math_plays(instance, wrong=self._settings.reward_wrong)]

    def prompt(self, instance: MathInstance) -> Sequence[Message]:
        """The rules and the problem; a conversation that brings its own system message keeps it."""
        messages = [Message(role=message.role, content=message.content) for message in instance.messages]
        return messages if messages[0].role == "system" else [Message(role="system", content=_SYSTEM), *messages]

    async def init(self, job: JobContext[MathInstance]) -> None:
        """A sandbox, where one of the tools needs it."""
        tools = self.tools(job)
        if any(tool.needs_sandbox for tool in tools):
            computes = any(tool.schema.name == "python" for tool in tools)
            first: Literal["bash", "python"] = "python" if computes else "bash"
            sandbox = await job.open_sandbox(
                SandboxSpec(image=self._settings.image, kernel=self._settings.kernel, first=first)
            )
            if self._libraries is None and computes:
                self._libraries = await find_libraries(sandbox)

    async def opening(self, job: JobContext[MathInstance]) -> Sequence[Message]:
        """The prompt; the policy is told which libraries its Python has."""
        first, *rest = self.prompt(job.instance)
        if self._libraries and any(tool.schema.name == "python" for tool in self.tools(job)):
            first = msgspec.structs.replace(first, content=f"{first.content}\n{words_for(self._libraries)}")
        return [first, *rest]

    async def evaluate(self, job: JobContext[MathInstance], result: RunResult) -> Grade:
        """1 for a right answer, ``reward_wrong`` for every other; or what the reward server says."""
        # A lone surrogate is in no text that can be sent on, and must not be a way out of the grade.
        said = (result.answer or "")[-SAID_CHARS:].encode("utf-8", "replace").decode()
        if self._server is not None:
            return await self._score(job, self._server, said)
        verdict = await self._judge(job, said)
        job.progress("graded", answer=verdict.answer, how=verdict.how)
        job.measure("answer_chars", len(verdict.answer or ""))
        if (tried := boxes(said)) > BOXES_USUAL:
            job.measure("suspicious.boxes", tried)
        if verdict.how in {"unreasonable", "exhausting"}:
            job.measure("suspicious.grader_attacked", 1)
        answered = verdict.answer is not None or verdict.how == "exhausting"
        return Grade(
            reward=1.0 if verdict.correct else self._settings.reward_wrong,
            parts={"correct": float(verdict.correct), "answered": float(answered)},
        )

    async def _score(self, job: JobContext[MathInstance], server: RewardServer, said: str) -> Grade:
        instance = job.instance
        score = await server.score(solution=said, truth=instance.gold, data_source=instance.data_source)
        job.progress("graded", how="remote", score=score)
        return Grade(reward=score, parts={"score": score, "answered": float(final_answer(said) is not None)})

    async def _judge(self, job: JobContext[MathInstance], said: str) -> MathVerdict:
        if self._examiner is None:
            raise HandlerError("the handler math is not open")
        settings = self._settings
        paper = MathPaper(said=said, gold=job.instance.gold, simplified=settings.simplified, cpu_s=settings.grade_s)
        return await self._examiner.judge(paper)
