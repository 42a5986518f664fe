"""Jobs in the journal: what is written when one is accepted, tries, grows and ends, and how it is read again.

Bodies are MessagePack with packed arrays, compressed. What a list shows (the record) lies beside the body, so that a
page of jobs reads no trajectory.
"""

from __future__ import annotations

import sqlite3
from typing import Any, NamedTuple

import msgspec

from prorld.domain.job import Attempt, JobSpec
from prorld.domain.messages import Message
from prorld.domain.outcome import Outcome, OutcomeKind, StopReason
from prorld.store.packing import Damaged, pack, pack_body, unpack
from prorld.store.rows import DAMAGED, Known, known
from prorld.wire.events import GAP, JobEvent
from prorld.wire.jobs import JobRecord
from prorld.wire.trajectory import PackedTrajectory

__all__ = [
    "AttemptBegan",
    "AttemptEnded",
    "JobAccepted",
    "JobEnded",
    "JobGrew",
    "JobsCancelled",
    "Known",
    "LiveJob",
    "StoredJob",
    "live_jobs",
    "newest_serial",
]


class StoredJob(msgspec.Struct, frozen=True, kw_only=True):
    """All of an ended job: what clients read of it, and what a second look needs beyond that.

    ``data`` and ``carried`` are what RUN left for EVAL; ``can_grade`` says whether they could be kept whole.
    """

    spec: JobSpec
    trajectory: PackedTrajectory
    transcript: list[Message] = []
    stop: StopReason | None = None
    answer: str | None = None
    data: dict[str, Any] = {}
    carried: dict[str, bytes] = {}
    can_grade: bool = True
    events: list[JobEvent] = []


class JobAccepted(msgspec.Struct, frozen=True, kw_only=True):
    """A job is accepted. ``apply`` gives ``None``, or the ``Known`` that has its id. ``held``: until acknowledged."""

    serial: int
    spec: JobSpec
    digest: str
    request_bytes: int
    created_at: str
    held: bool = False

    def apply(self, db: sqlite3.Connection) -> Known | None:
        """Write it, unless there is one of this id."""
        spec = self.spec
        done = db.execute(
            "INSERT INTO jobs (serial, tenant, job_id, digest, state, handler, group_id, held, request_bytes,"
            " created_at, spec) VALUES (?, ?, ?, ?, 'live', ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
            (
                self.serial, spec.tenant, spec.job_id, self.digest, spec.handler, spec.group_id, self.held,
                self.request_bytes, self.created_at, pack(spec),
            ),
        )  # fmt: skip
        if done.rowcount:
            return None
        found = known(db, spec.tenant, spec.job_id)
        if found is None:
            raise AssertionError(f"the serial number {self.serial} was given to another job")
        return None if found.serial == self.serial else found

    def disown(self, db: sqlite3.Connection) -> None:
        """It was refused."""
        db.execute("DELETE FROM jobs WHERE serial = ? AND state = 'live'", (self.serial,))


class _Owed(msgspec.Struct, frozen=True, kw_only=True):
    def disown(self, db: sqlite3.Connection) -> None:
        """What has happened is never taken back."""


class AttemptBegan(_Owed, frozen=True, kw_only=True):
    """A try has begun."""

    serial: int
    n: int
    started_at: str

    def apply(self, db: sqlite3.Connection) -> None:
        """Write it."""
        db.execute(
            "INSERT OR IGNORE INTO attempts (serial, n, started_at) VALUES (?, ?, ?)",
            (self.serial, self.n, self.started_at),
        )


class AttemptEnded(_Owed, frozen=True, kw_only=True):
    """A try is over, and another one will follow."""

    serial: int
    attempt: Attempt

    def apply(self, db: sqlite3.Connection) -> None:
        """Write it."""
        attempt = self.attempt
        db.execute(
            "INSERT OR REPLACE INTO attempts (serial, n, started_at, ended) VALUES (?, ?, ?, ?)",
            (self.serial, attempt.n, attempt.started_at, pack(attempt)),
        )


class JobGrew(_Owed, frozen=True, kw_only=True):
    """A live job has events that were not written yet."""

    serial: int
    events: list[JobEvent]

    def apply(self, db: sqlite3.Connection) -> None:
        """Write them, unless the job has ended meanwhile: then they are in its body."""
        db.execute(
            "INSERT OR REPLACE INTO job_events (serial, first, last, events) SELECT serial, ?, ?, ? FROM jobs"
            " WHERE serial = ? AND state = 'live'",
            (self.events[0].seq, self.events[-1].seq, pack(self.events), self.serial),
        )


class JobEnded(_Owed, frozen=True, kw_only=True):
    """A job has ended. The body takes the place of what was written while it lived."""

    serial: int
    record: JobRecord
    stored: StoredJob

    def apply(self, db: sqlite3.Connection) -> None:
        """Write it."""
        body = pack_body(self.stored)
        record = pack(self.record)
        changed = db.execute(
            "UPDATE jobs SET state = 'done', ended_at = ?, record = ?, spec = NULL, kept_bytes = ?"
            " WHERE serial = ? AND state != 'forgotten'",
            (self.record.ended_at, record, len(body) + len(record), self.serial),
        ).rowcount
        if not changed:
            return
        db.execute("INSERT OR REPLACE INTO bodies (serial, body) VALUES (?, ?)", (self.serial, body))
        db.execute("DELETE FROM attempts WHERE serial = ?", (self.serial,))
        db.execute("DELETE FROM job_events WHERE serial = ?", (self.serial,))


class JobsCancelled(_Owed, frozen=True, kw_only=True):
    """Somebody was promised the end of these jobs; those that have ended stay as they are."""

    serials: list[int]
    reason: str

    def apply(self, db: sqlite3.Connection) -> None:
        """Write it; the first reason stands."""
        db.executemany(
            "UPDATE jobs SET cancel = ? WHERE serial = ? AND state = 'live' AND cancel IS NULL",
            [(self.reason, serial) for serial in self.serials],
        )


class LiveJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that an earlier life of the daemon accepted and did not end.

    ``attempts`` are those that ended; ``open_attempt`` is the one that the daemon's end interrupted. Where ``damage``
    says something, what was asked for can't be read any more: ``spec`` names the job and nothing else, and it must not
    run but end as ``lost``. ``cancel`` is the reason of a cancel that was promised.
    """

    serial: int
    spec: JobSpec
    digest: str
    request_bytes: int
    created_at: str
    attempts: list[Attempt] = []
    open_attempt: tuple[int, str] | None = None
    events: list[JobEvent] = []
    held: bool = False
    damage: str = ""
    cancel: str | None = None


class _LiveRow(NamedTuple):
    serial: int
    tenant: str
    job_id: str
    handler: str
    group_id: str | None
    spec: bytes | None
    digest: str
    request_bytes: int
    created_at: str
    held: int
    cancel: str | None


def live_jobs(db: sqlite3.Connection) -> list[LiveJob]:
    """All that have not ended, in the order they were accepted."""
    rows = db.execute(
        "SELECT serial, tenant, job_id, handler, group_id, spec, digest, request_bytes, created_at, held, cancel"
        " FROM jobs WHERE state = 'live' ORDER BY serial"
    ).fetchall()
    return [_live(db, _LiveRow(*row)) for row in rows]


def _live(db: sqlite3.Connection, row: _LiveRow) -> LiveJob:
    damage = ""
    try:
        spec = unpack(row.spec, JobSpec)
    except Damaged as exc:
        damage = f"what was asked for can't be read in the journal any more: {exc}"
        spec = JobSpec(job_id=row.job_id, tenant=row.tenant, handler=row.handler, group_id=row.group_id, instance={})
    ended, left = _attempts(db, row.serial)
    return LiveJob(
        serial=row.serial,
        spec=spec,
        digest=row.digest,
        request_bytes=row.request_bytes,
        created_at=row.created_at,
        attempts=ended,
        open_attempt=left,
        events=_events(db, row.serial),
        held=bool(row.held),
        damage=damage,
        cancel=row.cancel,
    )


def _attempts(db: sqlite3.Connection, serial: int) -> tuple[list[Attempt], tuple[int, str] | None]:
    """Those that ended, and the last one that did not. One that is damaged is told as an end that nobody knows."""
    ended: list[Attempt] = []
    left: tuple[int, str] | None = None
    rows = db.execute("SELECT n, started_at, ended FROM attempts WHERE serial = ? ORDER BY n", (serial,)).fetchall()
    for n, started_at, told in rows:
        if told is None:
            left = (n, started_at)
            continue
        try:
            ended.append(unpack(told, Attempt))
        except Damaged as exc:
            outcome = Outcome(kind=OutcomeKind.LOST, code=DAMAGED, message=f"its end can't be read any more: {exc}")
            ended.append(Attempt(n=n, outcome=outcome, started_at=started_at, ended_at=started_at))
    return ended, left


def _events(db: sqlite3.Connection, serial: int) -> list[JobEvent]:
    """The events, with a gap where some are damaged: a number never means two things."""
    events: list[JobEvent] = []
    rows = db.execute("SELECT last, events FROM job_events WHERE serial = ? ORDER BY first", (serial,)).fetchall()
    for last, told in rows:
        try:
            events += unpack(told, list[JobEvent])
        except Damaged as exc:
            at = events[-1].at if events else ""
            events.append(JobEvent(seq=last, event=GAP, at=at, data={"damaged": str(exc)}))
    return events


def newest_serial(db: sqlite3.Connection) -> int:
    """The highest serial number ever given."""
    found: int | None = db.execute("SELECT max(serial) FROM jobs").fetchone()[0]
    return found or 0
