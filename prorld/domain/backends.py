"""Which engine a job gets: a table of engines and the pure decisions over it.

The pool actor in ``prorld.inference.pool`` owns one table and does what these functions say.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from enum import StrEnum

import msgspec


class BackendState(StrEnum):
    """``up`` takes leases; ``suspect`` had strikes and takes them last; ``draining`` takes none; ``down`` is away."""

    UP = "up"
    SUSPECT = "suspect"
    DRAINING = "draining"
    DOWN = "down"
    QUARANTINED = "quarantined"


class BackendRow(msgspec.Struct, kw_only=True):
    """One engine as the pool sees it. ``leases`` counts live ones only, never what was assigned in the past.

    ``queued`` counts calls that wait for a place in the engine.
    """

    backend_id: str
    weight: float = 1.0
    max_inflight: int | None = None
    state: BackendState = BackendState.UP
    leases: int = 0
    inflight: int = 0
    queued: int = 0
    strikes: int = 0
    assigned_total: int = 0

    @property
    def load(self) -> float:
        """How busy it is for its weight. A call that finds no place counts as one more lease: the engine is full."""
        return (self.leases + self.queued) / self.weight


class BackendTable:
    """A min-heap over live leases with lazily invalidated entries."""

    def __init__(self) -> None:
        self._rows: dict[str, BackendRow] = {}
        self._stamps: dict[str, int] = {}
        self._heap: list[tuple[float, int, int, str, int]] = []
        self._tie = itertools.count()

    def __contains__(self, backend_id: object) -> bool:
        return backend_id in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self) -> tuple[BackendRow, ...]:
        """All engines, in the order they were added."""
        return tuple(self._rows.values())

    def row(self, backend_id: str) -> BackendRow:
        """One engine; KeyError when it is gone."""
        return self._rows[backend_id]

    def add(self, row: BackendRow) -> None:
        """Add an engine; it joins with its live leases, so a late one fills up fairly and not all at once."""
        self._rows[row.backend_id] = row
        self._touch(row)

    def remove(self, backend_id: str) -> BackendRow | None:
        """Forget an engine. Leases on it find out at their next call."""
        self._stamps.pop(backend_id, None)
        return self._rows.pop(backend_id, None)

    def set_state(self, backend_id: str, state: BackendState) -> None:
        """Change an engine's state; only ``up`` and ``suspect`` are offered to new leases."""
        row = self._rows[backend_id]
        row.state = state
        self._touch(row)

    def set_weight(self, backend_id: str, weight: float) -> None:
        """Another share of the leases from now on."""
        row = self._rows[backend_id]
        row.weight = weight
        self._touch(row)

    def set_queued(self, backend_id: str, queued: int) -> None:
        """So many calls wait for a place in it now; fine when the engine is gone meanwhile."""
        row = self._rows.get(backend_id)
        if row is not None and row.queued != queued:
            row.queued = queued
            self._touch(row)

    def lease(self, avoid: Iterable[str] = ()) -> str | None:
        """The least loaded engine, with one lease more; ``None`` where none can take one."""
        shunned = frozenset(avoid)
        kept: list[tuple[float, int, int, str, int]] = []
        chosen: BackendRow | None = None
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._stamps.get(entry[3]) != entry[4]:
                continue
            kept.append(entry)
            if entry[3] not in shunned:
                chosen = self._rows[entry[3]]
                break
        for entry in kept:
            heapq.heappush(self._heap, entry)
        if chosen is None:
            return None
        chosen.leases += 1
        chosen.assigned_total += 1
        self._touch(chosen)
        return chosen.backend_id

    def release(self, backend_id: str) -> None:
        """Give a lease back; fine when the engine is gone meanwhile."""
        row = self._rows.get(backend_id)
        if row is None:
            return
        if row.leases < 1:
            raise AssertionError(f"{backend_id} has no lease to give back")
        row.leases -= 1
        self._touch(row)

    def _touch(self, row: BackendRow) -> None:
        stamp = self._stamps.get(row.backend_id, 0) + 1
        self._stamps[row.backend_id] = stamp
        if row.state in (BackendState.UP, BackendState.SUSPECT):
            # A suspect engine counts as far busier than any other, so it gets a lease only when there is nothing else.
            load = row.load + (1e9 if row.state is BackendState.SUSPECT else 0.0)
            heapq.heappush(self._heap, (load, row.inflight, next(self._tie), row.backend_id, stamp))
        if len(self._heap) > 64 + 8 * len(self._rows):
            self._heap = [entry for entry in self._heap if self._stamps.get(entry[3]) == entry[4]]
            heapq.heapify(self._heap)
