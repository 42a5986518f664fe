"""What a batch asks of the room of jobs, and what it hears from it. ``supervisor.Supervisor`` is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from prorld.domain.job import JobSpec
from prorld.store.jobs import StoredJob
from prorld.store.journal import Change

__all__ = ["EndListener", "Jobs"]

# Told of every job that has ended, once that is on the disk. It may neither block nor raise.
EndListener: TypeAlias = Callable[[StoredJob], None]


class Jobs(Protocol):
    """Jobs that belong to groups."""

    async def start(self, specs: Sequence[JobSpec], *changes: Change) -> None:
        """Accept these jobs, held until acknowledged, and let them run. One commit with ``changes``: all or nothing.

        ``Overloaded`` when there is no room or the disk refuses; ``Conflict`` where one of the ids is taken.
        """
        ...

    def end(self, tenant: str, job_ids: Sequence[str], reason: str) -> None:
        """Begin the end of these, so many per tick; those that are done stay as they are."""
        ...

    def room(self) -> int:
        """How many more jobs may be accepted now."""
        ...

    def listen(self, listener: EndListener) -> None:
        """Call it for every job that ends from now on."""
        ...
