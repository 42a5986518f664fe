"""The supervisor: admission, the book of jobs, and the nursery in which every job lives.

It is an actor: submits come through its bounded mailbox and are answered when the job is accepted. Reading the book and
cancelling are single steps without an await; they are plain methods, so that neither can be refused because a queue is
full. It never changes a job's state (``life`` does) and never waits for slow work.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any

import msgspec
import structlog
import trio

from prorld.domain.job import JobSpec, JobState
from prorld.domain.outcome import STAGES, OutcomeKind
from prorld.errors import Conflict, Impossible, Overloaded, RequestError
from prorld.handlers.registry import Registry, accept
from prorld.kit.cleanup import shielded
from prorld.kit.mailbox import Mailbox, MailboxClosed, Reply
from prorld.rollout.book import Book
from prorld.rollout.document import packed_trajectory, trajectory
from prorld.rollout.entry import JobEntry
from prorld.rollout.events import Feed
from prorld.rollout.life import World, live
from prorld.rollout.messages import Accepted, Ping, Submit, SupervisorLimits
from prorld.wire.events import JobEvent
from prorld.wire.jobs import JobPage, JobRecord, SubmitJob
from prorld.wire.ops import Stages, StagesPatch
from prorld.wire.trajectory import PackedTrajectory, Trajectory

__all__ = ["Accepted", "Supervisor", "SupervisorLimits"]

log = structlog.get_logger("prorld.rollout")

# Cancelling thousands of jobs at once stalls the loop for as long as all of them unwind; so many scopes per tick don't.
CANCELS_PER_TICK = 50
CANCEL_SWEEP_S_MAX = 30.0
RETRY_AFTER_FULL_S = 1.0
RETRY_AFTER_DRAIN_S = 10.0
# What the clients of engines can capture beside tokens: nothing yet, so asking for it is refused and not ignored.
CAPTURES: frozenset[str] = frozenset()


class Supervisor:
    """The book of jobs. ``run`` is the actor."""

    def __init__(
        self,
        world: World,
        handlers: Registry,
        *,
        policies: Container[str],
        limits: SupervisorLimits,
        on_end: Callable[[JobEntry], None] | None = None,
    ) -> None:
        """``policies`` may grow meanwhile. ``on_end`` is told of every job that ends; it may not block or raise."""
        self._world = world
        self._handlers = handlers
        self._policies = policies
        self._limits = limits
        self._mailbox: Mailbox[Submit | Ping] = Mailbox("supervisor", limits.mailbox_size)
        self._book = Book(count_max=limits.results_max_count, bytes_max=limits.results_max_bytes)
        self._feed = Feed(world.clock)
        self._outcomes: Counter[str] = Counter()
        self._serial = 0
        self._draining = False
        self._on_end = on_end
        self._idle = trio.Event()
        self._idle.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Accept and start jobs until cancelled; ends when every job has ended."""
        async with trio.open_nursery() as nursery:
            with self._mailbox.receive() as inbox:
                task_status.started()
                async for message in inbox:
                    if isinstance(message, Ping):
                        message.reply.answer(None)
                    else:
                        self._answer(message, nursery)

    async def ping(self) -> None:
        """Return when the actor has come round to it. ``Overloaded`` and ``MailboxClosed`` as for a submit."""
        await self._mailbox.ask(Ping)

    def _answer(self, message: Submit, nursery: trio.Nursery) -> None:
        try:
            message.reply.answer(self._accept(message, nursery))
        except Exception as exc:  # noqa: BLE001  (every error belongs to the asker; the actor goes on)
            self._world.metrics.job_refused(exc.stable_code if isinstance(exc, RequestError) else "internal")
            message.reply.fail(exc)

    # --- admission --------------------------------------------------------------------------------------------------

    async def submit(self, request: SubmitJob, tenant: str, *, digest: str | None = None) -> tuple[JobRecord, bool]:
        """Accept a job. ``digest`` stands for the body as it was sent: same id and same digest is the same job."""
        body = msgspec.json.encode(request, order="deterministic")
        words = digest or hashlib.sha256(body).hexdigest()

        return await self._ask(partial(Submit, request, tenant, words, len(body), None))

    async def requeue(self, job_id: str, tenant: str | None, new_id: str | None) -> tuple[JobRecord, bool]:
        """Accept the same job once more, under a new id and for the same tenant."""
        old = self._book.find(job_id, tenant).spec
        fields: dict[str, Any] = {name: getattr(old, name) for name in SubmitJob.__struct_fields__}
        fields["job_id"] = new_id
        request = SubmitJob(**fields)
        body = msgspec.json.encode(request, order="deterministic")
        words = hashlib.sha256(f"requeued from {job_id}\n".encode() + body).hexdigest()
        return await self._ask(partial(Submit, request, old.tenant, words, len(body), job_id))

    async def _ask(self, message: Callable[[Reply[Accepted]], Submit]) -> tuple[JobRecord, bool]:
        try:
            accepted = await self._mailbox.ask(message)
        except MailboxClosed as exc:
            # What is accepted is answered first, so a question that is open at the end was not accepted.
            raise self._refuse_draining() from exc
        return accepted.record, accepted.is_new

    def _accept(self, message: Submit, nursery: trio.Nursery) -> Accepted:
        request, tenant = message.request, message.tenant
        if request.job_id is not None:
            known = self._book.known(request.job_id, tenant)
            if known is not None and known.digest != message.digest:
                raise Conflict(f"job {request.job_id} exists with another body", code="job_exists")
            if known is not None:
                return Accepted(known.record(), is_new=False)
        if message.requeued_from is not None:
            self._must_be_over(message.requeued_from, tenant)
        if self._draining:
            raise self._refuse_draining()
        if self._book.live_count >= self._limits.jobs_max:
            raise Overloaded(f"{self._book.live_count} jobs are accepted already", retry_after_s=RETRY_AFTER_FULL_S)
        if self._book.live_bytes + message.size_bytes > self._limits.accepted_bytes_max:
            raise Overloaded("the accepted jobs fill the memory set aside for them", retry_after_s=RETRY_AFTER_FULL_S)
        entry = self._entry(message, self._spec(message))
        self._book.add(entry)
        self._idle = trio.Event() if self._idle.is_set() else self._idle
        nursery.start_soon(live, entry, self._world, self._tell, name=f"job {entry.spec.job_id}")
        self._world.metrics.job_accepted(entry.spec.handler)
        # At debug: the one line at its end says it all, and each line costs as much as a stage.
        log.debug("job.queued", job_id=entry.spec.job_id, handler=entry.spec.handler, tenant=tenant)
        return Accepted(entry.record(), is_new=True)

    def _must_be_over(self, job_id: str, tenant: str) -> None:
        """``Conflict`` where a job can't be requeued: it lives, or the baseline of its group is settled."""
        entry = self._book.find(job_id, tenant)
        if entry.state is not JobState.DONE:
            raise Conflict(f"job {job_id} is {entry.state}; it can be requeued when it is done", code="not_done")
        group = entry.spec.group_id
        if group is not None and not any(other.spec.group_id == group for other in self._book.live(tenant)):
            raise Conflict(f"job {job_id} is of group {group}, and that has ended", code="group_ended")

    def _refuse_draining(self) -> Overloaded:
        return Overloaded("the daemon is draining", retry_after_s=RETRY_AFTER_DRAIN_S, code="draining")

    def _spec(self, message: Submit) -> JobSpec:
        request = message.request
        if request.policy not in self._policies:
            raise Impossible(f"there is no policy {request.policy!r}", code="unknown_policy")
        if request.callback_url is not None:
            raise Impossible("callbacks are off: no callback address is allowed", code="callbacks_off")
        for name in request.capture:
            if name not in CAPTURES:
                raise Impossible(f"can't capture {name!r}", code="unknown_capture")
        fields: dict[str, Any] = {name: getattr(request, name) for name in request.__struct_fields__}
        fields["job_id"] = request.job_id or f"j-{secrets.token_hex(8)}"
        fields["handler"] = self._handlers.select(request.handler, request.instance).name
        return JobSpec(**fields, tenant=message.tenant, requeued_from=message.requeued_from)

    def _entry(self, message: Submit, spec: JobSpec) -> JobEntry:
        handler = self._handlers.get(spec.handler)
        self._serial += 1
        return JobEntry(
            spec,
            handler,
            accept(handler, spec.instance, spec.agent),
            serial=self._serial,
            digest=message.digest,
            size_bytes=message.size_bytes,
            clock=self._world.clock,
            tell=partial(self._feed.of_job, spec.tenant, spec.job_id),
        )

    def _tell(self, entry: JobEntry) -> None:
        """The end of a job: out of the living, into the store, one canonical line in the log."""
        self._book.end(entry)
        record = entry.record()
        if record.outcome is not None and record.verdict is not None:
            kind = record.outcome.kind.value
            self._outcomes[kind] += 1
            self._world.metrics.job_ended(record.handler, outcome=kind, verdict=record.verdict.value)
        if not self._book.live_count:
            self._idle.set()
        log.info("job.done", **_canonical(record))
        if self._on_end is not None:
            self._on_end(entry)

    # --- the book ---------------------------------------------------------------------------------------------------

    def find(self, job_id: str, tenant: str | None) -> JobEntry:
        """A job, for the rest of the room; ``NotFound`` or ``Forgotten``."""
        return self._book.find(job_id, tenant)

    def get(self, job_id: str, tenant: str | None) -> JobRecord:
        """A job's record now."""
        return self._book.find(job_id, tenant).record()

    async def wait_done(self, job_id: str, tenant: str | None) -> JobRecord:
        """The record once the job is done."""
        entry = self._book.find(job_id, tenant)
        await entry.done.wait()
        return entry.record()

    def list(
        self,
        tenant: str | None,
        *,
        state: JobState | None = None,
        handler: str | None = None,
        group_id: str | None = None,
        limit: int = 50,
        after: str | None = None,
    ) -> JobPage:
        """Jobs, newest first. ``after`` is the ``next`` of the page before."""
        return self._book.page(tenant, state=state, handler=handler, group_id=group_id, limit=limit, after=after)

    def trajectory(self, job_id: str, tenant: str | None) -> Trajectory:
        """The trajectory of a job that is done."""
        return trajectory(self._ended(job_id, tenant))

    def packed_trajectory(self, job_id: str, tenant: str | None) -> PackedTrajectory:
        """The same with packed arrays."""
        return packed_trajectory(self._ended(job_id, tenant))

    def _ended(self, job_id: str, tenant: str | None) -> JobEntry:
        entry = self._book.find(job_id, tenant)
        if entry.state is not JobState.DONE:
            raise Conflict(f"job {job_id} is {entry.state}; its trajectory is there when it is done", code="not_done")
        return entry

    def events(self, job_id: str, tenant: str | None, *, after: int = 0, limit: int = 1000) -> Sequence[JobEvent]:
        """The job's events with a higher sequence number."""
        return self._book.find(job_id, tenant).events.after(after, limit)

    def newest_event(self, job_id: str, tenant: str | None) -> int:
        """The highest sequence number of the job's events so far."""
        return self._book.find(job_id, tenant).events.last

    async def wait_event(self, job_id: str, tenant: str | None, *, after: int) -> None:
        """Wait until the job has an event with a higher number, or is done."""
        entry = self._book.find(job_id, tenant)
        if entry.state is not JobState.DONE:
            await entry.events.wait_after(after)

    @property
    def feed(self) -> Feed:
        """The events of all jobs, and of the daemon."""
        return self._feed

    # --- the end ----------------------------------------------------------------------------------------------------

    def cancel(self, job_id: str, tenant: str | None, reason: str) -> JobRecord:
        """Begin the end of a job."""
        entry = self._book.find(job_id, tenant)
        _cancel(entry, reason)
        return entry.record()

    async def cancel_many(
        self, tenant: str | None, *, job_ids: Sequence[str] | None, group_id: str | None, reason: str
    ) -> int:
        """Begin the end of many, so many per tick; how many were still alive."""
        wanted = None if job_ids is None else frozenset(job_ids)
        chosen = [
            entry
            for entry in self._book.live(tenant)
            if (wanted is None or entry.spec.job_id in wanted) and (group_id is None or entry.spec.group_id == group_id)
        ]
        for entry in chosen:
            entry.cancel_reason = entry.cancel_reason or reason
        with shielded(CANCEL_SWEEP_S_MAX, "cancelling many jobs"):
            # Every wait in here is one tick: the client that asked may leave, what it asked for goes on.
            for i in range(0, len(chosen), CANCELS_PER_TICK):
                for entry in chosen[i : i + CANCELS_PER_TICK]:
                    _cancel(entry, reason)
                await trio.lowlevel.checkpoint()
        return len(chosen)

    def drain(self) -> None:
        """Refuse new jobs from now on; those accepted go on."""
        if not self._draining:
            self._draining = True
            self._feed.of_daemon("daemon.draining", jobs=self._book.live_count)

    @property
    def draining(self) -> bool:
        """Whether new jobs are refused."""
        return self._draining

    @property
    def is_idle(self) -> bool:
        """Whether no accepted job is left."""
        return self._book.live_count == 0

    async def wait_idle(self) -> None:
        """Wait until no accepted job is left."""
        while self._book.live_count:
            await self._idle.wait()
        await trio.lowlevel.checkpoint()

    # --- numbers ----------------------------------------------------------------------------------------------------

    def owns_sandbox(self, sandbox_id: str, tenant: str) -> bool:
        """Whether a live job of this tenant has this sandbox."""
        return any(entry.sandbox_id == sandbox_id for entry in self._book.live(tenant))

    def stages(self) -> Stages:
        """The three gates."""
        return self._world.gates.status()

    def set_stages(self, patch: StagesPatch) -> Stages:
        """Resize gates."""
        self._world.gates.resize(patch)
        stages = self.stages()
        self._feed.of_daemon("stage.resized", **{stage: getattr(stages, stage).workers for stage in STAGES})
        return stages

    def counts(self) -> dict[str, int]:
        """Jobs by state; ended ones that are forgotten are not counted."""
        states = Counter(entry.state.value for entry in self._book.live())
        return {state.value: states.get(state.value, 0) for state in JobState} | {
            JobState.DONE.value: self._book.ended_count
        }

    def outcomes(self) -> dict[str, int]:
        """Ended jobs by outcome since the start."""
        return {kind.value: self._outcomes.get(kind.value, 0) for kind in OutcomeKind}

    def results_share(self) -> float:
        """How much of the memory for ended jobs is used, 1.0 being its bound."""
        return self._book.ended_share

    def mailbox_used(self) -> int:
        """Submits that wait to be looked at."""
        return self._mailbox.statistics().used


def _cancel(entry: JobEntry, reason: str) -> None:
    if entry.done.is_set():
        return
    entry.cancel_reason = entry.cancel_reason or reason
    entry.scope.cancel(reason)


def _canonical(record: JobRecord) -> dict[str, Any]:
    """One line that says all of a job."""
    timing = {name: round(getattr(record.timing, name), 3) for name in record.timing.__struct_fields__}
    outcome = record.outcome
    return {
        "job_id": record.job_id,
        "handler": record.handler,
        "tenant": record.tenant,
        "outcome": None if outcome is None else outcome.kind.value,
        "code": None if outcome is None else outcome.code,
        "verdict": None if record.verdict is None else record.verdict.value,
        "stop_reason": record.stop_reason,
        "reward": record.reward,
        "attempts": len(record.attempts),
        "turns": record.turns,
        "sampled": record.tokens.sampled,
        "observed": record.tokens.observed,
        "backends": record.backends,
        **timing,
    }
