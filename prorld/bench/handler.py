"""The handler named ``bench``: no sandbox, so many turns, a reward that is known before. It times its own turns.

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
from prorld.errors import HandlerError
from prorld.handlers.base import AgentHandler, Grade, JobContext, RunResult
from prorld.sandbox.contract import SandboxSpec

__all__ = ["BenchHandler", "BenchInstance", "BenchSample"]

# What stays behind when nobody ends the sandbox with all that is in it.
STRAY = "trap '' HUP TERM; (trap '' HUP TERM INT; setsid sleep 4321) >/dev/null 2>&1 & echo left"
STRAY_S_MAX = 20.0


class BenchSample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known before of one sample of a group: the tokens it takes, and its reward."""

    tokens: Annotated[int, Meta(ge=1, le=100_000)]
    reward: Annotated[float, Meta(ge=0, le=1)]


class BenchInstance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt, and how often the policy speaks.

    With ``samples`` the engine is asked for so many tokens, in equal parts by turn. Which of the samples a job is, its
    id says: that of a group's job ends in ``:`` and its number. With ``sandbox`` it leaves a process behind in one.
    """

    prompt: str = "Go on."
    turns: Annotated[int, Meta(ge=1, le=1000)] = 1
    samples: Annotated[list[BenchSample], Meta(max_length=4096)] = []
    sandbox: bool = False


class BenchHandler(AgentHandler[BenchInstance]):
    """Turns without tools; what each took as the handler sees it comes back in the parts of the reward."""

    name = "bench"
    instance_type = BenchInstance
    data_sources: ClassVar[tuple[str, ...]] = ("bench",)
    allowed_tools: ClassVar[frozenset[str]] = frozenset()

    def prompt(self, instance: BenchInstance) -> Sequence[Message]:
        """The instance's own."""
        return [user(instance.prompt)]

    def sandbox_spec(self, instance: BenchInstance) -> SandboxSpec | None:
        """Where the instance asks for one."""
        return SandboxSpec() if instance.sandbox else None

    async def run(self, job: JobContext[BenchInstance]) -> RunResult:
        """One turn the usual way; several in a bare loop that is timed."""
        if job.instance.samples:
            return await self._run_sample(job, _sample_of(job))
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

    async def _run_sample(self, job: JobContext[BenchInstance], sample: BenchSample) -> RunResult:
        if job.instance.sandbox:
            await job.sandbox.bash(STRAY, limit_s=STRAY_S_MAX)
        turns = min(job.instance.turns, sample.tokens)
        asked = 0
        for number in range(turns):
            tokens = sample.tokens * (number + 1) // turns - asked
            asked += tokens
            message = user(f"{job.instance.prompt} [[{tokens}]]")
            await (job.model.observe([message]) if number else job.model.start([message]))
            turn = await job.model.turn()
            if turn.stop is not None and number + 1 < turns:
                return RunResult(stop=turn.stop)
        return RunResult(stop=StopReason.FINISHED)

    async def evaluate(self, job: JobContext[BenchInstance], result: RunResult) -> Grade:
        """That of the sample; else always 1."""
        await trio.lowlevel.checkpoint()
        if job.instance.samples:
            return Grade(reward=_sample_of(job).reward)
        return Grade(reward=1.0, parts=result.data)


def _sample_of(job: JobContext[BenchInstance]) -> BenchSample:
    # Where an id was taken, a dash and something else stand behind the number.
    number = job.job_id.rpartition(":")[2].partition("-")[0]
    samples = job.instance.samples
    if not number.isdecimal() or int(number) >= len(samples):
        raise HandlerError(f"the job {job.job_id} is none of {len(samples)} samples")
    return samples[int(number)]
