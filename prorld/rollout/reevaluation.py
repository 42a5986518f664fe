"""Scoring stored rollouts again: through the EVAL gate, into records of their own.

It works on a shadow of the job, so that nothing which was delivered changes: neither record, trajectory nor events. It
is an actor: requests come through its mailbox, each reevaluation is a task in its nursery. What it keeps of a job is
forgotten with the job.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final
from weakref import WeakKeyDictionary

import msgspec
import structlog
import trio

from prorld.domain.job import JobState
from prorld.domain.outcome import Outcome, cancelled, outcome_of_error, outcome_of_stop
from prorld.errors import Conflict, Forgotten, NotFound, Overloaded, TooMany
from prorld.handlers.base import RunResult
from prorld.kit.mailbox import Mailbox, MailboxClosed, Reply
from prorld.rollout.context import AttemptContext
from prorld.rollout.document import step_rewards
from prorld.rollout.entry import JobEntry
from prorld.rollout.life import World, attempt, grade
from prorld.rollout.stages import TotalBudget
from prorld.wire.looks import ReevaluateJob, Reevaluation, ReevaluationPage, ReevaluationState

__all__ = ["Reevaluator"]

log = structlog.get_logger("prorld.rollout")

KEPT_PER_JOB_MAX: Final = 32
LIVE_PER_TENANT_MAX: Final = 256
MAILBOX_SIZE: Final = 256
RETRY_AFTER_S: Final = 5.0


class _Begin(msgspec.Struct, frozen=True):
    entry: JobEntry
    request: ReevaluateJob
    reply: Reply[Reevaluation]


class _Look:
    """One reevaluation. ``shadow`` is what the handler works on; the entry it belongs to is only read."""

    def __init__(self, entry: JobEntry, n: int, result: RunResult, request: ReevaluateJob) -> None:
        self.n = n
        self.entry = entry
        self.result = result
        self.reason = request.reason
        self.done = trio.Event()
        self.created_at = entry.clock.wall()
        self.ended_at: str | None = None
        self.outcome: Outcome | None = None
        self.shadow = _shadow(entry, request)

    @property
    def state(self) -> ReevaluationState:
        if self.done.is_set():
            return ReevaluationState.DONE
        return ReevaluationState.QUEUED if self.shadow.stage is None else ReevaluationState.EVALUATING

    def end(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.ended_at = self.entry.clock.wall()
        self.done.set()

    def record(self) -> Reevaluation:
        given, timing = self.shadow.grade, self.shadow.timing
        return Reevaluation(
            n=self.n,
            job_id=self.entry.spec.job_id,
            tenant=self.entry.spec.tenant,
            state=self.state,
            reason=self.reason,
            outcome=self.outcome,
            reward=None if given is None else given.reward,
            reward_parts={} if given is None else given.parts,
            step_rewards=step_rewards(given, self.shadow.session),
            queue_eval_s=timing.queue_eval_s,
            eval_s=timing.eval_s,
            created_at=self.created_at,
            ended_at=self.ended_at,
        )


class Reevaluator:
    """Reevaluations of all jobs. ``find`` gives the job that a caller means, or raises; ``run`` is the actor."""

    def __init__(
        self, world: World, find: Callable[[str, str | None], JobEntry], is_draining: Callable[[], bool]
    ) -> None:
        self._world = world
        self._find = find
        self._is_draining = is_draining
        self._mailbox: Mailbox[_Begin] = Mailbox("reevaluator", MAILBOX_SIZE)
        self._looks: WeakKeyDictionary[JobEntry, list[_Look]] = WeakKeyDictionary()
        self._live: set[_Look] = set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Begin reevaluations until cancelled."""
        async with trio.open_nursery() as nursery:
            with self._mailbox.receive() as inbox:
                task_status.started()
                async for message in inbox:
                    try:
                        message.reply.answer(self._begin(message, nursery))
                    except Exception as exc:  # noqa: BLE001  (every error belongs to the asker; the actor goes on)
                        message.reply.fail(exc)

    async def begin(self, job_id: str, tenant: str | None, request: ReevaluateJob) -> Reevaluation:
        """Score a stored rollout again. Raises ``Conflict`` where there is nothing that could be scored."""
        entry = self._find(job_id, tenant)
        try:
            return await self._mailbox.ask(partial(_Begin, entry, request))
        except MailboxClosed as exc:
            raise self._refuse() from exc

    def _refuse(self) -> Overloaded:
        return Overloaded("the daemon is draining", retry_after_s=RETRY_AFTER_S, code="draining")

    def _begin(self, message: _Begin, nursery: trio.Nursery) -> Reevaluation:
        entry = message.entry
        result = _scorable(entry)
        if self._is_draining():
            raise self._refuse()
        looks = self._looks.setdefault(entry, [])
        if looks and looks[-1] in self._live:
            raise Conflict(f"reevaluation {looks[-1].n} of {entry.spec.job_id} has not ended", code="reevaluating")
        if sum(look.entry.spec.tenant == entry.spec.tenant for look in self._live) >= LIVE_PER_TENANT_MAX:
            raise TooMany(f"{LIVE_PER_TENANT_MAX} reevaluations have not ended", retry_after_s=RETRY_AFTER_S)
        look = _Look(entry, looks[-1].n + 1 if looks else 1, result, message.request)
        looks.append(look)
        del looks[:-KEPT_PER_JOB_MAX]
        self._live.add(look)
        nursery.start_soon(self._look, look, name=f"reevaluation {look.n} of {entry.spec.job_id}")
        return look.record()

    async def _look(self, look: _Look) -> None:
        outcome: Outcome | None = None
        shadow = look.shadow
        try:
            with shadow.scope:
                n = len(shadow.attempts) + look.n
                outcome = await attempt(shadow, self._world, n, partial(self._score, look))
        except* Exception as group:
            outcome = outcome_of_error(group, "eval")
            log.exception("reevaluation.crashed", exc_info=group, job_id=shadow.spec.job_id)
        finally:
            look.end(outcome or cancelled(shadow.cancel_reason or "the daemon is shutting down", shadow.stage))
            self._live.discard(look)

    async def _score(self, look: _Look, job: AttemptContext) -> Outcome:
        shadow = look.shadow
        shadow.grade = await grade(shadow, self._world, job, TotalBudget(shadow.spec.timeouts), look.result)
        await job.close_sandbox()
        return outcome_of_stop(look.result.stop)

    def _of(self, job_id: str, tenant: str | None, n: int) -> _Look:
        looks = self._looks.get(self._find(job_id, tenant), [])
        for look in looks:
            if look.n == n:
                return look
        if looks and 1 <= n < looks[0].n:
            raise Forgotten(f"reevaluation {n} of {job_id} is forgotten")
        raise NotFound(f"job {job_id} has no reevaluation {n}", code="unknown_reevaluation")

    def get(self, job_id: str, tenant: str | None, n: int) -> Reevaluation:
        """One record now."""
        return self._of(job_id, tenant, n).record()

    async def wait_done(self, job_id: str, tenant: str | None, n: int) -> Reevaluation:
        """The record once it has ended. The caller's scope bounds the wait."""
        look = self._of(job_id, tenant, n)
        await look.done.wait()
        return look.record()

    def page(self, job_id: str, tenant: str | None) -> ReevaluationPage:
        """All that are kept of a job, newest first."""
        looks = self._looks.get(self._find(job_id, tenant), [])
        return ReevaluationPage(items=[look.record() for look in reversed(looks)])

    def cancel(self, job_id: str, tenant: str | None, n: int, reason: str) -> Reevaluation:
        """Begin its end; one that has ended stays as it is."""
        look = self._of(job_id, tenant, n)
        if look in self._live:
            look.shadow.cancel_reason = look.shadow.cancel_reason or reason
            look.shadow.scope.cancel(reason)
        return look.record()


def _scorable(entry: JobEntry) -> RunResult:
    """What the grader looks at; ``Conflict`` where there is none, or its sandbox is gone."""
    job_id = entry.spec.job_id
    if entry.state is not JobState.DONE:
        raise Conflict(f"job {job_id} is {entry.state}; it can be scored again when it is done", code="not_done")
    if entry.result is None or entry.session is None:
        raise Conflict(f"job {job_id} never came as far as its grader", code="nothing_to_score")
    # In a grading sandbox it can be done again: what was carried over is kept with the job.
    if entry.handler.grades_in_sandbox and entry.handler.grading_sandbox(entry.instance) is None:
        message = f"{entry.spec.handler} grades inside the rollout's sandbox, and that is gone"
        raise Conflict(message, code="sandbox_gone")
    return entry.result


def _shadow(entry: JobEntry, request: ReevaluateJob) -> JobEntry:
    """The job as it was when it came to EVAL, with events, times and grade of its own."""
    timeouts = msgspec.structs.replace(
        entry.spec.timeouts, total_s=None, eval_s=request.eval_s or entry.spec.timeouts.eval_s
    )
    spec = msgspec.structs.replace(entry.spec, timeouts=timeouts)
    shadow = JobEntry(
        spec, entry.handler, entry.instance, serial=entry.serial, digest=entry.digest, size_bytes=0, clock=entry.clock
    )
    shadow.state = JobState.RUNNING
    shadow.attempts = list(entry.attempts)
    shadow.session = entry.session
    shadow.carried = entry.carried
    return shadow
