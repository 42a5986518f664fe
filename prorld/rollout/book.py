"""The book of live jobs, by tenant and id. It finds; it admits nothing, and changes no job."""

from __future__ import annotations

from collections.abc import Iterator

from prorld.rollout.entry import JobEntry

__all__ = ["Book"]


class Book:
    """Jobs that have not ended. A tenant of ``None`` means an admin: all tenants."""

    def __init__(self) -> None:
        self._live: dict[tuple[str, str], JobEntry] = {}
        self._by_id: dict[str, dict[str, JobEntry]] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._live)

    @property
    def bytes(self) -> int:
        """What the clients of those sent, added up."""
        return self._bytes

    def live(self, tenant: str | None = None) -> Iterator[JobEntry]:
        """Jobs that have not ended, oldest first."""
        return (entry for entry in self._live.values() if tenant is None or entry.spec.tenant == tenant)

    def get(self, tenant: str, job_id: str) -> JobEntry | None:
        """A tenant's job."""
        return self._live.get((tenant, job_id))

    def of_id(self, job_id: str) -> list[JobEntry]:
        """The jobs of this id, of any tenant."""
        return list(self._by_id.get(job_id, {}).values())

    def add(self, entry: JobEntry) -> None:
        """A job was accepted."""
        spec = entry.spec
        self._bytes += entry.request_bytes
        self._live[spec.tenant, spec.job_id] = entry
        self._by_id.setdefault(spec.job_id, {})[spec.tenant] = entry

    def end(self, entry: JobEntry) -> None:
        """A job has ended."""
        spec = entry.spec
        del self._live[spec.tenant, spec.job_id]
        self._bytes -= entry.request_bytes
        tenants = self._by_id[spec.job_id]
        del tenants[spec.tenant]
        if not tenants:
            del self._by_id[spec.job_id]
