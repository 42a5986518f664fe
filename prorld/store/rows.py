"""A row of the table of jobs, and what is known of a job by it alone."""

from __future__ import annotations

import sqlite3
from typing import Final, NamedTuple

import msgspec

from prorld.domain.job import JobState, Timing
from prorld.domain.outcome import Outcome, OutcomeKind, Verdict
from prorld.store.packing import Damaged, unpack
from prorld.wire.jobs import JobRecord

__all__ = ["COLUMNS", "DAMAGED", "JobRow", "Known", "known"]

# The code of what can't be read any more.
DAMAGED: Final = "damaged"
COLUMNS: Final = "serial, tenant, job_id, digest, state, handler, group_id, created_at, ended_at, record"
_KNOWN: Final = f"SELECT {COLUMNS} FROM jobs WHERE tenant = ? AND job_id = ?"  # noqa: S608 - constants


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """A job of this id was accepted before. ``record`` is set where it has ended and is not forgotten."""

    serial: int
    digest: str
    state: str
    record: JobRecord | None = None


class JobRow(NamedTuple):
    """A row of ``jobs`` as it is selected here."""

    serial: int
    tenant: str
    job_id: str
    digest: str
    state: str
    handler: str
    group_id: str | None
    created_at: str
    ended_at: str | None
    record: bytes | None

    def read(self) -> JobRecord:
        """The record. Where it is damaged, what the row says all the same, as a job that nobody may train on."""
        try:
            return unpack(self.record, JobRecord)
        except Damaged as exc:
            return self._in_its_place(str(exc))

    def _in_its_place(self, why: str) -> JobRecord:
        words = f"the record of this job in the journal is damaged: {why}"
        return JobRecord(
            job_id=self.job_id,
            handler=self.handler,
            policy="",
            tenant=self.tenant,
            state=JobState.DONE,
            outcome=Outcome(kind=OutcomeKind.LOST, code=DAMAGED, message=words),
            verdict=Verdict.DROP,
            timing=Timing(),
            group_id=self.group_id,
            created_at=self.created_at,
            ended_at=self.ended_at,
        )

    def known(self) -> Known:
        """What is known of it."""
        record = self.read() if self.state == "done" else None
        return Known(serial=self.serial, digest=self.digest, state=self.state, record=record)


def known(db: sqlite3.Connection, tenant: str, job_id: str) -> Known | None:
    """What is known of a tenant's id."""
    row = db.execute(_KNOWN, (tenant, job_id)).fetchone()
    return None if row is None else JobRow(*row).known()
