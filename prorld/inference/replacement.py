"""A policy's whole set of engines, replaced at once.

First everything that can take time or fail: new engines are probed, side by side. Then one step without an await, in
which the old set becomes the new one. Whoever is cancelled before that step has changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.domain.backends import BackendState
from prorld.domain.versions import PolicyVersion
from prorld.errors import BackendError, BadRequest, Conflict, NoBackend, Overloaded, chain
from prorld.inference.contract import Backend, Capabilities
from prorld.inference.engines import BACKENDS_MAX, Engines, same_address
from prorld.inference.pool_entry import PoolEntry
from prorld.inference.watch import CLOSE_SECONDS_MAX, probe
from prorld.kit.cleanup import afterwards
from prorld.wire.ops import AddBackend, BackendSet, FailedBackend, SetBackend, SetBackends

__all__ = ["Replacement"]

log: FilteringBoundLogger = structlog.get_logger("prorld.inference.pool")

PROBES_AT_ONCE = 64
# However many there are: who has not answered by then has failed its probe.
REPLACE_SECONDS_MAX = 45.0
NAME_SECONDS_MAX = 10.0

# States in which an engine that is named again is taken at its last word.
_KNOWN_WELL = (BackendState.UP, BackendState.SUSPECT, BackendState.DRAINING)


class _Wish:
    """One engine of the new set on its way there."""

    def __init__(self, request: AddBackend, known: PoolEntry | None, client: Backend, *, is_new: bool) -> None:
        self.request = request
        self.known = known
        self.client = client
        # Whether the client was made for this wish, and is to be closed if it comes to nothing.
        self.is_new = is_new
        self.found: Capabilities | None = None
        self.failure: FailedBackend | None = None
        self.differs = False

    def fail(self, code: str, message: str) -> None:
        """It can't be had as it is wished."""
        self.failure = FailedBackend(url=self.request.url, code=code, message=message)


class Replacement:
    """One ``PUT``. ``make`` makes a client."""

    def __init__(self, engines: Engines, wanted: SetBackends, *, make: Callable[[AddBackend], Backend]) -> None:
        self._engines = engines
        self._wanted = wanted
        self._make = make
        # What the caller says that the engines have, as a version of the policy.
        self._declared: PolicyVersion | None = None
        self._wishes: list[_Wish] = []

    async def run(self) -> BackendSet:
        """Do it. Raises ``BadRequest``, ``Conflict``, or ``NoBackend`` where nobody of the new set would take calls."""
        self._check_policy()
        requests = _requests(self._wanted)
        async with afterwards(CLOSE_SECONDS_MAX, "closing unused clients of engines", self._close_unused):
            for request in requests:
                self._wishes.append(self._wish(request))
            await self._probe_all()
            replaced = self._commit()
        if self._declared is not None and self._engines.keeper is not None:
            await self._engines.keeper.keep(self._wanted.policy)
        return replaced

    # --- before ---

    def _check_policy(self) -> None:
        keeper, policy = self._engines.keeper, self._wanted.policy
        if keeper is not None:
            keeper.must_know(policy)
            keeper.must_be_free(policy, self._wanted.pause_id)
        if self._wanted.version is not None:
            version = self._wanted.version
            self._declared = PolicyVersion(0, version) if keeper is None else keeper.declared(policy, version)
        now = self._engines.generation(self._wanted.policy)
        if now != self._wanted.generation:
            raise Conflict(
                f"the engines of policy {self._wanted.policy!r} have changed: their generation is {now}",
                code="generation_moved",
                details={"generation": now},
            )

    def _wish(self, request: AddBackend) -> _Wish:
        known = self._engines.at(request.policy, request.url)
        same = known is not None and (known.request.kind, known.request.model) == (request.kind, request.model)
        # One that is leaving may have left before its probe ends, and its client be closed.
        if known is not None and same and not known.leaving:
            return _Wish(request, known, known.backend, is_new=False)
        return _Wish(request, known, self._make(request), is_new=True)

    async def _probe_all(self) -> None:
        places = trio.CapacityLimiter(PROBES_AT_ONCE)
        with trio.move_on_after(REPLACE_SECONDS_MAX):
            async with trio.open_nursery() as nursery:
                for wish in self._wishes:
                    if self._has_to_answer(wish):
                        nursery.start_soon(self._probe, wish, places, name=f"probe of {wish.request.url}")

    def _has_to_answer(self, wish: _Wish) -> bool:
        known = wish.known
        return wish.is_new or known is None or known.row.state not in _KNOWN_WELL or self._wanted.version is not None

    async def _probe(self, wish: _Wish, places: trio.CapacityLimiter) -> None:
        wish.fail("engine_failed", f"no answer to its probe within {REPLACE_SECONDS_MAX:g} s")
        async with places:
            try:
                wish.found = await self._named(wish.client, await probe(wish.client))
            except BackendError as exc:
                wish.fail(exc.stable_code, chain(exc))
                return
            except Exception as exc:
                log.exception("backend.broken", url=wish.request.url, kind=wish.request.kind)
                wish.fail(BackendError.code, chain(exc))
                return
        wish.failure = None
        said, declared = wish.found.weights, self._declared
        if None not in (said, declared) and said != declared:
            wish.differs = True
            wish.fail("version_differs", f"it says that it has {wish.found.version}, not {self._wanted.version}")

    async def _named(self, client: Backend, found: Capabilities) -> Capabilities:
        """One that was never told a version has the one that the caller says, and reads it back from now on."""
        if self._declared is None or found.weights not in (None, PolicyVersion()):
            return found
        with trio.move_on_after(NAME_SECONDS_MAX):
            await client.set_version(self._declared)
            return msgspec.structs.replace(found, weights=await client.read_version())
        raise BackendError(f"it did not take its version within {NAME_SECONDS_MAX:g} s")

    # --- the step ---

    def _commit(self) -> BackendSet:
        """Old set, new set, and nothing between them."""
        self._check_policy()
        policy = self._wanted.policy
        failed = [wish.failure for wish in self._wishes if wish.failure is not None]
        new = sum(
            wish.found is not None and self._engines.at(policy, wish.request.url) is None for wish in self._wishes
        )
        if len(self._engines) + new > BACKENDS_MAX:
            raise Overloaded(f"the pool can hold {BACKENDS_MAX} engines")
        if not any(self._would_take_leases(wish) for wish in self._wishes):
            words = f"none of the {len(self._wishes)} engines could be taken; policy {policy!r} has those that it had"
            raise NoBackend(words, details={"failed": msgspec.to_builtins(failed)})
        if self._declared is not None and self._engines.keeper is not None:
            self._engines.keeper.has_now(policy, self._declared)
        here = {entry.backend_id for entry in map(self._settle, self._wishes) if entry is not None}
        gone = [entry for entry in self._engines.of(policy) if entry.backend_id not in here and not entry.leaving]
        for entry in gone:
            self._remove(entry)
        self._engines.move_on(policy)
        log.info("backends.replaced", policy=policy, engines=len(here), removed=len(gone), failed=len(failed))
        return BackendSet(
            policy=policy,
            generation=self._engines.generation(policy),
            items=[entry.info() for entry in self._engines.of(policy)],
            failed=failed,
            removed=[entry.backend_id for entry in gone],
        )

    def _settle(self, wish: _Wish) -> PoolEntry | None:
        """The engine in the new set; ``None`` for one that is not there and could not be had."""
        engines = self._engines
        if wish.found is not None:
            entry = engines.take_in(wish.request, wish.client, wish.found)
            wish.is_new = False
            if wish.failure is not None:
                engines.put_out(entry, "version", wish.failure.message)
            return entry
        known = engines.at(wish.request.policy, wish.request.url)
        if known is not None and not wish.is_new:
            engines.renew(known, wish.request)
            if wish.failure is not None:
                # It stays in the set, and comes back by itself when it answers again.
                engines.lose(known, wish.failure.message)
        return known

    def _remove(self, entry: PoolEntry) -> None:
        if self._wanted.removed == "drain":
            self._engines.let_go(entry)
            return
        self._engines.retired.append(self._engines.forget(entry))
        self._engines.abandon(entry, "removed, and its jobs go on elsewhere")

    def _would_take_leases(self, wish: _Wish) -> bool:
        if wish.found is not None:
            keeper = self._engines.keeper
            if wish.differs or keeper is None or self._declared is not None:
                return not wish.differs
            return keeper.objection(wish.request.policy, wish.found) is None
        if wish.known is None or wish.known.leaving:
            return False
        state = wish.known.row.state
        if wish.is_new:
            # What failed is the engine under its new settings; it stays as it was.
            return state in (BackendState.UP, BackendState.SUSPECT)
        return wish.failure is None and state in _KNOWN_WELL

    # --- after ---

    async def _close_unused(self) -> None:
        for wish in self._wishes:
            if wish.is_new:
                await wish.client.aclose()


def _requests(wanted: SetBackends) -> list[AddBackend]:
    urls: set[str] = set()
    return [_request(wanted, item, index, urls) for index, item in enumerate(wanted.backends)]


def _request(wanted: SetBackends, item: SetBackend, index: int, urls: set[str]) -> AddBackend:
    if same_address(item.url) in urls:
        raise BadRequest(f"{item.url} is named twice", details={"path": f"backends[{index}].url"})
    if item.policy not in (None, wanted.policy):
        words = f"an engine of policy {item.policy!r} in the set of {wanted.policy!r}"
        raise BadRequest(words, details={"path": f"backends[{index}].policy"})
    urls.add(same_address(item.url))
    return AddBackend(
        url=item.url, kind=item.kind, policy=wanted.policy, model=item.model, max_inflight=item.max_inflight,
        weight=item.weight, node=item.node,
    )  # fmt: skip
