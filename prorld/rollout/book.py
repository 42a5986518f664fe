"""The book of jobs: those that live, those that ended and are kept, and the ids of those that are forgotten.

It finds and lists. It admits nothing, and changes no job.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nlargest
from itertools import chain

from prorld.domain.ids import ADMIN_TENANT
from prorld.domain.job import JobState
from prorld.errors import BadRequest, Conflict, Forgotten, NotFound
from prorld.rollout.document import kept_bytes
from prorld.rollout.entry import JobEntry
from prorld.store.memory import MemoryStore
from prorld.wire.jobs import JobPage

__all__ = ["Book"]


class Book:
    """Jobs by tenant and id. A tenant of ``None`` means an admin: all tenants."""

    def __init__(self, *, count_max: int, bytes_max: int) -> None:
        self._live: dict[str, JobEntry] = {}
        self._ended: MemoryStore[JobEntry] = MemoryStore(count_max=count_max, bytes_max=bytes_max)
        self._bytes_max = bytes_max
        self._live_bytes = 0
        self._tenants_of: dict[str, list[str]] = {}

    @property
    def live_count(self) -> int:
        """Jobs that have not ended."""
        return len(self._live)

    @property
    def live_bytes(self) -> int:
        """What the clients of those sent, added up."""
        return self._live_bytes

    @property
    def ended_count(self) -> int:
        """Ended jobs that are kept."""
        return len(self._ended)

    @property
    def ended_share(self) -> float:
        """How much of the memory for ended jobs is used, 1.0 being its bound."""
        return self._ended.bytes_kept / self._bytes_max

    def live(self, tenant: str | None = None) -> Iterator[JobEntry]:
        """Jobs that have not ended, oldest first."""
        return (entry for entry in self._live.values() if tenant is None or entry.spec.tenant == tenant)

    def add(self, entry: JobEntry) -> None:
        """A job was accepted."""
        self._live_bytes += entry.request_bytes
        self._live[_key(entry.spec.tenant, entry.spec.job_id)] = entry
        self._tenants_of.setdefault(entry.spec.job_id, []).append(entry.spec.tenant)

    def end(self, entry: JobEntry) -> None:
        """A job has ended; older ones may be forgotten for it."""
        key = _key(entry.spec.tenant, entry.spec.job_id)
        del self._live[key]
        self._live_bytes -= entry.request_bytes
        for lost in self._ended.put(key, entry, kept_bytes(entry)):
            tenant, _, job_id = lost.partition("\0")
            tenants = self._tenants_of[job_id]
            tenants.remove(tenant)
            if not tenants:
                del self._tenants_of[job_id]

    def known(self, job_id: str, tenant: str) -> JobEntry | None:
        """A tenant's job, or ``None`` where there never was one; ``Forgotten``."""
        key = _key(tenant, job_id)
        if self._ended.forgot(key):
            raise Forgotten(f"job {job_id} has ended and is forgotten")
        return self._there(job_id, tenant)

    def find(self, job_id: str, tenant: str | None) -> JobEntry:
        """The job that a caller means; ``NotFound``, ``Forgotten``, or ``Conflict`` where an admin could mean several.

        An admin means the job of the admins' own tenant where there is one: nobody else can take its name.
        """
        tenants = [tenant] if tenant is not None else self._tenants_of.get(job_id, [])
        found = [entry for entry in (self._there(job_id, candidate) for candidate in tenants) if entry is not None]
        found = [entry for entry in found if entry.spec.tenant == ADMIN_TENANT] or found
        if len(found) > 1:
            owners = sorted(entry.spec.tenant for entry in found)
            message = f"several tenants have a job {job_id}: {', '.join(owners)}"
            raise Conflict(message, code="ambiguous_job", details={"tenants": owners})
        if found:
            return found[0]
        if any(self._ended.forgot(_key(candidate, job_id)) for candidate in tenants):
            raise Forgotten(f"job {job_id} has ended and is forgotten")
        raise NotFound(f"there is no job {job_id}", code="unknown_job")

    def _there(self, job_id: str, tenant: str) -> JobEntry | None:
        key = _key(tenant, job_id)
        return self._live.get(key) or self._ended.get(key)

    def page(
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
        found = (
            entry
            for entry in chain(self._live.values(), self._ended.newest_first())
            if (tenant is None or entry.spec.tenant == tenant)
            and (before is None or entry.serial < before)
            and (state is None or entry.state is state)
            and (handler is None or entry.spec.handler == handler)
            and (group_id is None or entry.spec.group_id == group_id)
        )
        newest = nlargest(limit + 1, found, key=lambda entry: entry.serial)
        page = newest[:limit]
        more = str(page[-1].serial) if len(newest) > limit else None
        return JobPage(items=[entry.record() for entry in page], next=more)


def _serial_of(cursor: str | None) -> int | None:
    if cursor is None:
        return None
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 20):
        raise BadRequest("next is not one that this daemon gave", code="bad_cursor", details={"path": "next"})
    return int(cursor)


def _key(tenant: str, job_id: str) -> str:
    return f"{tenant}\0{job_id}"
