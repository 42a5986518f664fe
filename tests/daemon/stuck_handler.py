"""A task that gets stuck where its instance says, in each way that a task can: asleep, deaf to signals, deaf to us."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import msgspec
import trio

from prorld.domain.messages import Message, user
from prorld.domain.outcome import Stage
from prorld.handlers import AgentHandler, Grade, JobContext, RunResult, SandboxSpec

__all__ = ["StuckHandler"]

# Every signal that a process may ignore, and children that do as well.
DEAF = "trap '' HUP INT QUIT TERM PIPE ALRM USR1 USR2 TSTP TTIN TTOU; while :; do sleep 4321; done"
LONGER_THAN_ANY_STAGE_S = 3600.0


class StuckInstance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where it gets stuck, and how; ``only`` names the sample of a group that does, the others go on."""

    where: Stage | None = None
    how: Literal["asleep", "deaf", "swallows"] = "asleep"
    only: int | None = None


class StuckHandler(AgentHandler[StuckInstance]):
    """One turn, and a reward by the sample's number; unless it gets stuck."""

    name = "stuck"
    instance_type = StuckInstance
    allowed_tools: ClassVar[frozenset[str]] = frozenset()
    grades_in_sandbox = True

    def sandbox_spec(self, instance: StuckInstance) -> SandboxSpec | None:
        """One, where a process of it is to be deaf."""
        return SandboxSpec() if instance.how == "deaf" else None

    def prompt(self, instance: StuckInstance) -> Sequence[Message]:
        """Anything."""
        return [user("go on")]

    async def init(self, job: JobContext[StuckInstance]) -> None:
        """The usual, and stuck."""
        await super().init(job)
        await _stick(job, "init")

    async def run(self, job: JobContext[StuckInstance]) -> RunResult:
        """The usual, and stuck."""
        result = await super().run(job)
        await _stick(job, "run")
        return result

    async def evaluate(self, job: JobContext[StuckInstance], result: RunResult) -> Grade:
        """Stuck, and every other sample is right."""
        await _stick(job, "eval")
        return Grade(reward=float(_sample(job) % 2))


def _sample(job: JobContext[StuckInstance]) -> int:
    number = job.job_id.rpartition(":")[2]
    return int(number) if number.isdecimal() else 0


async def _stick(job: JobContext[StuckInstance], stage: Stage) -> None:
    here = job.instance
    if here.where != stage or (here.only is not None and here.only != _sample(job)):
        return
    if here.how == "deaf":
        await job.sandbox.bash(DEAF, limit_s=LONGER_THAN_ANY_STAGE_S)
    elif here.how == "swallows":
        try:
            await trio.sleep_forever()
        except BaseException:  # noqa: BLE001, ASYNC103 - the very thing that no task may do
            job.progress("swallowed")
        await trio.sleep_forever()
    else:
        await trio.sleep_forever()
