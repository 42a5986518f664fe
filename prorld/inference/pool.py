"""The pool of engines as the rest of the daemon sees it: add, replace, drain, remove, list, lease.

Who is there is kept in ``engines``, who gets which is decided in ``desk``, who is well is found out in ``watch``, and a
whole set is exchanged in ``replacement``. Methods change state only between two awaits, so no message box stands in
front of them; ``run`` is the task that watches the engines' health and closes them at the end. The pool never looks
into a request or a reply.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager

import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.domain.backends import BackendState
from prorld.domain.versions import PolicyVersion
from prorld.errors import BackendError, BadRequest, Conflict, Overloaded
from prorld.inference.contract import Backend, Capabilities
from prorld.inference.desk import Desk
from prorld.inference.engines import BACKENDS_MAX, Engines, same_address
from prorld.inference.lease import Lease
from prorld.inference.pool_entry import EngineRules, PoolEntry, QuarantineCode
from prorld.inference.replacement import Replacement
from prorld.inference.version_keeper import VersionKeeper
from prorld.inference.watch import CLOSE_SECONDS_MAX, Watch, probe
from prorld.kit.cleanup import shielded
from prorld.metrics import EngineSample, Metrics
from prorld.wire.ops import AddBackend, BackendInfo, BackendList, BackendSet, SetBackends

__all__ = ["BackendFactory", "BackendPool"]

log: FilteringBoundLogger = structlog.get_logger()

# Behind every job: nobody waits for a rollout to be scored again as urgently as for the rollout.
SCORE_PRIORITY = -(1 << 30)

# Makes the client of an engine; must not await, connect or start anything.
BackendFactory = Callable[[AddBackend], Backend]


class BackendPool:
    """The engines of all policies. ``factories`` maps a kind to what makes its client; ids tell the boot."""

    def __init__(
        self,
        factories: Mapping[str, BackendFactory],
        metrics: Metrics,
        *,
        rules: EngineRules | None = None,
        boot_id: str = "",
    ) -> None:
        self._factories = dict(factories)
        self._metrics = metrics
        self._engines = Engines(rules or EngineRules(), boot_id)
        self._desk = Desk(self._engines, metrics)
        self._watch = Watch(self._engines)
        self._reserved: set[tuple[str, str]] = set()
        self._clients: dict[str, Backend] = {}

    @property
    def keeper(self) -> VersionKeeper | None:
        """Who looks at every engine that comes or comes back; without one, all are taken as they are."""
        return self._engines.keeper

    @keeper.setter
    def keeper(self, keeper: VersionKeeper) -> None:
        self._engines.keeper = keeper

    @property
    def changed(self) -> trio.Event:
        """Set when something of the engines is next other than it is now."""
        return self._engines.changed

    @contextmanager
    def client(self, backend: Backend) -> Iterator[None]:
        """For the length of the block, this is the client of its address, and no other is made for it."""
        self._clients[same_address(backend.url)] = backend
        try:
            yield
        finally:
            del self._clients[same_address(backend.url)]

    # --- who is there -------------------------------------------------------------------------------------------------

    def list(self, policy: str | None = None) -> BackendList:
        """The engines of one policy, or of all, in the order they came."""
        infos = [entry.info() for entry in self._engines.of(policy)]
        return BackendList(items=infos, generation=self._engines.generation(policy))

    def has_engine(self, policy: str) -> bool:
        """Whether a lease on this policy would be given at once."""
        return self._engines.has_offer(policy)

    def check(self, request: AddBackend) -> None:
        """``BadRequest`` for a kind that has no client or an address that can't be; asks nobody."""
        self._make(request)

    async def add(self, request: AddBackend) -> BackendInfo:
        """Probe an engine and take it in.

        Raises ``BadRequest`` for a kind or address that can't be, ``Impossible`` for a policy that there is not,
        ``Conflict`` for one that is there, ``BackendError`` when the probe fails.
        """
        if self.keeper is not None:
            self.keeper.must_know(request.policy)
        with self._reservation(request):
            backend = self._make(request)
            try:
                found = await probe(backend)
                # A set that came meanwhile may have it.
                self._refuse_double(request)
            except BaseException:
                with shielded(CLOSE_SECONDS_MAX, f"closing {request.url}"):
                    await backend.aclose()
                raise
            entry = self._engines.take_in(request, backend, found)
            self._engines.move_on(request.policy)
            return entry.info()

    def restore(self, backend_id: str, request: AddBackend, found: Capabilities, *, draining: bool) -> PoolEntry:
        """Take in an engine that an earlier life of the daemon ``found`` to be so. It is down until it answers.

        Raises as ``add`` does, and asks nobody.
        """
        if self.keeper is not None:
            self.keeper.must_know(request.policy)
        with self._reservation(request):
            entry = self._engines.restore(backend_id, request, self._make(request), found, draining=draining)
        self._engines.move_on(request.policy)
        return entry

    async def replace(self, wanted: SetBackends) -> BackendSet:
        """Make these the engines of a policy, all at once, with no moment in which there is none.

        Raises ``BadRequest``, ``Impossible`` for a policy that there is not, ``Conflict`` where the set has changed
        since the caller looked or somebody changes the policy, and ``NoBackend`` where none of them could be taken;
        then nothing has changed.
        """
        return await Replacement(self._engines, wanted, make=self._make).run()

    @contextmanager
    def _reservation(self, request: AddBackend) -> Iterator[None]:
        key = (request.policy, same_address(request.url))
        if key in self._reserved:
            raise _double(request)
        self._refuse_double(request)
        if len(self._engines) + len(self._reserved) >= BACKENDS_MAX:
            raise Overloaded(f"the pool holds {BACKENDS_MAX} engines already")
        self._reserved.add(key)
        try:
            yield
        finally:
            self._reserved.discard(key)

    def _refuse_double(self, request: AddBackend) -> None:
        known = self._engines.at(request.policy, request.url)
        if known is not None and not known.leaving:
            raise _double(request)

    def _make(self, request: AddBackend) -> Backend:
        factory = self._factories.get(request.kind)
        if factory is None:
            known = ", ".join(sorted(self._factories))
            raise BadRequest(f"no client for engines of kind {request.kind!r}; there are: {known}")
        only = self._clients.get(same_address(request.url))
        if only is not None and only.kind == request.kind:
            return only
        try:
            return factory(request)
        except ValueError as exc:
            raise BadRequest(str(exc), details={"path": "url"}) from exc

    async def drain(self, backend_id: str) -> BackendInfo:
        """No new leases on it from now on; those that are there go on to their end."""
        entry = self._engines.entry(backend_id)
        entry.draining = True
        if entry.takes_calls:
            self._engines.set_state(entry, BackendState.DRAINING)
        log.info("backend.drained", backend=backend_id, leases=entry.row.leases)
        await trio.lowlevel.checkpoint()
        return entry.info()

    async def remove(self, backend_id: str) -> None:
        """Forget it. Calls on it run to their end; its leases move when they call next."""
        entry = self._engines.entry(backend_id)
        backend = self._engines.forget(entry)
        if not entry.leaving:
            self._engines.move_on(entry.policy)
        await backend.aclose()

    # --- who gets which -----------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def lease(self, policy: str, *, group_id: str | None = None) -> AsyncIterator[Lease]:
        """An engine of the policy for the length of the block; waits for one, under the caller's deadline.

        Members of a group come to the same engine as long as it is not much busier than the others.
        """
        entry = await self._desk.assign(policy, group_id=group_id, avoid=())
        lease = Lease(self._desk, policy, group_id, entry)
        try:
            yield lease
        finally:
            lease.release()

    # --- for whoever changes their weights, or has them score tokens --------------------------------------------------

    def entries(self, policy: str | None) -> Sequence[PoolEntry]:
        """The engines of a policy, or of all, in the order they came."""
        return self._engines.of(policy)

    def put_out(self, entry: PoolEntry, code: QuarantineCode, message: str) -> None:
        """It may not serve from now on. Leases on it go elsewhere at their next call."""
        self._engines.put_out(entry, code, message)

    def let_in(self, entry: PoolEntry, version: PolicyVersion) -> None:
        """It serves this version, and has nothing against it any more."""
        self._engines.let_in(entry, version)

    @asynccontextmanager
    async def place(self, entry: PoolEntry, *, prompted: int) -> AsyncIterator[None]:
        """A place in an engine without a lease on it, behind every job. What goes wrong is counted and is no strike.

        It is none of the engine's calls that sample, by which its limit and its stalls are judged.
        """
        place = entry.places.ask(SCORE_PRIORITY)
        began, result = trio.current_time(), "cancelled"
        entry.row.inflight += 1
        with place.scope:
            try:
                if place.admitted is not None:
                    await place.admitted.wait()
                if not entry.can_score:
                    raise entry.gone()
                began = trio.current_time()
                yield
                result = "ok"
            except BackendError as error:
                result = error.stable_code
                raise
            finally:
                entry.row.inflight -= 1
                entry.places.leave(place)
                self._metrics.engine_called(entry.request.kind, result=result, seconds=trio.current_time() - began)
                self._metrics.tokens_counted(entry.policy, prompted=prompted, sampled=0)
        if place.lost is not None:
            raise place.lost

    # --- who is well --------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch the engines until cancelled, then close their sockets. A lease that waits then is told so."""
        await self._watch.run(task_status=task_status)

    def samples(self) -> Iterator[EngineSample]:
        """What is counted of each engine, for Prometheus."""
        now = trio.current_time()
        for entry in self._engines:
            counts = entry.counts
            yield EngineSample(
                backend=entry.backend_id, policy=entry.policy, calls=counts.calls, errors=counts.errors,
                prompted=counts.prompted, sampled=counts.sampled, cached=counts.cached,
                migrated_in=counts.migrated_in, migrated_away=counts.migrated_away, busy_s=counts.busy_s(now),
                inflight=counts.inflight, queued=entry.places.waiting, leases=entry.row.leases,
                call_limit=entry.places.limit, strikes=entry.row.strikes,
            )  # fmt: skip


def _double(request: AddBackend) -> Conflict:
    return Conflict(f"policy {request.policy!r} has {request.url} already", code="backend_exists")
