"""The handler named ``bench``: no sandbox, so many turns, always the same reward. It times its own turns.

A daemon has it only where ``handlers.enabled`` names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec
import trio
from msgspec import Meta

from prorld.domain.messages import Message, user
from prorld.domain.outcome import StopReason
from prorld.handlers.base import AgentHandler, Grade, JobContext, RunResult

__all__ = ["BenchHandler", "BenchInstance"]


class BenchInstance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt, and how often the policy speaks."""

    prompt: str = "Go on."
    turns: Annotated[int, Meta(ge=1, le=1000)] = 1


class BenchHandler(AgentHandler[BenchInstance]):
    """Turns without tools; what each took as the handler sees it comes back in the parts of the reward."""

    name = "bench"
    instance_type = BenchInstance
    data_sources: ClassVar[tuple[str, ...]] = ("bench",)
    allowed_tools: ClassVar[frozenset[str]] = frozenset()

    def prompt(self, instance: BenchInstance) -> Sequence[Message]:
        """The instance's own."""
        return [user(instance.prompt)]

    async def run(self, job: JobContext[BenchInstance]) -> RunResult:
        """One turn the usual way; several in a bare loop that is timed."""
        if job.instance.turns == 1:
            return await super().run(job)
        seconds: dict[str, float] = {}
        await job.model.start(self.prompt(job.instance))
        for number in range(job.instance.turns):
            began = trio.current_time()
            if number:
                await job.model.observe([user(job.instance.prompt)])
            turn = await job.model.turn()
            seconds[str(number)] = trio.current_time() - began
            if turn.stop is not None and number + 1 < job.instance.turns:
                return RunResult(stop=turn.stop, data=seconds)
        return RunResult(stop=StopReason.FINISHED, data=seconds)

    async def evaluate(self, job: JobContext[BenchInstance], result: RunResult) -> Grade:
        """Always 1."""
        await trio.lowlevel.checkpoint()
        return Grade(reward=1.0, parts=result.data)
