"""Jobs that an earlier life of the daemon accepted and did not end, made anew so that they run again.

What can't run any more, or was promised its end, ends at once by the same path as every other job.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import ClassVar

import msgspec

from prorld.domain.messages import Message
from prorld.domain.outcome import Outcome, OutcomeKind, cancelled
from prorld.errors import RequestError, chain
from prorld.handlers.base import AgentHandler, Grade, JobContext, RunResult
from prorld.handlers.registry import AnyHandler, Registry, accept
from prorld.rollout.entry import JobEntry
from prorld.rollout.life import World
from prorld.store.jobs import LiveJob
from prorld.store.rows import DAMAGED
from prorld.wire.events import JobEvent

__all__ = ["restored"]


class _NoInstance(msgspec.Struct, frozen=True):
    pass


# A job that blocks or kills the daemon would do so for ever; no other meets the end of so many lives.
LIVES_MAX = 20


class _Gone(AgentHandler[_NoInstance]):
    """Stands for a handler that is not there. No stage of such a job begins."""

    name: ClassVar[str] = "gone"
    instance_type = _NoInstance

    def prompt(self, instance: _NoInstance) -> Sequence[Message]:
        """Never asked."""
        raise AssertionError("a job without a handler has no prompt")

    async def evaluate(self, job: JobContext[_NoInstance], result: RunResult) -> Grade:
        """Never asked."""
        raise AssertionError("a job without a handler has no grade")


def restored(
    past: LiveJob, world: World, handlers: Registry, policies: Container[str], tell: Callable[[JobEvent], None]
) -> JobEntry:
    """The job as it was accepted, with what it has told so far, and its next attempt before it."""
    handler, instance, refusal = _handler(past, handlers)
    entry = JobEntry(
        past.spec,
        handler,
        instance,
        serial=past.serial,
        digest=past.digest,
        size_bytes=past.request_bytes,
        clock=world.clock,
        tell=tell,
        journal=world.journal,
        earlier=past,
    )
    entry.doom = _doom(past, refusal, policies)
    entry.cancel_reason = past.cancel
    return entry


def _handler(past: LiveJob, handlers: Registry) -> tuple[AnyHandler, msgspec.Struct, RequestError | None]:
    try:
        handler = handlers.get(past.spec.handler)
        return handler, accept(handler, past.spec.instance, past.spec.agent), None
    except RequestError as refusal:
        return _Gone(), _NoInstance(), refusal


def _doom(past: LiveJob, refusal: RequestError | None, policies: Container[str]) -> Outcome | None:
    """How it ends without having run again."""
    if past.cancel is not None:
        return cancelled(past.cancel, None)
    if past.damage:
        return Outcome(kind=OutcomeKind.LOST, code=DAMAGED, message=past.damage)
    if refusal is not None:
        return Outcome(kind=OutcomeKind.HANDLER_ERROR, code=refusal.stable_code, message=chain(refusal))
    cut = sum(attempt.outcome.kind is OutcomeKind.LOST for attempt in past.attempts) + (past.open_attempt is not None)
    if cut >= LIVES_MAX:
        message = f"{cut} lives of the daemon ended while it ran; it may be what ends them"
        return Outcome(kind=OutcomeKind.LOST, code="too_many_restarts", message=message)
    if past.spec.policy not in policies:
        message = f"there is no policy {past.spec.policy!r} any more"
        return Outcome(kind=OutcomeKind.LLM_ERROR, code="unknown_policy", message=message)
    return None
