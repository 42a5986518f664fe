"""A job's hold on one engine: sticky, counted while it lasts, moved elsewhere when the engine dies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec
import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.errors import BackendError, EngineBusy
from prorld.inference.contract import Capabilities, Generation, GenerationRequest
from prorld.inference.places import Place
from prorld.inference.policy_gate import Flight
from prorld.inference.pool_entry import PoolEntry

__all__ = ["Door", "Lease", "LeaseDesk"]

# What a call passes on its way to an engine and back: the gate of its policy, as the one who calls sees it.
Door = Callable[[str, Capabilities, GenerationRequest], AbstractContextManager[Flight]]

TOO_SLOW = "engine_slow"

# Kept with every call of a rollout; the names that engines give are far shorter.
REQUEST_ID_CHARS_MAX = 256

log: FilteringBoundLogger = structlog.get_logger("prorld.inference")


class LeaseDesk(Protocol):
    """What a lease asks of the pool that gave it out."""

    async def assign(self, policy: str, *, group_id: str | None, avoid: Iterable[str]) -> PoolEntry:
        """Wait for an engine and count a lease on it; one of ``avoid`` only where there is no other."""
        ...

    def unassign(self, entry: PoolEntry) -> None:
        """Give a lease back."""
        ...

    def queued(self, entry: PoolEntry) -> None:
        """The line before the engine has changed."""
        ...

    def succeeded(self, entry: PoolEntry) -> None:
        """A call went well."""
        ...

    def failed(self, entry: PoolEntry, error: BackendError) -> None:
        """A call did not."""
        ...

    def count(self, entry: PoolEntry, result: str, seconds: float, *, prompted: int, sampled: int, cached: int) -> None:
        """A call ended, in whatever way."""
        ...


class Lease:
    """One engine for as long as the pool's ``lease`` block lasts. One task at a time uses it."""

    def __init__(self, desk: LeaseDesk, policy: str, group_id: str | None, entry: PoolEntry) -> None:
        self._desk = desk
        self._policy = policy
        self._group_id = group_id
        self._entry = entry
        self._lacking: str | None = None
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

    @property
    def lacking(self) -> str | None:
        """The code of what a call waits for at the moment: a place in a busy engine."""
        return self._lacking

    async def generate(self, request: GenerationRequest, door: Door | None = None) -> Generation:
        """Sample on the engine held now, in a place within its limit; how the call went is counted.

        An engine that is lost meanwhile ends the call, which then fails and can be made again elsewhere: nothing of an
        answer that comes too late is taken. ``NoBackend`` says that this engine is gone. ``migrate`` is the way on.

        ``door`` is passed when there is a place, so that nothing that waited for one gets by a gate that was closed
        meanwhile.
        """
        entry = self._entry
        if not entry.takes_calls:
            raise entry.gone()
        self._lacking = None
        place = entry.places.ask(request.priority)
        generation: Generation | None = None
        with place.scope:
            try:
                await self._admitted(entry, place)
                # It may have died while this call waited for its place.
                if not entry.takes_calls:
                    raise entry.gone()
                if door is None:
                    generation = await self._call(entry, place, request, None)
                else:
                    with door(self.backend_id, entry.found, request) as flight:
                        generation = await self._call(entry, place, flight.request, flight)
            finally:
                entry.places.leave(place)
        if generation is None:
            raise self._lost(entry, place)
        self._desk.succeeded(entry)
        return generation

    async def _admitted(self, entry: PoolEntry, place: Place) -> None:
        if place.admitted is None:
            return
        self._lacking = EngineBusy.code
        self._desk.queued(entry)
        try:
            await place.admitted.wait()
            self._lacking = None
        finally:
            # Out of the line before it is counted; once admitted it is out already.
            if not place.is_inside:
                entry.places.leave(place)
            self._desk.queued(entry)

    async def _call(
        self, entry: PoolEntry, place: Place, request: GenerationRequest, flight: Flight | None
    ) -> Generation:
        began, result, sampled, cached = trio.current_time(), "cancelled", 0, 0
        if not entry.counts.inflight:
            entry.moved_at = began
        entry.counts.began(began)
        entry.row.inflight += 1
        place.scope.deadline = began + entry.rules.call_s
        try:
            if flight is None:
                generation = await entry.backend.generate(request)
            else:
                with flight.timed(place.scope):
                    generation = await entry.backend.generate(request)
                generation = flight.believe(generation)
            generation = _tidied(generation, request)
            result, sampled, cached = "ok", len(generation.token_ids), generation.cached_tokens or 0
        except BackendError as error:
            result = error.stable_code
            self._desk.failed(entry, error)
            raise
        except AssertionError:
            # A promise of our own was broken; no engine is to blame for that.
            raise
        except Exception as exc:
            log.exception("backend.broken", backend=self.backend_id, kind=entry.request.kind)
            broken = BackendError(f"the client of {self.backend_id} can't make sense of its answer")
            result = broken.stable_code
            self._desk.failed(entry, broken)
            raise broken from exc
        except trio.Cancelled:
            if place.lost is not None:
                result = place.lost.stable_code
            elif trio.current_time() >= place.scope.deadline:
                result = TOO_SLOW
            raise
        finally:
            # What came is whole: it must not be cut off any more on its way back.
            place.scope.deadline = math.inf
            entry.row.inflight -= 1
            seconds = trio.current_time() - began
            self._desk.count(entry, result, seconds, prompted=len(request.token_ids), sampled=sampled, cached=cached)
        return generation

    def _lost(self, entry: PoolEntry, place: Place) -> BackendError:
        """Why the place's scope has ended the call."""
        self._lacking = None
        if place.lost is not None:
            return place.lost
        error = BackendError(f"{entry.backend_id} gave no answer within {entry.rules.call_s:g} s", code=TOO_SLOW)
        self._desk.failed(entry, error)
        return error

    async def migrate(self) -> None:
        """Leave the engine for another one, or come back to it where it is the only one.

        Waits for one as long as the caller's scope allows: a job without an engine spends its own budget and does not
        fail. Cancelled, the lease is where it was.
        """
        before = self._entry
        entry = await self._desk.assign(self._policy, group_id=self._group_id, avoid=(before.backend_id,))
        self._entry = entry
        self._desk.unassign(before)
        if entry is not before:
            self.migrations += 1
            before.counts.migrated_away += 1
            entry.counts.migrated_in += 1

    def release(self) -> None:
        """Give the engine back; for the pool, at the end of the block."""
        self._desk.unassign(self._entry)


def _tidied(generation: Generation, request: GenerationRequest) -> Generation:
    """Without what an engine can't mean in words that are only kept and counted; its tokens are judged elsewhere."""
    cached, named = generation.cached_tokens, generation.engine_request_id
    if cached is not None and not 0 <= cached <= len(request.token_ids):
        generation = msgspec.structs.replace(generation, cached_tokens=None)
    if named is not None and len(named) > REQUEST_ID_CHARS_MAX:
        generation = msgspec.structs.replace(generation, engine_request_id=named[:REQUEST_ID_CHARS_MAX])
    return generation
