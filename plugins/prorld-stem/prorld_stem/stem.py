"""The handler ``stem``: questions with a free answer, compared by rule and, where that is open, by a judge."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from prorld.agents import SearchProvider, Tool
from prorld.domain.job import AgentLimits
from prorld.domain.messages import Message
from prorld.handlers import AgentHandler, Grade, JobContext, Play, RewardServer, RunResult, open_reward_server
from prorld_stem.compare import Comparison, compare, final_answer, reference
from prorld_stem.judge import Case, Judgement, JudgePlan, ask_judge
from prorld_stem.search import SearchPlan, open_search
from prorld_stem.stem_instance import StemInstance
from prorld_stem.stem_plays import stem_plays
from prorld_stem.tooling import TOOLS, chosen_tools, must_have_search, open_sandbox_for

__all__ = ["StemConfig", "StemHandler"]

SAID_CHARS = 100_000
SHOWN_CHARS = 200

_SYSTEM = (
    "Answer the question. You may use the tools you are offered. At the end put the final answer, and nothing but it,"
    " into \\boxed{}; a quantity with its unit."
)


class StemConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How answers are compared, what they are worth, and what there is to search in.

    ``tolerance`` is the relative difference of two quantities that are the same. A ``reward_server`` grades in the
    place of rules and judge, and its score is the reward as it is.
    """

    tolerance: Annotated[float, Meta(ge=0, le=0.2)] = 0.01
    judge: JudgePlan = JudgePlan()
    reward_wrong: Annotated[float, Meta(ge=-1, le=0)] = 0.0
    reward_server: Annotated[str, Meta(min_length=1, max_length=1_000)] | None = None
    reward_server_s: Annotated[float, Meta(gt=0, le=600)] = 60.0
    image: str | None = None
    tool_s: Annotated[float, Meta(gt=0, le=3600)] = 60.0
    search: SearchPlan = SearchPlan()


class StemHandler(AgentHandler[StemInstance]):
    """Free answers."""

    name = "stem"
    instance_type = StemInstance
    config_type: ClassVar[type[msgspec.Struct]] = StemConfig
    data_sources: ClassVar[tuple[str, ...]] = ("scp116k", "scp-116k", "stem")
    allowed_tools: ClassVar[frozenset[str]] = TOOLS
    default_tools: ClassVar[tuple[str, ...]] = ("python",)

    def __init__(self, config: msgspec.Struct | None = None) -> None:
        super().__init__(config)
        assert isinstance(self.config, StemConfig)
        self._settings = self.config
        self.tool_limit_s = self._settings.tool_s
        self._provider: SearchProvider | None = None
        self._server: RewardServer | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Have the search ready, and the way to the reward server where there is one."""
        settings = self._settings
        self._provider = await open_search(settings.search)
        async with AsyncExitStack() as stack:
            if settings.reward_server is not None:
                opened = open_reward_server(settings.reward_server, limit_s=settings.reward_server_s)
                self._server = await stack.enter_async_context(opened)
            yield

    def accept(self, instance: StemInstance, limits: AgentLimits) -> None:
        """Refuse also a search that is not there."""
        super().accept(instance, limits)
        must_have_search(limits, self._settings.search)

    def tools(self, job: JobContext[StemInstance]) -> Sequence[Tool]:
        """Those asked for, else ``python`` and the search that is offered."""
        return chosen_tools(job.limits, self.default_tools, self._settings.search, self._provider)

    def plays(self, instance: StemInstance) -> Sequence[Play]:
        """Right, wrong, and the cheats that are known."""
        return [*super().plays(instance), *stem_plays(instance, wrong=self._settings.reward_wrong)]

    def prompt(self, instance: StemInstance) -> Sequence[Message]:
        """The rules and the question; a conversation that brings its own system message keeps it."""
        messages = [Message(role=message.role, content=message.content) for message in instance.messages]
        return messages if messages[0].role == "system" else [Message(role="system", content=_SYSTEM), *messages]

    async def init(self, job: JobContext[StemInstance]) -> None:
        """A sandbox, where one of the tools needs it."""
        await open_sandbox_for(job, self.tools(job), self._settings.image)

    async def evaluate(self, job: JobContext[StemInstance], result: RunResult) -> Grade:
        """1 for a right answer, ``reward_wrong`` for every other; none without a judge to ask."""
        # A lone surrogate is in no text that can be sent on, and must not be a way out of the grade.
        said = (result.answer or "")[-SAID_CHARS:].encode("utf-8", "replace").decode()
        answer = final_answer(said)
        if self._server is not None:
            instance = job.instance
            score = await self._server.score(solution=said, truth=instance.gold, data_source=instance.data_source)
            job.progress("graded", how="remote", score=score)
            return Grade(reward=score, parts={"score": score, "answered": float(answer is not None)})
        correct = await self._judge(job, answer) if answer is not None else False
        if answer is None:
            job.progress("graded", answer=None, how="none")
        job.measure("answer_chars", len(answer or ""))
        return Grade(
            reward=1.0 if correct else self._settings.reward_wrong,
            parts={"correct": float(correct), "answered": float(answer is not None)},
        )

    async def _judge(self, job: JobContext[StemInstance], answer: str) -> bool:
        gold = reference(job.instance.gold)
        found: Comparison = compare(answer, gold, self._settings.tolerance)
        if found.correct is not None:
            job.progress("graded", answer=answer[:SHOWN_CHARS], how=found.how)
            return found.correct
        plan = self._settings.judge

        async def ask(messages: Sequence[Message]) -> str:
            return await job.ask(plan.policy, messages, max_tokens=plan.max_tokens, limit_s=plan.limit_s)

        case = Case(question=job.instance.asked, gold=gold, answer=answer)
        judgement: Judgement = await ask_judge(case, plan, ask)
        if judgement.steered:
            job.measure("suspicious.judge_steered", 1)
        job.measure("judge_votes", len(judgement.votes))
        job.progress(
            "graded",
            answer=answer[:SHOWN_CHARS],
            how="steered" if judgement.steered else "judge",
            votes=[int(vote) for vote in judgement.votes],
        )
        return judgement.same
