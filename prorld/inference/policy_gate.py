"""The gate of a policy: closed while its weights change, and the versions that a call may come back with.

Every call to an engine goes through it, as a ``Flight``. It owns the flights and a clock of the time it was closed; it
never talks to an engine and decides nothing of versions: ``policy_change`` opens and closes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import trio

from prorld.domain.branch import VersionSpan
from prorld.domain.policy import is_stale
from prorld.domain.versions import PolicyVersion
from prorld.errors import EngineBusy, MalformedReply
from prorld.inference.contract import Capabilities, Generation, GenerationRequest
from prorld.kit.allowance import Allowance

__all__ = ["Flight", "PolicyGate"]

_FIRST = PolicyVersion()


class Flight:
    """One call that is with an engine. ``versions`` are those that were in force since it began, the first one first.

    ``request`` is what the engine is to get: with the salt of the version, so that a prefix that was computed by other
    weights is never met, and the adapter where one is served.
    """

    def __init__(
        self,
        backend_id: str,
        found: Capabilities,
        request: GenerationRequest,
        version: PolicyVersion,
        allowance: Allowance | None,
    ) -> None:
        self.backend_id = backend_id
        self.request = request
        self.versions = [version]
        self.scope = trio.CancelScope()
        self._found = found
        self._allowance = allowance
        self._clock: trio.CancelScope | None = None
        self._left = math.inf
        self._is_frozen = False

    def __repr__(self) -> str:
        return f"<Flight {self.request.request_id} on {self.backend_id}>"

    @property
    def is_frozen(self) -> bool:
        """Whether the engine holds it."""
        return self._is_frozen

    @contextmanager
    def timed(self, scope: trio.CancelScope) -> Iterator[None]:
        """In the block, frozen time does not count for the scope's deadline."""
        self._clock = scope
        try:
            yield
        finally:
            self._clock = None

    def freeze(self) -> None:
        """The engine holds it: neither is slow through its own doing, the engine or whoever waits for it."""
        if self._is_frozen:
            return
        self._is_frozen = True
        if self._allowance is not None:
            self._allowance.hold()
        if self._clock is not None:
            self._left = self._clock.deadline - trio.current_time()
            self._clock.deadline = math.inf

    def thaw(self) -> None:
        """It goes on; fine for one that was not frozen."""
        if not self._is_frozen:
            return
        self._is_frozen = False
        if self._allowance is not None:
            self._allowance.let_go()
        if self._clock is not None:
            self._clock.deadline = trio.current_time() + self._left

    def believe(self, generation: Generation) -> Generation:
        """The reply with the version of every token, or ``MalformedReply`` for one of a version that was not in force.

        An engine names the weights that an adapter was made for and not the adapter, and one without control was never
        told a version; its calls end before the version changes. Both have what was in force at the beginning.
        """
        if self.request.adapter is not None:
            return msgspec.structs.replace(generation, versions=self._as_begun(generation.versions))
        known: list[VersionSpan] = []
        for span in generation.versions:
            said = span.made_by
            if said in self.versions:
                known.append(span)
            elif not self._found.control and said in (None, _FIRST):
                known += self._as_begun([span])
            else:
                says = "no version of ours" if said is None else said.label
                in_force = ", ".join(version.label for version in self.versions)
                raise MalformedReply(
                    f"{self.backend_id} answered with tokens of {says} where {in_force} is in force",
                    code="wrong_version",
                )
        return msgspec.structs.replace(generation, versions=tuple(known))

    def _as_begun(self, spans: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
        now = self.versions[0]
        return tuple(msgspec.structs.replace(span, epoch=now.epoch, version=now.version) for span in spans)


class PolicyGate:
    """The gate of one policy, and what is in force behind it.

    ``on_wrong_version`` is told of an engine that answered under a version that it can't have, ``on_advance`` of every
    other version that is in force; neither may block or raise.
    """

    def __init__(
        self,
        policy: str,
        *,
        version: PolicyVersion = _FIRST,
        adapter: str | None = None,
        rollbacks: Sequence[int] = (),
        max_staleness: int | None = None,
        on_wrong_version: Callable[[str, str], None] | None = None,
        on_advance: Callable[[], None] | None = None,
    ) -> None:
        self.policy = policy
        self.version = version
        self.adapter = adapter
        self.rollbacks = tuple(rollbacks)
        self.max_staleness = max_staleness
        self.cut_total = 0
        self._on_wrong_version = on_wrong_version
        self._on_advance = on_advance
        self._flights: set[Flight] = set()
        self._landed = trio.Event()
        self._opened = trio.Event()
        self._opened.set()
        self._closed_since = 0.0
        self._closed_s = 0.0

    def __repr__(self) -> str:
        return f"<PolicyGate of {self.policy!r} at {self.version.label}, {'open' if self.is_open else 'closed'}>"

    @property
    def is_open(self) -> bool:
        """Whether generations may begin."""
        return self._opened.is_set()

    @property
    def closed_s(self) -> float:
        """How long it has been closed so far, all times together."""
        return self._closed_s + (0.0 if self.is_open else trio.current_time() - self._closed_since)

    def close(self) -> None:
        """No generation begins from now on; fine when it is closed."""
        if self.is_open:
            self._opened = trio.Event()
            self._closed_since = trio.current_time()

    def open(self) -> None:
        """Whoever waits goes on; fine when it is open. A call that is still frozen ends, and is made again."""
        if self.is_open:
            return
        self._closed_s += trio.current_time() - self._closed_since
        # Their engine was removed, or was down when the others were told to go on: nobody will tell it.
        for flight in [flight for flight in self._flights if flight.is_frozen]:
            flight.thaw()
            flight.scope.cancel("the policy went on without its engine")
        self._opened.set()

    async def wait_open(self) -> None:
        """Wait until generations may begin. The caller's scope bounds the wait."""
        await self._opened.wait()

    def advance(self, version: PolicyVersion, *, adapter: str | None, rollbacks: Sequence[int]) -> None:
        """Another version is in force, for those in flight as well."""
        self.version = version
        self.adapter = adapter
        self.rollbacks = tuple(rollbacks)
        for flight in self._flights:
            if version not in flight.versions:
                flight.versions.append(version)
        if self._on_advance is not None:
            self._on_advance()

    def is_stale(self, sampled: Sequence[PolicyVersion], max_staleness: int | None) -> bool:
        """Whether tokens of these versions are too old to go on with now."""
        return is_stale(sampled, self.version, self.rollbacks, max_staleness)

    # --- calls --------------------------------------------------------------------------------------------------------

    @contextmanager
    def through(
        self, backend_id: str, found: Capabilities, request: GenerationRequest, allowance: Allowance | None = None
    ) -> Iterator[Flight]:
        """Around one call to an engine. ``EngineBusy`` where the gate is closed, and for a call that was cut off."""
        if not self.is_open:
            raise EngineBusy(f"policy {self.policy!r} is paused", code="policy_paused")
        sent = msgspec.structs.replace(request, salt=self.version.label, adapter=self.adapter)
        flight = Flight(backend_id, found, sent, self.version, allowance)
        self._flights.add(flight)
        try:
            with flight.scope:
                yield flight
        except MalformedReply as exc:
            if exc.stable_code == "wrong_version" and self._on_wrong_version is not None:
                self._on_wrong_version(backend_id, exc.message)
            raise
        finally:
            flight.thaw()
            self._flights.discard(flight)
            landed, self._landed = self._landed, trio.Event()
            landed.set()
        if flight.scope.cancelled_caught:
            self.cut_total += 1
            raise EngineBusy(
                f"policy {self.policy!r} is paused, and {backend_id} was not let end", code="policy_paused"
            )

    def in_flight(self, backend_id: str | None = None, *, adapter: str | None = None) -> list[Flight]:
        """The calls that are with an engine, or with all of them; with ``adapter`` those that are on it."""
        return [
            flight
            for flight in self._flights
            if backend_id in (None, flight.backend_id) and (adapter is None or flight.request.adapter == adapter)
        ]

    async def wait_landed(self, backend_id: str | None = None, *, adapter: str | None = None) -> None:
        """Wait until there is no such call. The caller's scope bounds the wait."""
        await trio.lowlevel.checkpoint()
        while self.in_flight(backend_id, adapter=adapter):
            await self._landed.wait()

    def cut(self, backend_id: str) -> int:
        """End the calls that are with an engine; whoever made them asks again. How many there were."""
        flights = self.in_flight(backend_id)
        for flight in flights:
            flight.scope.cancel("the policy is paused")
        return len(flights)

    def freeze(self, backend_id: str) -> None:
        """The engine keeps its calls and does not go on with them."""
        for flight in self.in_flight(backend_id):
            flight.freeze()

    def thaw(self, backend_id: str) -> None:
        """The engine goes on with them."""
        for flight in self.in_flight(backend_id):
            flight.thaw()
