"""Retention: forgets ended jobs that are too old, too many or too large, the one that ended first before the others.

Never one that is held for somebody who has not acknowledged it yet. Of a forgotten job its id is left, so that it is
never run again by mistake; of those the oldest go when there are too many. It is done in small commits between those of
the others, and space comes back to the file system in steps.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

import msgspec
import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.errors import Overloaded
from prorld.store.journal import Journal
from prorld.store.reader import Reader

__all__ = ["Forget", "Forgotten", "Keep", "Kept", "Retention", "kept"]

log: FilteringBoundLogger = structlog.get_logger("prorld.store")

LOOK_EVERY_S: Final = 30.0
# A forgotten id takes about a hundred bytes of the file.
TOMBSTONES_MAX: Final = 2_000_000
# One commit forgets so many jobs, or those that took so many bytes: a few milliseconds of the writer.
JOBS_PER_COMMIT: Final = 64
BYTES_PER_COMMIT: Final = 8 << 20
TOMBSTONES_PER_COMMIT: Final = 2000
# Free pages that stay in the file, since the next results need them anyway, and how many are given back at once.
FREE_KEPT_BYTES: Final = 64 << 20
PAGES_PER_COMMIT: Final = 256


class Keep(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept at most. Of what is held, nothing counts here."""

    age_s: float
    count_max: int
    bytes_max: int
    tombstones_max: int = TOMBSTONES_MAX


class Kept(NamedTuple):
    """What there is: ended jobs that nobody holds, and ids of forgotten ones."""

    jobs: int
    size: int
    oldest: str | None
    tombstones: int


class Forgotten(NamedTuple):
    """A job of which the id is left."""

    serial: int
    tenant: str
    job_id: str
    size: int


KEPT: Final = (
    "SELECT count(*), coalesce(sum(kept_bytes), 0), min(ended_at) FROM jobs INDEXED BY jobs_to_forget"
    " WHERE state = 'done' AND held = 0"
)
OLDEST: Final = (
    "SELECT serial, tenant, job_id, kept_bytes, ended_at FROM jobs INDEXED BY jobs_to_forget"
    " WHERE state = 'done' AND held = 0 ORDER BY ended_at, serial LIMIT ?"
)


def kept(db: sqlite3.Connection) -> Kept:
    """Count what there is. Walks two indexes: for a reader's thread."""
    count, size, oldest = db.execute(KEPT).fetchone()
    (tombstones,) = db.execute("SELECT count(*) FROM jobs WHERE state = 'forgotten'").fetchone()
    return Kept(count, size, oldest, tombstones)


class _Lasting(msgspec.Struct, frozen=True, kw_only=True):
    def disown(self, db: sqlite3.Connection) -> None:
        """What is forgotten can't be taken back, and nobody minds."""


class Forget(_Lasting, frozen=True, kw_only=True):
    """Forget the oldest while there are ``count`` too many or ``bytes`` too much, or they ended before an instant.

    One commit takes a slice of that; ``apply`` gives what it forgot, nothing when there is nothing left to do.
    """

    count: int
    bytes: int
    before: str

    def apply(self, db: sqlite3.Connection) -> list[Forgotten]:
        """Forget a slice."""
        gone: list[Forgotten] = []
        freed = 0
        for serial, tenant, job_id, size, ended_at in db.execute(OLDEST, (JOBS_PER_COMMIT,)).fetchall():
            is_much = len(gone) < self.count or freed < self.bytes
            if freed >= BYTES_PER_COMMIT or not (is_much or (ended_at or "") < self.before):
                break
            _forget(db, serial)
            gone.append(Forgotten(serial, tenant, job_id, size))
            freed += size
        return gone


def _forget(db: sqlite3.Connection, serial: int) -> None:
    db.execute(
        "UPDATE jobs SET state = 'forgotten', record = NULL, spec = NULL, kept_bytes = 0, digest = '', handler = '',"
        " group_id = NULL, created_at = '', ended_at = NULL WHERE serial = ?",
        (serial,),
    )
    for table in ("bodies", "attempts", "job_events"):
        db.execute(f"DELETE FROM {table} WHERE serial = ?", (serial,))  # noqa: S608 - constants


class _DropTombstones(_Lasting, frozen=True, kw_only=True):
    count: int

    def apply(self, db: sqlite3.Connection) -> int:
        wanted = min(self.count, TOMBSTONES_PER_COMMIT)
        return db.execute(
            "DELETE FROM jobs WHERE serial IN (SELECT serial FROM jobs INDEXED BY jobs_by_state"
            " WHERE state = 'forgotten' ORDER BY serial LIMIT ?)",
            (wanted,),
        ).rowcount


class _Shrink(_Lasting, frozen=True, kw_only=True):
    def apply(self, db: sqlite3.Connection) -> bool:
        """Give some pages back; whether there are more."""
        (free,), (size,) = (db.execute(f"PRAGMA {name}").fetchone() for name in ("freelist_count", "page_size"))
        if free * size <= FREE_KEPT_BYTES:
            return False
        # One page a step: it has to be walked to its end.
        db.execute(f"PRAGMA incremental_vacuum({PAGES_PER_COMMIT})").fetchall()
        return True


class Retention:
    """The actor that forgets. ``on_forgotten`` hears what is gone, and may neither block nor raise."""

    def __init__(
        self,
        journal: Journal,
        reader: Reader,
        keep: Keep,
        *,
        wall: Callable[[], str],
        on_forgotten: Callable[[Sequence[Forgotten]], None] = lambda _: None,
    ) -> None:
        self._journal = journal
        self._reader = reader
        self._keep = keep
        self._wall = wall
        self._on_forgotten = on_forgotten
        self._share = 0.0

    def listen(self, on_forgotten: Callable[[Sequence[Forgotten]], None]) -> None:
        """Tell this one what is gone; it may neither block nor raise."""
        self._on_forgotten = on_forgotten

    @property
    def share(self) -> float:
        """How much of what may be kept was used when it was last looked, 1.0 being all."""
        return self._share

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Look now and then, for as long as the daemon lives."""
        task_status.started()
        while True:
            try:
                await self.look()
            except Overloaded as exc:
                # The journal has told of it already.
                log.debug("journal.failing", error=exc.message)
            await trio.sleep(LOOK_EVERY_S)

    async def look(self) -> int:
        """Forget what is too much now; how many jobs that were. ``Overloaded`` where the disk does not take it."""
        keep, before = self._keep, self._cutoff()
        found = await self._reader.ask(kept)
        self._share = max(found.jobs / keep.count_max, found.size / keep.bytes_max)
        count, size = max(0, found.jobs - keep.count_max), max(0, found.size - keep.bytes_max)
        jobs = freed = 0
        while count or size or (found.oldest is not None and found.oldest < before):
            (gone,) = await self._journal.commit(Forget(count=count, bytes=size, before=before), grows=False)
            if not gone:
                break
            count, size = max(0, count - len(gone)), max(0, size - sum(job.size for job in gone))
            jobs, freed = jobs + len(gone), freed + sum(job.size for job in gone)
            self._on_forgotten(gone)
        await self._tidy(max(0, found.tombstones + jobs - keep.tombstones_max))
        if jobs:
            log.info("journal.forgot", jobs=jobs, bytes=freed)
        return jobs

    async def _tidy(self, tombstones: int) -> None:
        while tombstones > 0:
            (gone,) = await self._journal.commit(_DropTombstones(count=tombstones), grows=False)
            tombstones -= gone or tombstones
        while (await self._journal.commit(_Shrink(), grows=False))[0]:
            pass

    def _cutoff(self) -> str:
        """The instant before which what has ended is too old, written as the clock writes them."""
        now = datetime.fromisoformat(self._wall())
        then = (now - timedelta(seconds=min(self._keep.age_s, (now - _EPOCH).total_seconds()))).astimezone(UTC)
        return f"{then:%Y-%m-%dT%H:%M:%S}.{then.microsecond // 1000:03}Z"


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
