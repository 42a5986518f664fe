"""Admission: what is refused, and how what is accepted gets onto the disk before anybody hears of it.

A submit that passes the checks is pending until the journal has it; then it is in the book, and answered. Each writes
for itself, and many share one commit. While one is pending, others of the same id wait for its fate.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any, Final, Protocol

import msgspec
import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.domain.job import JobSpec
from prorld.errors import Conflict, Impossible, Overloaded, RequestError
from prorld.handlers.registry import Registry, accept
from prorld.rollout.archive import Archive, forgotten
from prorld.rollout.book import Book
from prorld.rollout.entry import JobEntry
from prorld.rollout.events import Feed
from prorld.rollout.life import World
from prorld.rollout.messages import Accepted, Submit, SupervisorLimits
from prorld.store.jobs import JobAccepted, Known
from prorld.store.journal import Change
from prorld.wire.jobs import JobRecord

__all__ = ["Acceptance", "Live", "refuse_draining"]

log: FilteringBoundLogger = structlog.get_logger("prorld.rollout")

RETRY_AFTER_FULL_S: Final = 1.0
RETRY_AFTER_DRAIN_S: Final = 10.0
RETRY_AFTER_FAILING_S: Final = 2.0
# What the clients of engines can capture beside tokens: nothing yet, so asking for it is refused and not ignored.
CAPTURES: Final[frozenset[str]] = frozenset()
# No client's body has this digest, so what a client submits under such an id is another job.
OF_A_GROUP: Final = "of a group"


class Live(Protocol):
    """Lets an accepted job live, until it has ended."""

    async def __call__(self, entry: JobEntry) -> None:
        """In the job's own task."""
        ...


def _always(spec: JobSpec) -> None:
    """Nobody objects to any job."""


class _Pending:
    """A submit on its way to the disk, and those of the same id that wait for what becomes of it."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.waiting: list[Submit] = []


class Acceptance:
    """Owns what is pending, and the serial numbers."""

    def __init__(
        self,
        world: World,
        handlers: Registry,
        book: Book,
        archive: Archive,
        feed: Feed,
        *,
        policies: Container[str],
        limits: SupervisorLimits,
        is_draining: Callable[[], bool],
        live: Live,
    ) -> None:
        self._world = world
        self._handlers = handlers
        self._book = book
        self._archive = archive
        self._feed = feed
        self._policies = policies
        self._limits = limits
        self._is_draining = is_draining
        self._live = live
        self._pending: dict[tuple[str, str], _Pending] = {}
        self._pending_bytes = 0
        self._settled = trio.Event()
        self._serial = 0
        self.must_begin: Callable[[JobSpec], None] = _always

    def __len__(self) -> int:
        return len(self._pending)

    def go_on_after(self, serial: int) -> None:
        """The highest number that an earlier life of the daemon gave."""
        self._serial = serial

    async def wait_settled(self) -> None:
        """Wait until nothing is pending."""
        while self._pending:
            await self._settled.wait()
        await trio.lowlevel.checkpoint()

    # --- submits ----------------------------------------------------------------------------------------------------

    def receive(self, message: Submit, nursery: trio.Nursery) -> None:
        """Answer a submit, now or later; never blocks. Each job's task is started into ``nursery``."""
        name, tenant = message.request.job_id, message.tenant
        if name is not None:
            entry = self._book.get(tenant, name)
            if entry is not None:
                self._answer_again(message, entry.digest, entry.record())
                return
            pending = self._pending.get((tenant, name))
            if pending is not None:
                self._let_wait(message, pending)
                return
        try:
            entry = self._entry(message)
        except RequestError as refusal:
            if name is None:
                self._refuse(message, refusal)
            else:
                nursery.start_soon(self._refuse_if_new, message, refusal, name=f"submit {name}")
        except Exception as exc:  # noqa: BLE001  (every error belongs to the asker; the actor goes on)
            self._refuse(message, exc)
        else:
            self._reserve(entry)
            nursery.start_soon(self._accept, message, entry, nursery, name=f"job {entry.spec.job_id}")

    async def _accept(self, message: Submit, entry: JobEntry, nursery: trio.Nursery) -> None:
        """The job's own task: on the disk, then told, then lived. Only a life that ends keeps it from the first."""
        error: Exception | None = None
        known: Known | None = None
        with self._world.last_words.shield() as scope:
            try:
                (known,) = await self._world.journal.commit(_accepted(entry, message.digest, held=False))
            except Exception as exc:  # noqa: BLE001  (likewise)
                error = exc
        waiting = self._release(entry)
        if scope.cancelled_caught:
            error = Overloaded("the disk did not answer in time", retry_after_s=RETRY_AFTER_FAILING_S)
        is_new = error is None and (known is None or _was_never_told(known, message.digest))
        if error is not None:
            self._refuse(message, error)
        elif is_new:
            entry.serial = entry.serial if known is None else known.serial
            self._begin(entry)
            message.reply.answer(Accepted(entry.record(), is_new=True))
        elif known is not None:
            self._answer_known(message, known)
        for other in waiting:
            self.receive(other, nursery)
        if is_new:
            await self._live(entry)

    def _let_wait(self, message: Submit, pending: _Pending) -> None:
        if len(pending.waiting) >= self._limits.mailbox_size:
            refusal = Overloaded("too many wait for the fate of this very job", retry_after_s=RETRY_AFTER_FULL_S)
            self._refuse(message, refusal)
        else:
            pending.waiting.append(message)

    async def _refuse_if_new(self, message: Submit, refusal: RequestError) -> None:
        """A job that ended long ago is still the same job, also while nothing new is accepted."""
        name = message.request.job_id
        assert name is not None
        try:
            known = await self._archive.known(message.tenant, name)
        except RequestError:
            known = None
        if known is None or (known.record is None and known.state != "forgotten"):
            self._refuse(message, refusal)
        else:
            self._answer_known(message, known)

    def _answer_known(self, message: Submit, known: Known) -> None:
        name = message.request.job_id
        assert name is not None
        if known.state == "forgotten":
            self._refuse(message, forgotten(name))
        elif known.record is None:
            # Refused in doubt, and on the disk all the same: it runs at the next start, and is this body's no more.
            self._refuse(message, Conflict(f"job {name} exists with another body", code="job_exists"))
        else:
            self._answer_again(message, known.digest, known.record)

    def _answer_again(self, message: Submit, digest: str, record: JobRecord) -> None:
        if digest == message.digest:
            message.reply.answer(Accepted(record, is_new=False))
        else:
            self._refuse(message, Conflict(f"job {record.job_id} exists with another body", code="job_exists"))

    def _refuse(self, message: Submit, exc: Exception) -> None:
        self._world.metrics.job_refused(exc.stable_code if isinstance(exc, RequestError) else "internal")
        message.reply.fail(exc)

    # --- members of groups ------------------------------------------------------------------------------------------

    async def accept_all(self, specs: Sequence[JobSpec], changes: Sequence[Change], nursery: trio.Nursery) -> None:
        """Accept these jobs together with ``changes``, all or none, and let them live."""
        sizes = [len(msgspec.msgpack.encode(spec.instance)) for spec in specs]
        self._must_fit_at_all(specs, sum(sizes))
        self._must_have_room(len(specs), sum(sizes))
        keys = {(spec.tenant, spec.job_id) for spec in specs}
        if len(keys) < len(specs) or any(key in self._pending or self._book.get(*key) for key in keys):
            raise _taken(specs)
        entries = [self._made(spec, OF_A_GROUP, size) for spec, size in zip(specs, sizes, strict=True)]
        for entry in entries:
            self._reserve(entry)
        written = False
        waiting: list[Submit] = []
        try:
            with self._world.last_words.shield():
                await self._world.journal.commit(*map(_New, entries), *changes)
                written = True
        finally:
            for entry in entries:
                waiting += self._release(entry)
                if written:
                    self._begin(entry)
                    nursery.start_soon(self._live, entry, name=f"job {entry.spec.job_id}")
            for message in waiting:
                self.receive(message, nursery)
        if not written:
            raise Overloaded("the disk did not answer in time", retry_after_s=RETRY_AFTER_FAILING_S)

    def room(self) -> int:
        """How many more jobs may be accepted now."""
        if self._is_draining() or self._disk_trouble() is not None:
            return 0
        return max(0, self._limits.jobs_max - len(self._book) - len(self._pending))

    # --- checks -----------------------------------------------------------------------------------------------------

    def _must_have_room(self, jobs: int, size_bytes: int) -> None:
        if self._is_draining():
            raise refuse_draining()
        trouble = self._disk_trouble()
        if trouble is not None:
            raise Overloaded(trouble, retry_after_s=RETRY_AFTER_FAILING_S, code="journal_failing")
        there = len(self._book) + len(self._pending)
        if there + jobs > self._limits.jobs_max:
            raise Overloaded(f"{there} jobs are accepted already", retry_after_s=RETRY_AFTER_FULL_S)
        if self._book.bytes + self._pending_bytes + size_bytes > self._limits.accepted_bytes_max:
            raise Overloaded("the accepted jobs fill the memory set aside for them", retry_after_s=RETRY_AFTER_FULL_S)

    def _must_fit_at_all(self, specs: Sequence[JobSpec], size_bytes: int) -> None:
        """``Impossible`` for what no waiting would make possible."""
        limits = self._limits
        if len(specs) > limits.jobs_max or size_bytes > limits.accepted_bytes_max:
            words = f"{len(specs)} jobs of {size_bytes} bytes are more than may be accepted at all"
            raise Impossible(words, code="too_large")
        for spec in specs:
            if spec.policy not in self._policies:
                raise Impossible(f"there is no policy {spec.policy!r}", code="unknown_policy")

    def _disk_trouble(self) -> str | None:
        journal = self._world.journal
        return journal.scarce if journal.trouble is None else f"nothing can be accepted: {journal.trouble}"

    def _entry(self, message: Submit) -> JobEntry:
        request = message.request
        if message.requeued_from is not None:
            self._group_must_live(message.requeued_from, message.tenant, request.group_id)
        self._must_have_room(1, message.size_bytes)
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
        spec = JobSpec(**fields, tenant=message.tenant, requeued_from=message.requeued_from)
        self.must_begin(spec)
        return self._made(spec, message.digest, message.size_bytes)

    def _group_must_live(self, job_id: str, tenant: str, group: str | None) -> None:
        """``Conflict`` where a job can't be requeued because the baseline of its group is settled."""
        if group is not None and not any(other.spec.group_id == group for other in self._book.live(tenant)):
            raise Conflict(f"job {job_id} is of group {group}, and that has ended", code="group_ended")

    def _made(self, spec: JobSpec, digest: str, size_bytes: int) -> JobEntry:
        handler = self._handlers.get(spec.handler)
        instance = accept(handler, spec.instance, spec.agent)
        self._serial += 1
        return JobEntry(
            spec,
            handler,
            instance,
            serial=self._serial,
            digest=digest,
            size_bytes=size_bytes,
            clock=self._world.clock,
            tell=partial(self._feed.of_job, spec.tenant, spec.job_id),
            journal=self._world.journal,
        )

    # --- what is pending --------------------------------------------------------------------------------------------

    def _reserve(self, entry: JobEntry) -> None:
        self._pending[entry.spec.tenant, entry.spec.job_id] = _Pending(entry.request_bytes)
        self._pending_bytes += entry.request_bytes

    def _release(self, entry: JobEntry) -> list[Submit]:
        pending = self._pending.pop((entry.spec.tenant, entry.spec.job_id))
        self._pending_bytes -= pending.size_bytes
        if not self._pending:
            self._settled.set()
            self._settled = trio.Event()
        return pending.waiting

    def _begin(self, entry: JobEntry) -> None:
        """It is on the disk: from now on it is there for everybody."""
        self._book.add(entry)
        entry.accepted()
        self._world.metrics.job_accepted(entry.spec.handler)
        # At debug: the one line at its end says it all, and each line costs as much as a stage.
        log.debug("job.queued", job_id=entry.spec.job_id, handler=entry.spec.handler, tenant=entry.spec.tenant)


class _New:
    """A job that must be the first of its id: one that is not undoes whatever is written together with it."""

    def __init__(self, entry: JobEntry) -> None:
        self._spec = entry.spec
        self._accepted = _accepted(entry, entry.digest, held=True)

    def apply(self, db: sqlite3.Connection) -> None:
        """Write it. ``Conflict`` where its id is taken."""
        if self._accepted.apply(db) is not None:
            raise _taken([self._spec])

    def disown(self, db: sqlite3.Connection) -> None:
        """It was refused."""
        self._accepted.disown(db)


def _accepted(entry: JobEntry, digest: str, *, held: bool) -> JobAccepted:
    return JobAccepted(
        serial=entry.serial,
        spec=entry.spec,
        digest=digest,
        request_bytes=entry.request_bytes,
        created_at=entry.created_at,
        held=held,
    )


def _was_never_told(known: Known, digest: str) -> bool:
    """It lives on the disk and not in the book: refused in doubt, when the disk did not say whether it took it."""
    return known.state == "live" and known.digest == digest


def _taken(specs: Sequence[JobSpec]) -> Conflict:
    names = ", ".join(spec.job_id for spec in specs[:4])
    return Conflict(f"not all of these are new: {names}", code="job_exists")


def refuse_draining() -> Overloaded:
    """What is said while nothing is accepted any more."""
    return Overloaded("the daemon is draining", retry_after_s=RETRY_AFTER_DRAIN_S, code="draining")
