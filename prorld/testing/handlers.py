"""A handler that does what its instance says, and the checks that every handler has to pass.

The tests of the rollout room and ``prorld serve --dev`` use the first; authors of plugins the second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import trio
from msgspec import Meta

from prorld.domain.messages import Message, user
from prorld.domain.outcome import Stage, StopReason
from prorld.errors import BackendError, GraderError, HandlerError, RolloutError, SandboxError
from prorld.handlers.base import AgentHandler, Grade, JobContext, RunResult
from prorld.sandbox.contract import SandboxRuntime, SandboxSpec
from prorld.testing.handler_contract import CHECK_S, HANDLER_CONTRACT, HandlerUnderTest

__all__ = ["Failure", "FakeHandler", "FakeInstance", "check_handler"]

Failure = Literal["sandbox", "engine", "handler", "grader", "bug", "hang"]

_ERRORS: Mapping[str, type[RolloutError]] = {
    "sandbox": SandboxError,
    "engine": BackendError,
    "handler": HandlerError,
    "grader": GraderError,
}


class FakeInstance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one job of the ``fake`` handler does.

    ``seconds`` is slept in a stage, then the stage fails as ``fail`` says, in the first ``failing_attempts`` attempts.
    The answer is right if it contains ``expected``.
    """

    prompt: str = "Say hello."
    expected: str = ""
    reward: float = 1.0
    sandbox: bool = False
    seconds: dict[Stage, Annotated[float, Meta(ge=0)]] = {}
    fail: dict[Stage, Failure] = {}
    failing_attempts: int = 1_000_000
    recovers: list[Stage] = []


class FakeHandler(AgentHandler[FakeInstance]):
    """The handler named ``fake``; needs no plugin."""

    name = "fake"
    instance_type = FakeInstance
    data_sources: ClassVar[tuple[str, ...]] = ("fake",)

    def sandbox_spec(self, instance: FakeInstance) -> SandboxSpec | None:
        """One, where the instance asks for it."""
        return SandboxSpec() if instance.sandbox else None

    def prompt(self, instance: FakeInstance) -> Sequence[Message]:
        """The instance's own."""
        return [user(instance.prompt)]

    async def init(self, job: JobContext[FakeInstance]) -> None:
        """As the instance says, then the usual."""
        await _act_up(job, "init")
        await super().init(job)

    async def run(self, job: JobContext[FakeInstance]) -> RunResult:
        """The usual, then as the instance says, so that a failing run has sampled something."""
        result = await super().run(job)
        await _act_up(job, "run")
        return result

    async def evaluate(self, job: JobContext[FakeInstance], result: RunResult) -> Grade:
        """As the instance says, then the grade."""
        await _act_up(job, "eval")
        right = job.instance.expected in (result.answer or "")
        return Grade(reward=job.instance.reward if right else 0.0, parts={"right": float(right)})

    async def recover(self, job: JobContext[FakeInstance], stage: Stage, error: Exception) -> RunResult | Grade | None:
        """Go on without a sandbox, or with nothing said, or with half the reward."""
        if stage not in job.instance.recovers:
            raise error
        await trio.lowlevel.checkpoint()
        job.progress("recovered", stage=stage)
        match stage:
            case "init":
                return None
            case "run":
                return RunResult(stop=StopReason.FINISHED)
            case "eval":
                return Grade(reward=job.instance.reward / 2)


async def _act_up(job: JobContext[FakeInstance], stage: Stage) -> None:
    await trio.sleep(job.instance.seconds.get(stage, 0.0))
    failure = job.instance.fail.get(stage)
    if failure is None or job.attempt > job.instance.failing_attempts:
        return
    if failure == "hang":
        await trio.sleep_forever()
    if failure == "bug":
        raise ZeroDivisionError("a bug in the handler")
    raise _ERRORS[failure](f"{stage} fails as it was told to")


async def check_handler(
    handler: AgentHandler[Any], instances: Sequence[Mapping[str, Any]], *, runtime: SandboxRuntime | None = None
) -> None:
    """Run every check of ``HANDLER_CONTRACT`` on a handler with these instances of it.

    ``runtime`` makes the sandboxes; by default they exist in name only.
    """
    under = HandlerUnderTest(handler=handler, instances=instances, runtime=runtime)
    for check in HANDLER_CONTRACT:
        with trio.fail_after(CHECK_S):
            await check(under)
