"""Finding jobs: the live ones in the book, the ended ones in a bounded memory of the latest, else in the journal.

It reads. A live job is found without waiting for anything; only for one that is neither live nor lately ended the disk
is asked, by readers that never wait for the writer.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nlargest

import msgspec

from prorld.domain.ids import ADMIN_TENANT
from prorld.domain.job import JobState
from prorld.errors import BadRequest, Conflict, Forgotten, NotFound
from prorld.rollout.book import Book
from prorld.rollout.document import kept_bytes, record_of
from prorld.rollout.entry import JobEntry
from prorld.store.jobs import Known, StoredJob
from prorld.store.memory import MemoryCache
from prorld.store.reader import Reader
from prorld.wire.jobs import JobPage, JobRecord

__all__ = ["Archive", "Ended"]


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """A job that has ended. ``stored`` is set where it is in memory."""

    serial: int
    digest: str
    record: JobRecord
    stored: StoredJob | None = None


class Archive:
    """Jobs by tenant and id. A tenant of ``None`` means an admin: all tenants."""

    def __init__(self, book: Book, reader: Reader, *, count_max: int, bytes_max: int) -> None:
        self._book = book
        self._reader = reader
        self._ended: MemoryCache[tuple[str, str], Ended] = MemoryCache(count_max=count_max, bytes_max=bytes_max)
        self._count = 0
        # How often something was forgotten, for whoever reads meanwhile.
        self._forgets = 0

    @property
    def count(self) -> int:
        """Ended jobs that are kept, of earlier lives of the daemon as well."""
        return self._count

    async def open(self) -> None:
        """Count what there is; before the first job ends."""
        self._count = (await self._reader.counts()).get("done", 0)

    def put(self, entry: JobEntry, stored: StoredJob) -> None:
        """A job has ended, and that is on the disk."""
        self._count += 1
        spec = entry.spec
        ended = Ended(serial=entry.serial, digest=entry.digest, record=record_of(stored), stored=stored)
        self._ended.put((spec.tenant, spec.job_id), ended, kept_bytes(stored, entry.request_bytes))

    def forget(self, jobs: Iterable[tuple[str, str]]) -> None:
        """These, by tenant and id, are not kept any more."""
        self._forgets += 1
        for key in jobs:
            self._count -= 1
            self._ended.drop(key)

    # --- one job ----------------------------------------------------------------------------------------------------

    async def known(self, tenant: str, job_id: str) -> Known | None:
        """What is known of an id that no live job has."""
        ended = self._ended.get((tenant, job_id))
        if ended is not None:
            return Known(serial=ended.serial, digest=ended.digest, state="done", record=ended.record)
        return await self._reader.known(tenant, job_id)

    async def find(self, job_id: str, tenant: str | None) -> JobEntry | Ended:
        """The job that a caller means; ``NotFound``, ``Forgotten``, or ``Conflict`` where an admin could mean several.

        An admin means the job of the admins' own tenant where there is one: nobody else can take its name.
        """
        owner = ADMIN_TENANT if tenant is None else tenant
        there = self._there(owner, job_id)
        if there is not None:
            return there
        if tenant is None:
            known = await self._reader.candidates(job_id)
        else:
            row = await self._reader.known(tenant, job_id)
            known = {} if row is None else {tenant: row}
        # Asked again: jobs were accepted, and have ended, while the disk was read.
        owners = [tenant] if tenant is not None else [*{*known, *(e.spec.tenant for e in self._book.of_id(job_id))}]
        found = {owner: job for owner in owners if (job := self._there(owner, job_id) or _ended(known.get(owner)))}
        if tenant is None and ADMIN_TENANT in found:
            return found[ADMIN_TENANT]
        if len(found) > 1:
            message = f"several tenants have a job {job_id}: {', '.join(sorted(found))}"
            raise Conflict(message, code="ambiguous_job", details={"tenants": sorted(found)})
        if found:
            return found.popitem()[1]
        if any(row.state == "forgotten" for row in known.values()):
            raise forgotten(job_id)
        raise NotFound(f"there is no job {job_id}", code="unknown_job")

    def _there(self, tenant: str, job_id: str) -> JobEntry | Ended | None:
        return self._book.get(tenant, job_id) or self._ended.get((tenant, job_id))

    async def stored(self, ended: Ended) -> StoredJob:
        """All of an ended job; ``Forgotten``."""
        if ended.stored is not None:
            return ended.stored
        forgets = self._forgets
        stored = await self._reader.stored(ended.serial)
        if stored is None:
            raise forgotten(ended.record.job_id)
        key = (ended.record.tenant, ended.record.job_id)
        if forgets == self._forgets:
            there = msgspec.structs.replace(ended, stored=stored)
            self._ended.put(key, there, kept_bytes(stored, 0))
        return stored

    # --- many -------------------------------------------------------------------------------------------------------

    async def page(
        self,
        tenant: str | None,
        *,
        state: JobState | None,
        handler: str | None,
        group_id: str | None,
        limit: int,
        after: str | None,
    ) -> JobPage:
        """Jobs, newest first. ``after`` is the serial number that a page ended with."""
        before = _serial_of(after)
        found = {
            entry.serial: entry
            for entry in self._book.live(tenant)
            if (before is None or entry.serial < before)
            and (handler is None or entry.spec.handler == handler)
            and (group_id is None or entry.spec.group_id == group_id)
        }
        # Live ones first: a job that ends while the disk is read is then met twice, and not missed.
        ended = await self._reader.page(
            tenant, state=state, handler=handler, group_id=group_id, limit=limit + 1, before_serial=before
        )
        rows = dict(ended)
        there = {serial for serial, entry in found.items() if state is None or entry.state is state}
        newest = nlargest(limit + 1, there | rows.keys())
        more = str(newest[limit - 1]) if len(newest) > limit else None
        return JobPage(items=[rows.get(serial) or found[serial].record() for serial in newest[:limit]], next=more)


def _ended(known: Known | None) -> Ended | None:
    if known is None or known.record is None:
        return None
    return Ended(serial=known.serial, digest=known.digest, record=known.record)


def forgotten(job_id: str) -> Forgotten:
    """What is said of a job whose retention has ended."""
    return Forgotten(f"job {job_id} has ended and is forgotten")


def _serial_of(cursor: str | None) -> int | None:
    if cursor is None:
        return None
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 20):
        raise BadRequest("next is not one that this daemon gave", code="bad_cursor", details={"path": "next"})
    return int(cursor)
