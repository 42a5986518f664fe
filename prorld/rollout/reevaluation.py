"""Scoring stored rollouts again: through the EVAL gate, into records of their own.

It works on a shadow of the job, so that nothing which was delivered changes: neither record, trajectory nor events. It
is an actor: requests come through its mailbox, each reevaluation is a task in its nursery. What it has found is kept in
memory, of so many jobs, and ends with the daemon.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

import msgspec
import structlog
import trio

from prorld.domain.job import JobSpec, JobState
from prorld.domain.outcome import Outcome, cancelled, outcome_of_error, outcome_of_stop
from prorld.errors import Conflict, Forgotten, NotFound, Overloaded, RequestError, TooMany
from prorld.handlers.base import RunResult
from prorld.handlers.registry import AnyHandler, Registry, accept
from prorld.kit.mailbox import Mailbox, MailboxClosed, Reply
from prorld.rollout.clock import Clock
from prorld.rollout.context import AttemptContext
from prorld.rollout.document import step_rewards
from prorld.rollout.entry import JobEntry
from prorld.rollout.life import World, attempt, grade
from prorld.rollout.stages import TotalBudget
from prorld.store.jobs import StoredJob
from prorld.wire.jobs import JobRecord
from prorld.wire.looks import ReevaluateJob, Reevaluation, ReevaluationPage, ReevaluationState

__all__ = ["Reevaluator"]

log = structlog.get_logger("prorld.rollout")

KEPT_PER_JOB_MAX: Final = 32
JOBS_KEPT_MAX: Final = 4096
LIVE_PER_TENANT_MAX: Final = 256
MAILBOX_SIZE: Final = 256
RETRY_AFTER_S: Final = 5.0


class Jobs(Protocol):
    """Where jobs are found; ``supervisor.Supervisor`` is one."""

    async def get(self, job_id: str, tenant: str | None) -> JobRecord:
        """A job's record now."""
        ...

    async def stored(self, job_id: str, tenant: str | None, otherwise: str) -> StoredJob:
        """All of a job that is done; ``Conflict`` with these words where it is not."""
        ...


class _Subject(msgspec.Struct, frozen=True):
    """A job that can be scored again: what is kept of it, and the handler that scores it."""

    stored: StoredJob
    handler: AnyHandler
    instance: msgspec.Struct

    @property
    def spec(self) -> JobSpec:
        return self.stored.spec

    @property
    def key(self) -> tuple[str, str]:
        return self.spec.tenant, self.spec.job_id


class _Begin(msgspec.Struct, frozen=True):
    subject: _Subject
    request: ReevaluateJob
    reply: Reply[Reevaluation]


class _Look:
    """One reevaluation. ``shadow`` is what the handler works on; the job it belongs to is only read."""

    def __init__(self, subject: _Subject, n: int, request: ReevaluateJob, clock: Clock, serial: int) -> None:
        self.n = n
        self.subject = subject
        self.clock = clock
        self.reason = request.reason
        self.done = trio.Event()
        self.created_at = clock.wall()
        self.ended_at: str | None = None
        self.outcome: Outcome | None = None
        self.shadow = _shadow(subject, request, clock, serial)

    @property
    def state(self) -> ReevaluationState:
        if self.done.is_set():
            return ReevaluationState.DONE
        return ReevaluationState.QUEUED if self.shadow.stage is None else ReevaluationState.EVALUATING

    def end(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.ended_at = self.clock.wall()
        self.done.set()

    def record(self) -> Reevaluation:
        given, timing = self.shadow.grade, self.shadow.timing
        document = self.subject.stored.trajectory
        branches = ((branch.branch, branch.segments) for branch in document.branches)
        return Reevaluation(
            n=self.n,
            job_id=self.subject.spec.job_id,
            tenant=self.subject.spec.tenant,
            state=self.state,
            reason=self.reason,
            outcome=self.outcome,
            reward=None if given is None else given.reward,
            reward_parts={} if given is None else given.parts,
            step_rewards=step_rewards(given, branches, document.calls),
            queue_eval_s=timing.queue_eval_s,
            eval_s=timing.eval_s,
            created_at=self.created_at,
            ended_at=self.ended_at,
        )


class Reevaluator:
    """Reevaluations of all jobs. ``jobs`` finds the one that a caller means; ``run`` is the actor."""

    def __init__(self, world: World, jobs: Jobs, handlers: Registry, is_draining: Callable[[], bool]) -> None:
        self._world = world
        self._jobs = jobs
        self._handlers = handlers
        self._is_draining = is_draining
        self._mailbox: Mailbox[_Begin] = Mailbox("reevaluator", MAILBOX_SIZE)
        # By tenant and id, the job that was scored again last at the end.
        self._looks: dict[tuple[str, str], list[_Look]] = {}
        self._live: set[_Look] = set()
        self._begun = 0

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
        stored = await self._jobs.stored(job_id, tenant, "it can be scored again when it is done")
        subject = _scorable(stored, self._handlers)
        try:
            return await self._mailbox.ask(partial(_Begin, subject, request))
        except MailboxClosed as exc:
            raise self._refuse() from exc

    def _refuse(self) -> Overloaded:
        return Overloaded("the daemon is draining", retry_after_s=RETRY_AFTER_S, code="draining")

    def _begin(self, message: _Begin, nursery: trio.Nursery) -> Reevaluation:
        subject = message.subject
        job_id, tenant = subject.spec.job_id, subject.spec.tenant
        if self._is_draining():
            raise self._refuse()
        looks = self._looks.pop(subject.key, [])
        self._looks[subject.key] = looks
        if looks and looks[-1] in self._live:
            raise Conflict(f"reevaluation {looks[-1].n} of {job_id} has not ended", code="reevaluating")
        if sum(look.subject.spec.tenant == tenant for look in self._live) >= LIVE_PER_TENANT_MAX:
            raise TooMany(f"{LIVE_PER_TENANT_MAX} reevaluations have not ended", retry_after_s=RETRY_AFTER_S)
        self._begun += 1
        look = _Look(subject, looks[-1].n + 1 if looks else 1, message.request, self._world.clock, -self._begun)
        looks.append(look)
        del looks[:-KEPT_PER_JOB_MAX]
        self._forget_oldest()
        self._live.add(look)
        nursery.start_soon(self._look, look, name=f"reevaluation {look.n} of {job_id}")
        return look.record()

    def _forget_oldest(self) -> None:
        """What is kept of more jobs than the bound goes, but for what has not ended."""
        surplus = len(self._looks) - JOBS_KEPT_MAX
        for key in list(self._looks)[: max(0, surplus)]:
            if not self._live.intersection(self._looks[key]):
                del self._looks[key]

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
        shadow, stored = look.shadow, look.subject.stored
        assert stored.stop is not None
        result = RunResult(stop=stored.stop, answer=stored.answer, data=dict(stored.data))
        shadow.grade = await grade(shadow, self._world, job, TotalBudget(shadow.spec.timeouts), result)
        await job.close_sandbox()
        return outcome_of_stop(stored.stop)

    async def _all_of(self, job_id: str, tenant: str | None) -> list[_Look]:
        record = await self._jobs.get(job_id, tenant)
        return self._looks.get((record.tenant, record.job_id), [])

    async def _of(self, job_id: str, tenant: str | None, n: int) -> _Look:
        looks = await self._all_of(job_id, tenant)
        for look in looks:
            if look.n == n:
                return look
        if looks and 1 <= n < looks[0].n:
            raise Forgotten(f"reevaluation {n} of {job_id} is forgotten")
        raise NotFound(f"job {job_id} has no reevaluation {n}", code="unknown_reevaluation")

    async def get(self, job_id: str, tenant: str | None, n: int) -> Reevaluation:
        """One record now."""
        return (await self._of(job_id, tenant, n)).record()

    async def wait_done(self, job_id: str, tenant: str | None, n: int) -> Reevaluation:
        """The record once it has ended. The caller's scope bounds the wait."""
        look = await self._of(job_id, tenant, n)
        await look.done.wait()
        return look.record()

    async def page(self, job_id: str, tenant: str | None) -> ReevaluationPage:
        """All that are kept of a job, newest first."""
        looks = await self._all_of(job_id, tenant)
        return ReevaluationPage(items=[look.record() for look in reversed(looks)])

    async def cancel(self, job_id: str, tenant: str | None, n: int, reason: str) -> Reevaluation:
        """Begin its end; one that has ended stays as it is."""
        look = await self._of(job_id, tenant, n)
        if look in self._live:
            look.shadow.cancel_reason = look.shadow.cancel_reason or reason
            look.shadow.scope.cancel(reason)
        return look.record()


def _scorable(stored: StoredJob, handlers: Registry) -> _Subject:
    """The job with its grader; ``Conflict`` where there is nothing to look at, or its sandbox is gone."""
    spec = stored.spec
    if stored.stop is None:
        raise Conflict(f"job {spec.job_id} never came as far as its grader", code="nothing_to_score")
    if not stored.can_grade:
        message = f"what {spec.handler} left for its grader could not be kept: RunResult.data has to be plain"
        raise Conflict(message, code="data_not_kept")
    try:
        handler = handlers.get(spec.handler)
        instance = accept(handler, spec.instance, spec.agent)
    except RequestError as exc:
        raise Conflict(f"it can't be scored again: {exc.message}", code=exc.stable_code) from exc
    # In a grading sandbox it can be done again: what was carried over is kept with the job.
    if handler.grades_in_sandbox and handler.grading_sandbox(instance) is None:
        message = f"{spec.handler} grades inside the rollout's sandbox, and that is gone"
        raise Conflict(message, code="sandbox_gone")
    return _Subject(stored, handler, instance)


def _shadow(subject: _Subject, request: ReevaluateJob, clock: Clock, serial: int) -> JobEntry:
    """The job as it was when it came to EVAL, with events, times and grade of its own.

    Its sandboxes are named by ``serial``, which no job and no other shadow has.
    """
    stored = subject.stored
    timeouts = msgspec.structs.replace(
        stored.spec.timeouts, total_s=None, eval_s=request.eval_s or stored.spec.timeouts.eval_s
    )
    spec = msgspec.structs.replace(stored.spec, timeouts=timeouts)
    shadow = JobEntry(spec, subject.handler, subject.instance, serial=serial, digest="", size_bytes=0, clock=clock)
    shadow.state = JobState.RUNNING
    shadow.attempts = list(stored.trajectory.job.attempts)
    shadow.past = stored.transcript
    shadow.carried = stored.carried
    return shadow
