"""A job's hold on one engine: sticky, counted while it lasts, moved elsewhere when the engine dies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol

import trio

from prorld.errors import BackendError, NoBackend
from prorld.inference.contract import Capabilities, Generation, GenerationRequest
from prorld.inference.policy_gate import Flight
from prorld.inference.pool_entry import PoolEntry

__all__ = ["Door", "Lease", "LeaseDesk"]

# What a call passes on its way to an engine and back: the gate of its policy, as the one who calls sees it.
Door = Callable[[str, Capabilities, GenerationRequest], AbstractContextManager[Flight]]


class LeaseDesk(Protocol):
    """What a lease asks of the pool that gave it out."""

    async def assign(self, policy: str, *, group_id: str | None, slack: float, avoid: Iterable[str]) -> PoolEntry:
        """Wait for an engine and count a lease on it; one of ``avoid`` only where there is no other."""
        ...

    def unassign(self, entry: PoolEntry) -> None:
        """Give a lease back."""
        ...

    def succeeded(self, entry: PoolEntry) -> None:
        """A call went well."""
        ...

    def failed(self, entry: PoolEntry, error: BackendError) -> None:
        """A call did not."""
        ...

    def count(self, entry: PoolEntry, result: str, seconds: float, *, prompted: int, sampled: int) -> None:
        """A call ended, in whatever way."""
        ...


class Lease:
    """One engine for as long as the pool's ``lease`` block lasts. One task at a time uses it."""

    def __init__(self, desk: LeaseDesk, policy: str, group_id: str | None, slack: float, entry: PoolEntry) -> None:
        self._desk = desk
        self._policy = policy
        self._group_id = group_id
        self._slack = slack
        self._entry = entry
        self.migrations = 0

    def __repr__(self) -> str:
        return f"<Lease on {self.backend_id} for {self._policy!r}>"

    @property
    def backend_id(self) -> str:
        """The engine held now."""
        return self._entry.backend_id

    @property
    def capabilities(self) -> Capabilities:
        """What the last probe of the engine held now found."""
        return self._entry.found

    async def generate(self, request: GenerationRequest, door: Door | None = None) -> Generation:
        """Sample on the engine held now, in a place within its bound; how the call went is counted.

        ``NoBackend`` says that this engine is gone and that ``migrate`` is the way on. ``door`` is passed when there is
        a place, so that nothing that waited for one gets by a gate that was closed meanwhile.
        """
        entry = self._entry
        self._assert_there(entry)
        async with entry.limiter:
            # It may have died while this call waited for its place.
            self._assert_there(entry)
            if door is None:
                return await self._ask(entry, request, None)
            with door(self.backend_id, entry.found, request) as flight:
                return await self._ask(entry, flight.request, flight)

    async def _ask(self, entry: PoolEntry, request: GenerationRequest, flight: Flight | None) -> Generation:
        entry.calls_total += 1
        entry.row.inflight += 1
        began, result, sampled = trio.current_time(), "cancelled", 0
        try:
            generation = await entry.backend.generate(request)
            if flight is not None:
                generation = flight.believe(generation)
            result, sampled = "ok", len(generation.token_ids)
        except BackendError as error:
            result = error.stable_code
            self._desk.failed(entry, error)
            raise
        finally:
            entry.row.inflight -= 1
            seconds = trio.current_time() - began
            self._desk.count(entry, result, seconds, prompted=len(request.token_ids), sampled=sampled)
        self._desk.succeeded(entry)
        return generation

    def _assert_there(self, entry: PoolEntry) -> None:
        if not entry.takes_calls:
            state = "removed" if entry.removed else entry.row.state.value
            raise NoBackend(f"engine {entry.backend_id} of policy {self._policy!r} is {state}")

    async def migrate(self) -> None:
        """Leave the engine for another one, or come back to it where it is the only one.

        Waits for one as long as the caller's scope allows: a job without an engine spends its own budget and does not
        fail. Cancelled, the lease is where it was.
        """
        before = self._entry
        entry = await self._desk.assign(
            self._policy, group_id=self._group_id, slack=self._slack, avoid=(before.backend_id,)
        )
        self._entry = entry
        self._desk.unassign(before)
        self.migrations += entry is not before

    def release(self) -> None:
        """Give the engine back; for the pool, at the end of the block."""
        self._desk.unassign(self._entry)
