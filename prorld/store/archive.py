"""Ended jobs of a journal, one after the other, oldest first, whether its daemon runs or is gone.

For programs beside the daemon. Each look into the file is short, so that the daemon's log of writes can be cut back
between them; one job is in memory at a time. All of it blocks.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec

from prorld.domain.outcome import Verdict
from prorld.errors import ConfigError, Forgotten
from prorld.store import schema
from prorld.store.lookups import stored
from prorld.store.rows import COLUMNS, DAMAGED, JobRow
from prorld.wire.jobs import JobRecord
from prorld.wire.trajectory import Trajectory, unpacked

__all__ = ["Archive", "Found", "Wanted"]

ROWS_PER_LOOK: Final = 256
_IN_BATCH: Final = (
    "EXISTS (SELECT 1 FROM groups JOIN batches ON batches.serial = groups.batch WHERE groups.group_id = jobs.group_id"
    " AND batches.batch_id = ? AND batches.tenant = jobs.tenant)"
)
# A variable of SQLite's for each; more are asked for in several looks.
IDS_PER_LOOK: Final = 500


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which jobs; what is left out is not asked of them. ``since`` is an instant as records have them."""

    job_ids: Sequence[str] = ()
    tenant: str | None = None
    group_id: str | None = None
    batch_id: str | None = None
    handler: str | None = None
    since: str | None = None
    verdict: Verdict | None = None


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """One job. Without a ``trajectory`` none was asked for, or ``damage`` says why there is none."""

    record: JobRecord
    trajectory: Trajectory | None = None
    damage: str = ""


class Archive:
    """A journal, to be read. Raises ``ConfigError`` where it can't be. To be closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._db = sqlite3.connect(f"file:{quote(str(path))}?mode=rw", uri=True, isolation_level=None)
            schema.prepare(self._db, writes=False)
            schema.check(self._db, str(path))
        except (sqlite3.Error, OSError) as exc:
            raise self._unreadable(exc) from exc

    def close(self) -> None:
        """Let go of it."""
        self._db.close()

    def found(self, wanted: Wanted, *, trajectories: bool = True) -> Iterator[Found]:
        """The ended jobs that are wanted, in the order in which they were accepted."""
        try:
            for row in self._rows(wanted):
                record = row.read()
                if wanted.verdict is not None and record.verdict is not wanted.verdict:
                    continue
                yield self._whole(row.serial, record) if trajectories else Found(record=record, damage=_damage(record))
        except sqlite3.Error as exc:
            raise self._unreadable(exc) from exc

    def missing(self, job_ids: Sequence[str]) -> dict[str, str]:
        """Of these ids those of no ended job, each with what is known of it: ``unknown``, ``live``, ``forgotten``."""
        states: dict[str, set[str]] = {job_id: set() for job_id in job_ids}
        try:
            for ids in _slices(list(states)):
                text = f"SELECT job_id, state FROM jobs WHERE job_id IN ({_marks(ids)})"  # noqa: S608 - question marks
                for job_id, state in self._db.execute(text, ids):
                    states[job_id].add(state)
        except sqlite3.Error as exc:
            raise self._unreadable(exc) from exc
        return {job_id: max(seen, default="unknown") for job_id, seen in states.items() if "done" not in seen}

    def _rows(self, wanted: Wanted) -> Iterator[JobRow]:
        for ids in _slices(wanted.job_ids) if wanted.job_ids else ((),):
            last = 0
            while True:
                text, values = _statement(wanted, ids, last)
                rows = [JobRow(*row) for row in self._db.execute(text, values).fetchall()]
                yield from rows
                if len(rows) < ROWS_PER_LOOK:
                    break
                last = rows[-1].serial

    def _whole(self, serial: int, record: JobRecord) -> Found:
        try:
            job = stored(self._db, serial)
            if job is None:
                # Forgotten since its row was read, or never written.
                return Found(record=record, damage="its trajectory is not in the journal")
            return Found(record=record, trajectory=unpacked(job.trajectory))
        except (Forgotten, ValueError) as exc:
            return Found(record=record, damage=str(exc))

    def _unreadable(self, exc: Exception) -> ConfigError:
        return ConfigError(f"{self.path} can't be read: {exc}")


def _damage(record: JobRecord) -> str:
    outcome = record.outcome
    return outcome.message if outcome is not None and outcome.code == DAMAGED else ""


def _statement(wanted: Wanted, ids: Sequence[str], last: int) -> tuple[str, list[Any]]:
    where, values = ["state = 'done'", "serial > ?"], list[Any]([last])
    equal = {"tenant": wanted.tenant, "group_id": wanted.group_id, "handler": wanted.handler}
    for column, value in equal.items():
        if value is not None:
            where.append(f"{column} = ?")
            values.append(value)
    if wanted.batch_id is not None:
        where.append(_IN_BATCH)
        values.append(wanted.batch_id)
    if wanted.since is not None:
        where.append("ended_at >= ?")
        values.append(wanted.since)
    if ids:
        where.append(f"job_id IN ({_marks(ids)})")
        values += ids
    text = f"SELECT {COLUMNS} FROM jobs WHERE {' AND '.join(where)} ORDER BY serial LIMIT ?"  # noqa: S608 - constants
    return text, [*values, ROWS_PER_LOOK]


def _marks(values: Sequence[str]) -> str:
    return ", ".join("?" * len(values))


def _slices(values: Sequence[str]) -> Iterator[Sequence[str]]:
    for i in range(0, len(values), IDS_PER_LOOK):
        yield values[i : i + IDS_PER_LOOK]
