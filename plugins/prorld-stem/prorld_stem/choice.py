"""The handler ``choice``: questions of which exactly one listed answer is right."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from prorld.agents import SearchProvider, Tool
from prorld.domain.job import AgentLimits
from prorld.domain.messages import Message, system, user
from prorld.handlers import AgentHandler, Grade, JobContext, Play, RunResult
from prorld_stem.choice_instance import ChoiceInstance, GradingMode, Sheet, make_sheet, seed_of
from prorld_stem.choice_plays import choice_plays
from prorld_stem.letters import chosen, instruction, letters_boxed
from prorld_stem.search import SearchPlan, open_search
from prorld_stem.tooling import TOOLS, chosen_tools, must_have_search, open_sandbox_for

__all__ = ["ChoiceConfig", "ChoiceHandler"]


class ChoiceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The order of the options, how answers are read, and what they are worth.

    ``grading_mode`` stands above what instances say.
    """

    shuffle: Literal["yes", "no"] = "yes"
    seed: int = 0
    grading_mode: GradingMode | None = None
    reward_wrong: Annotated[float, Meta(ge=-1, le=0)] = 0.0
    image: str | None = None
    tool_s: Annotated[float, Meta(gt=0, le=3600)] = 60.0
    search: SearchPlan = SearchPlan()


class ChoiceHandler(AgentHandler[ChoiceInstance]):
    """Multiple choice."""

    name = "choice"
    instance_type = ChoiceInstance
    config_type: ClassVar[type[msgspec.Struct]] = ChoiceConfig
    data_sources: ClassVar[tuple[str, ...]] = ("mcqa*", "gpqa*", "exams*", "choice")
    allowed_tools: ClassVar[frozenset[str]] = TOOLS

    def __init__(self, config: msgspec.Struct | None = None) -> None:
        super().__init__(config)
        assert isinstance(self.config, ChoiceConfig)
        self._settings = self.config
        self.tool_limit_s = self._settings.tool_s
        self._provider: SearchProvider | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Have the search ready."""
        self._provider = await open_search(self._settings.search)
        yield

    def accept(self, instance: ChoiceInstance, limits: AgentLimits) -> None:
        """Refuse also a search that is not there."""
        super().accept(instance, limits)
        must_have_search(limits, self._settings.search)

    def tools(self, job: JobContext[ChoiceInstance]) -> Sequence[Tool]:
        """Those asked for; none by default, but for a search that is offered."""
        return chosen_tools(job.limits, self.default_tools, self._settings.search, self._provider)

    def plays(self, instance: ChoiceInstance) -> Sequence[Play]:
        """For the order that a job without a ``shuffle_seed`` of its own is shown."""
        sheet = self._sheet(instance, {})
        return [
            *super().plays(instance),
            *choice_plays(sheet, self._mode(instance), wrong=self._settings.reward_wrong),
        ]

    def prompt(self, instance: ChoiceInstance) -> Sequence[Message]:
        """The question as a job without a ``shuffle_seed`` of its own is shown it."""
        return self._messages(instance, self._sheet(instance, {}))

    async def init(self, job: JobContext[ChoiceInstance]) -> None:
        """A sandbox, where one of the tools needs it."""
        await open_sandbox_for(job, self.tools(job), self._settings.image)

    async def opening(self, job: JobContext[ChoiceInstance]) -> Sequence[Message]:
        """The question, with the options in this job's order."""
        return self._messages(job.instance, self._sheet(job.instance, job.metadata))

    async def evaluate(self, job: JobContext[ChoiceInstance], result: RunResult) -> Grade:
        """1 for the right letter, ``reward_wrong`` for every other and for none."""
        said = result.answer or ""
        sheet = self._sheet(job.instance, job.metadata)
        mode = self._mode(job.instance)
        letter = chosen(said, sheet, mode)
        correct = letter == sheet.gold
        job.progress("graded", letter=letter, gold=sheet.gold, mode=mode)
        if (tried := letters_boxed(said)) > 1:
            job.measure("suspicious.boxes", tried)
        return Grade(
            reward=1.0 if correct else self._settings.reward_wrong,
            parts={"correct": float(correct), "answered": float(letter is not None)},
        )

    def _mode(self, instance: ChoiceInstance) -> GradingMode:
        return self._settings.grading_mode or instance.grading_mode

    def _sheet(self, instance: ChoiceInstance, metadata: dict[str, object]) -> Sheet:
        settings = self._settings
        return make_sheet(instance, shuffle=settings.shuffle == "yes", seed=seed_of(metadata, settings.seed))

    def _messages(self, instance: ChoiceInstance, sheet: Sheet) -> list[Message]:
        return [system(instruction(self._mode(instance))), user(sheet.shown())]
