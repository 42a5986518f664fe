"""Who gets which: leases on engines, and what their calls say of them. It decides by ``domain`` and ``affinity``."""

from __future__ import annotations

from collections.abc import Iterable

import trio

from prorld.domain.backends import BackendState
from prorld.errors import BackendError, EngineBusy, NoBackend
from prorld.inference.affinity import GROUP_SLACK, shared_home
from prorld.inference.engines import Engines
from prorld.inference.pool_entry import PoolEntry, is_strike, is_unreachable
from prorld.metrics import Metrics

__all__ = ["STRIKES_MAX", "Desk"]

STRIKES_MAX = 3


class Desk:
    """Gives leases out and takes them back; implements ``prorld.inference.lease.LeaseDesk``."""

    def __init__(self, engines: Engines, metrics: Metrics) -> None:
        self._engines = engines
        self._metrics = metrics

    async def assign(self, policy: str, *, group_id: str | None, avoid: Iterable[str]) -> PoolEntry:
        """Wait for an engine and count a lease on it; one of ``avoid`` only where there is no other."""
        shunned = frozenset(avoid)
        engines = self._engines
        await trio.lowlevel.checkpoint()
        while True:
            if engines.ended:
                raise NoBackend(f"policy {policy!r}: the pool has ended", retryable=False)
            chosen = self._pick(policy, group_id, shunned) or self._pick(policy, None, frozenset())
            if chosen is not None:
                if group_id is not None:
                    engines.homes.note(f"{policy}/{group_id}", chosen)
                return engines.entry(chosen)
            await engines.changed.wait()

    def _pick(self, policy: str, group_id: str | None, avoid: frozenset[str]) -> str | None:
        table = self._engines.table(policy)
        if table is None:
            return None
        if group_id is not None:
            rows = table.rows()
            home = shared_home(rows, self._engines.homes.of(f"{policy}/{group_id}"), GROUP_SLACK, avoid)
            if home is not None:
                return table.lease(avoid=[row.backend_id for row in rows if row.backend_id != home])
        return table.lease(avoid)

    def unassign(self, entry: PoolEntry) -> None:
        """Give a lease back."""
        table = self._engines.table(entry.policy)
        if not entry.removed and table is not None:
            table.release(entry.backend_id)
            self._engines.forget_if_left(entry)

    def queued(self, entry: PoolEntry) -> None:
        """The line before an engine has changed; who waits there counts when the next lease is given out."""
        table = self._engines.table(entry.policy)
        if table is not None:
            table.set_queued(entry.backend_id, entry.places.waiting)

    def succeeded(self, entry: PoolEntry) -> None:
        """A call went well, so what was held against the engine is forgotten."""
        entry.call_went_well()
        if entry.row.state is BackendState.SUSPECT:
            self._engines.set_state(entry, entry.reachable_state)

    def failed(self, entry: PoolEntry, error: BackendError) -> None:
        """A call did not go well."""
        entry.counts.failed(error.stable_code)
        if isinstance(error, EngineBusy) and not self._engines.is_paused(entry.policy):
            entry.counts.refused += 1
        if is_strike(error) and not entry.removed and entry.row.state is not BackendState.QUARANTINED:
            entry.row.strikes += 1
            entry.struck_at = trio.current_time()
            if is_unreachable(error) or entry.row.strikes >= STRIKES_MAX:
                self._engines.lose(entry, error.message)
            elif entry.row.state is not BackendState.DOWN:
                self._engines.set_state(entry, entry.reachable_state)

    def count(self, entry: PoolEntry, result: str, seconds: float, *, prompted: int, sampled: int, cached: int) -> None:
        """A call ended, in whatever way."""
        entry.counts.ended(trio.current_time(), prompted=prompted, sampled=sampled, cached=cached)
        self._metrics.engine_called(entry.request.kind, result=result, seconds=seconds)
        self._metrics.tokens_counted(entry.policy, prompted=prompted, sampled=sampled, cached=cached)
