"""The supervisor: the nursery in which every job lives, and what the rooms above may ask of jobs.

It is an actor: submits come through its bounded mailbox, and are answered when the journal has the job. Reading a live
job and beginning the end of one are single steps, so that neither can be refused because a queue is full, nor waits
behind one; only for an ended job the disk may be asked. It never changes a job's state (``life`` does).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec
import structlog
import trio

from prorld.domain.job import JobSpec, JobState
from prorld.domain.outcome import STAGES, OutcomeKind
from prorld.errors import Conflict, Overloaded
from prorld.handlers.registry import Registry
from prorld.kit.cleanup import shielded
from prorld.kit.mailbox import Mailbox, MailboxClosed, Reply
from prorld.rollout.acceptance import Acceptance, refuse_draining
from prorld.rollout.archive import Archive, Ended
from prorld.rollout.book import Book
from prorld.rollout.document import canonical, record_of
from prorld.rollout.entry import JobEntry
from prorld.rollout.events import EventLog, Feed
from prorld.rollout.life import World, live
from prorld.rollout.members import EndListener
from prorld.rollout.messages import Accepted, Ping, Submit, SupervisorLimits
from prorld.rollout.restore import restored
from prorld.store.jobs import JobsCancelled, StoredJob, live_jobs, newest_serial
from prorld.store.journal import Change
from prorld.store.reader import Reader
from prorld.wire.events import JobEvent
from prorld.wire.jobs import JobPage, JobRecord, SubmitJob
from prorld.wire.ops import Stages, StagesPatch
from prorld.wire.trajectory import PackedTrajectory, Trajectory, unpacked

__all__ = ["Accepted", "Supervisor", "SupervisorLimits"]

log = structlog.get_logger("prorld.rollout")

# Cancelling thousands of jobs at once stalls the loop for as long as all of them unwind; so many scopes per tick don't.
CANCELS_PER_TICK = 50
CANCEL_SWEEP_S_MAX = 30.0


class Supervisor:
    """Jobs. ``run`` is the actor."""

    def __init__(
        self,
        world: World,
        handlers: Registry,
        *,
        policies: Container[str],
        limits: SupervisorLimits,
        reader: Reader,
    ) -> None:
        """``policies`` may grow meanwhile. ``reader`` reads the journal of the ``world``."""
        self._world = world
        self._handlers = handlers
        self._policies = policies
        self._mailbox: Mailbox[Submit | Ping] = Mailbox("supervisor", limits.mailbox_size)
        self._book = Book()
        self._archive = Archive(
            self._book, reader, count_max=limits.results_max_count, bytes_max=limits.results_max_bytes
        )
        self._feed = Feed(world.clock)
        self._outcomes: Counter[str] = Counter()
        self._draining = False
        self._listeners: list[EndListener] = []
        self._idle = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._acceptance = Acceptance(
            world, handlers, self._book, self._archive, self._feed,
            policies=policies, limits=limits, is_draining=lambda: self._draining, live=self._live,
        )  # fmt: skip

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Let the jobs of the journal live again, then accept new ones, until cancelled.

        What has not ended by then was told no end; it goes on in the next life of the daemon.
        """
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await self._restore(nursery)
            with self._mailbox.receive() as inbox:
                task_status.started()
                try:
                    async for message in inbox:
                        if isinstance(message, Ping):
                            message.reply.answer(None)
                        else:
                            self._acceptance.receive(message, nursery)
                finally:
                    # Whoever is on the way to the disk learns what became of it before the mailbox closes.
                    self._draining = True
                    self._world.last_words.hurry()
                    with self._world.last_words.shield():
                        await self._acceptance.wait_settled()  # noqa: ASYNC102  (hurried: it has a deadline)

    async def _restore(self, nursery: trio.Nursery) -> None:
        journal = self._world.journal
        await self._archive.open()
        self._acceptance.go_on_after(await journal.read(newest_serial))
        left = await journal.read(live_jobs)
        for past in left:
            spec = past.spec
            tell = partial(self._feed.of_job, spec.tenant, spec.job_id)
            entry = restored(past, self._world, self._handlers, self._policies, tell)
            self._book.add(entry)
            entry.resumes(self._world.boot_id)
            nursery.start_soon(self._live, entry, name=f"job {spec.job_id}")
            # One by one, so that they stand in line in the order in which they were accepted.
            await trio.lowlevel.checkpoint()
        if left:
            log.info("jobs.restored", jobs=len(left))

    async def _live(self, entry: JobEntry) -> None:
        await live(entry, self._world, self._tell)

    def _tell(self, entry: JobEntry, stored: StoredJob) -> None:
        """The end of a job: out of the living, one canonical line in the log, and the word to who listens."""
        self._book.end(entry)
        self._archive.put(entry, stored)
        record = record_of(stored)
        if record.outcome is not None and record.verdict is not None:
            kind = record.outcome.kind.value
            self._outcomes[kind] += 1
            self._world.metrics.job_ended(record.handler, outcome=kind, verdict=record.verdict.value)
        if not self._book:
            self._idle.set()
            self._idle = trio.Event()
        log.info("job.done", **canonical(record))
        for listener in self._listeners:
            listener(stored)

    async def ping(self) -> None:
        """Return when the actor has come round to it. ``Overloaded`` and ``MailboxClosed`` as for a submit."""
        await self._mailbox.ask(Ping)

    # --- admission --------------------------------------------------------------------------------------------------

    async def submit(
        self, request: SubmitJob, tenant: str, *, digest: str | None = None, size_bytes: int | None = None
    ) -> tuple[JobRecord, bool]:
        """Accept a job. ``digest`` stands for the body as it was sent: same id and same digest is the same job.

        Where both are given, that of ``size_bytes``, too, nothing is encoded here.
        """
        if digest is None or size_bytes is None:
            body = msgspec.json.encode(request, order="deterministic")
            digest, size_bytes = digest or hashlib.sha256(body).hexdigest(), len(body)
        return await self._ask(partial(Submit, request, tenant, digest, size_bytes, None))

    async def requeue(self, job_id: str, tenant: str | None, new_id: str | None) -> tuple[JobRecord, bool]:
        """Accept the same job once more, under a new id and for the same tenant."""
        old = (await self.stored(job_id, tenant, "it can be requeued when it is done")).spec
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
            raise refuse_draining() from exc
        return accepted.record, accepted.is_new

    def begin_only_if(self, must_begin: Callable[[JobSpec], None]) -> None:
        """Ask this of every single job before it is accepted; it may raise ``Overloaded``."""
        self._acceptance.must_begin = must_begin

    # --- members of groups ------------------------------------------------------------------------------------------

    async def start(self, specs: Sequence[JobSpec], *changes: Change) -> None:
        """Accept these jobs, held until acknowledged, and let them run. One commit with ``changes``: all or nothing.

        ``Overloaded`` when there is no room or the disk refuses; ``Conflict`` where one of the ids is taken.
        """
        if self._nursery is None:
            raise AssertionError("the supervisor does not run")
        await self._acceptance.accept_all(specs, changes, self._nursery)

    def end(self, tenant: str, job_ids: Sequence[str], reason: str) -> None:
        """Begin the end of these, so many per tick; those that are done stay as they are."""
        found = [entry for job_id in job_ids if (entry := self._book.get(tenant, job_id)) is not None]
        if found and self._nursery is not None:
            self._nursery.start_soon(self._sweep, found, reason, name="cancelling members of groups")

    async def _sweep(self, chosen: Sequence[JobEntry], reason: str) -> None:
        await self._begin_ends(chosen, reason)
        await self._world.journal.owe(_promise(chosen, reason))

    def room(self) -> int:
        """How many more jobs may be accepted now."""
        return self._acceptance.room()

    def listen(self, listener: EndListener) -> None:
        """Call it for every job that ends from now on."""
        self._listeners.append(listener)

    # --- looking ----------------------------------------------------------------------------------------------------

    async def get(self, job_id: str, tenant: str | None) -> JobRecord:
        """A job's record now."""
        return _record(await self._archive.find(job_id, tenant))

    async def wait_done(self, job_id: str, tenant: str | None) -> JobRecord:
        """The record once the job is done."""
        found = await self._archive.find(job_id, tenant)
        if isinstance(found, JobEntry):
            await found.done.wait()
        return _record(found)

    async def list(
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
        return await self._archive.page(
            tenant, state=state, handler=handler, group_id=group_id, limit=limit, after=after
        )

    def live_records(self, state: JobState, limit: int) -> Sequence[JobRecord]:
        """Jobs of all tenants in one state that is not the last, oldest first: what is seen without the disk."""
        found = (entry.record() for entry in self._book.live() if entry.state is state)
        return [record for record, _ in zip(found, range(limit), strict=False)]

    async def trajectory(self, job_id: str, tenant: str | None) -> Trajectory:
        """The trajectory of a job that is done."""
        return unpacked(await self.packed_trajectory(job_id, tenant))

    async def packed_trajectory(self, job_id: str, tenant: str | None) -> PackedTrajectory:
        """The same with packed arrays."""
        return (await self.stored(job_id, tenant, "its trajectory is there when it is done")).trajectory

    async def stored(self, job_id: str, tenant: str | None, otherwise: str) -> StoredJob:
        """All of a job that is done; ``Conflict`` with these words where it is not."""
        found = await self._archive.find(job_id, tenant)
        if isinstance(found, JobEntry) and found.state is not JobState.DONE:
            raise Conflict(f"job {job_id} is {found.state}; {otherwise}", code="not_done")
        if isinstance(found, JobEntry):
            found = await self._archive.find(job_id, found.spec.tenant)
        assert isinstance(found, Ended)
        return await self._archive.stored(found)

    async def follow(self, job_id: str, tenant: str | None) -> EventLog:
        """The job's events, those to come as well; what was found stays, also when the job is forgotten meanwhile."""
        found = await self._archive.find(job_id, tenant)
        if isinstance(found, JobEntry):
            return found.events
        past = EventLog(past=(await self._archive.stored(found)).events)
        past.show(past.last, is_end=True)
        return past

    async def events(self, job_id: str, tenant: str | None, *, after: int = 0, limit: int = 1000) -> Sequence[JobEvent]:
        """The job's events with a higher sequence number."""
        return (await self.follow(job_id, tenant)).after(after, limit)

    @property
    def feed(self) -> Feed:
        """The events of all jobs, and of the daemon."""
        return self._feed

    # --- the end ----------------------------------------------------------------------------------------------------

    async def cancel(self, job_id: str, tenant: str | None, reason: str) -> JobRecord:
        """Begin the end of a job at once; returns when that is on the disk, too, so that a restart keeps to it."""
        found = await self._archive.find(job_id, tenant)
        if isinstance(found, JobEntry):
            _cancel(found, reason)
            await self._promise([found], reason)
        return _record(found)

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
        await self._begin_ends(chosen, reason)
        await self._promise(chosen, reason)
        return len(chosen)

    async def _begin_ends(self, chosen: Sequence[JobEntry], reason: str) -> None:
        for entry in chosen:
            entry.cancel_reason = entry.cancel_reason or reason
        with shielded(CANCEL_SWEEP_S_MAX, "cancelling many jobs"):
            # Every wait in here is one tick: the client that asked may leave, what it asked for goes on.
            for i in range(0, len(chosen), CANCELS_PER_TICK):
                for entry in chosen[i : i + CANCELS_PER_TICK]:
                    _cancel(entry, reason)
                await trio.lowlevel.checkpoint()

    async def _promise(self, chosen: Sequence[JobEntry], reason: str) -> None:
        """Write that they are to end. ``Overloaded`` where the disk refuses: they end now, and it should be known."""
        if not chosen:
            return
        try:
            await self._world.journal.commit(_promise(chosen, reason), grows=False)
        except Overloaded as exc:
            message = f"the end has begun, and could not be written; a restart may undo it: {exc.message}"
            raise Overloaded(message, retry_after_s=exc.retry_after_s, code=exc.stable_code) from exc

    def forget(self, jobs: Iterable[tuple[str, str]]) -> None:
        """These ended jobs, by tenant and id, are not kept any more."""
        self._archive.forget(jobs)

    def drain(self) -> None:
        """Refuse new jobs from now on; those accepted go on."""
        if not self._draining:
            self._draining = True
            self._feed.of_daemon("daemon.draining", jobs=len(self._book))

    @property
    def draining(self) -> bool:
        """Whether new jobs are refused."""
        return self._draining

    @property
    def is_idle(self) -> bool:
        """Whether no accepted job is left."""
        return not self._book and not self._acceptance

    async def wait_idle(self) -> None:
        """Wait until no accepted job is left."""
        while not self.is_idle:
            await self._acceptance.wait_settled()
            if self._book:
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
        """Jobs by state; ``done`` are all that ended and are kept, also those of earlier lives of the daemon."""
        states = Counter(entry.state.value for entry in self._book.live())
        return {state.value: states.get(state.value, 0) for state in JobState} | {
            JobState.DONE.value: self._archive.count
        }

    def outcomes(self) -> dict[str, int]:
        """Ended jobs by outcome since the start."""
        return {kind.value: self._outcomes.get(kind.value, 0) for kind in OutcomeKind}

    def mailbox_used(self) -> int:
        """Submits that wait to be looked at."""
        return self._mailbox.statistics().used


def _cancel(entry: JobEntry, reason: str) -> None:
    if entry.done.is_set():
        return
    entry.cancel_reason = entry.cancel_reason or reason
    entry.scope.cancel(reason)


def _promise(chosen: Sequence[JobEntry], reason: str) -> JobsCancelled:
    return JobsCancelled(serials=[entry.serial for entry in chosen], reason=reason)


def _record(found: JobEntry | Ended) -> JobRecord:
    return found.record() if isinstance(found, JobEntry) else found.record
