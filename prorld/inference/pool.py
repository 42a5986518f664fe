"""The pool of engines: who is there, who gets which, and who is well.

It owns one ``BackendTable`` per policy and every engine's client. Its methods change state only between two awaits, so
no message box stands in front of them; ``run`` is the task that watches the engines' health and closes them at the end.
It decides by ``prorld.domain.backends`` and ``affinity``, and never looks into a request or a reply.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

import msgspec
import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.domain.backends import BackendRow, BackendState, BackendTable
from prorld.domain.versions import PolicyVersion
from prorld.errors import BackendError, BadRequest, Conflict, NoBackend, NotFound, Overloaded
from prorld.inference.affinity import GroupHomes, shared_home, slack_of
from prorld.inference.contract import Backend, Capabilities
from prorld.inference.lease import Lease
from prorld.inference.pool_entry import PoolEntry, Quarantine, QuarantineCode, is_strike, is_unreachable
from prorld.kit.cleanup import shielded
from prorld.metrics import Metrics
from prorld.wire.ops import AddBackend, BackendInfo, BackendList

__all__ = ["BackendFactory", "BackendPool", "VersionKeeper"]

log: FilteringBoundLogger = structlog.get_logger()

# Makes the client of an engine; must not await, connect or start anything.
BackendFactory = Callable[[AddBackend], Backend]

BACKENDS_MAX = 1024
STRIKES_MAX = 3
PROBE_SECONDS_MAX = 30.0
HEALTH_SECONDS = 1.0
HEALTH_SECONDS_MAX = 2.0
LOAD_ROUNDS = 5
CLOSE_SECONDS_MAX = 5.0

# A fault is forgotten after this long without another one.
FORGIVE_SECONDS = 10.0

# How long an engine that was found down stays so, even if its health check is cheerful.
DOWN_SECONDS_MIN = 5.0


class VersionKeeper(Protocol):
    """Who knows the policies and their versions."""

    def must_know(self, policy: str) -> None:
        """``Impossible`` for a policy that there is not."""
        ...

    def objection(self, policy: str, found: Capabilities) -> str | None:
        """Why an engine of which a probe found this may not serve the policy now; ``None`` where it may."""
        ...


class BackendPool:
    """The engines of all policies. ``factories`` maps a kind to what makes its client.

    ``keeper`` looks at every engine that comes or comes back; without one, all are taken as they are.
    """

    def __init__(self, factories: Mapping[str, BackendFactory], metrics: Metrics) -> None:
        self._factories = dict(factories)
        self._metrics = metrics
        self._entries: dict[str, PoolEntry] = {}
        self._tables: dict[str, BackendTable] = {}
        self._homes = GroupHomes()
        self._reserved: set[tuple[str, str]] = set()
        self._ids = itertools.count(1)
        self._generation = 0
        self._changed = trio.Event()
        self._closed = False
        self.keeper: VersionKeeper | None = None

    # --- who is there -------------------------------------------------------------------------------------------------

    def list(self, policy: str | None = None) -> BackendList:
        """The engines of one policy, or of all, in the order they came."""
        infos = [entry.info() for entry in self._entries.values() if policy in (None, entry.request.policy)]
        return BackendList(items=infos, generation=self._generation)

    def has_engine(self, policy: str) -> bool:
        """Whether a lease on this policy would be given at once."""
        table = self._tables.get(policy)
        offered = (BackendState.UP, BackendState.SUSPECT)
        return table is not None and any(row.state in offered for row in table.rows())

    def versions(self, policy: str) -> frozenset[int | None]:
        """The versions of a policy that can be sampled now; ``None`` for an engine that does not say."""
        return frozenset(
            entry.found.version
            for entry in self._entries.values()
            if entry.request.policy == policy and entry.takes_calls
        )

    def entries(self, policy: str) -> Sequence[PoolEntry]:
        """The engines of a policy, for whoever changes their weights."""
        return [entry for entry in self._entries.values() if entry.request.policy == policy]

    def put_out(self, entry: PoolEntry, code: QuarantineCode, message: str) -> None:
        """It may not serve from now on. Leases on it go elsewhere at their next call."""
        entry.quarantine = Quarantine(code, message)
        self._homes.forget_backend(entry.backend_id)
        if entry.row.state is not BackendState.DOWN:
            self._set_state(entry, BackendState.QUARANTINED)
        log.error("backend.quarantined", backend=entry.backend_id, policy=entry.request.policy, reason=message)

    def let_in(self, entry: PoolEntry, version: PolicyVersion) -> None:
        """It serves this version, and has nothing against it any more."""
        entry.found = msgspec.structs.replace(entry.found, weights=version)
        entry.quarantine = None
        if entry.row.state is not BackendState.DOWN:
            self._set_state(entry, entry.reachable_state)

    @asynccontextmanager
    async def place(self, entry: PoolEntry, *, prompted: int) -> AsyncIterator[None]:
        """For scoring: a place in an engine without a lease on it. What goes wrong is counted and is no strike."""
        async with entry.limiter:
            if not entry.takes_calls:
                raise NoBackend(f"engine {entry.backend_id} is {entry.row.state.value}")
            entry.calls_total += 1
            entry.row.inflight += 1
            began, result = trio.current_time(), "cancelled"
            try:
                yield
                result = "ok"
            except BackendError as error:
                result = error.stable_code
                raise
            finally:
                entry.row.inflight -= 1
                self.count(entry, result, trio.current_time() - began, prompted=prompted, sampled=0)

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
                found = await self._probe(backend)
            except BaseException:
                with shielded(CLOSE_SECONDS_MAX, f"closing {request.url}"):
                    await backend.aclose()
                raise
            return self._take_in(request, backend, found).info()

    @contextmanager
    def _reservation(self, request: AddBackend) -> Iterator[None]:
        key = (request.policy, request.url)
        if key in self._reserved or any((e.request.policy, e.request.url) == key for e in self._entries.values()):
            raise Conflict(f"policy {request.policy!r} has {request.url} already", code="backend_exists")
        if len(self._entries) + len(self._reserved) >= BACKENDS_MAX:
            raise Overloaded(f"the pool holds {BACKENDS_MAX} engines already")
        self._reserved.add(key)
        try:
            yield
        finally:
            self._reserved.discard(key)

    def _make(self, request: AddBackend) -> Backend:
        factory = self._factories.get(request.kind)
        if factory is None:
            known = ", ".join(sorted(self._factories))
            raise BadRequest(f"no client for engines of kind {request.kind!r}; there are: {known}")
        try:
            return factory(request)
        except ValueError as exc:
            raise BadRequest(str(exc), details={"path": "url"}) from exc

    async def _probe(self, backend: Backend) -> Capabilities:
        with trio.move_on_after(PROBE_SECONDS_MAX):
            return await backend.probe()
        raise BackendError(f"{backend.url} did not answer its probe within {PROBE_SECONDS_MAX:g} s")

    def _take_in(self, request: AddBackend, backend: Backend, found: Capabilities) -> PoolEntry:
        backend_id = f"b-{next(self._ids)}"
        row = BackendRow(backend_id=backend_id, weight=request.weight, max_inflight=request.max_inflight)
        entry = PoolEntry(row, request, backend, found)
        self._entries[backend_id] = entry
        objection = None if self.keeper is None else self.keeper.objection(request.policy, found)
        if objection is not None:
            row.state = BackendState.QUARANTINED
            entry.quarantine = Quarantine("version", objection)
            log.error("backend.quarantined", backend=backend_id, policy=request.policy, reason=objection)
        self._tables.setdefault(request.policy, BackendTable()).add(row)
        self._note_change()
        log.info("backend.added", backend=backend_id, policy=request.policy, kind=request.kind, url=request.url)
        return entry

    async def drain(self, backend_id: str) -> BackendInfo:
        """No new leases on it from now on; those that are there go on to their end."""
        entry = self._entry(backend_id)
        entry.draining = True
        if entry.row.state is not BackendState.DOWN:
            self._set_state(entry, BackendState.DRAINING)
        log.info("backend.drained", backend=backend_id, leases=entry.row.leases)
        await trio.lowlevel.checkpoint()
        return entry.info()

    async def remove(self, backend_id: str) -> None:
        """Forget it. Calls on it run to their end; its leases move when they call next."""
        entry = self._entry(backend_id)
        entry.removed = True
        del self._entries[backend_id]
        self._tables[entry.request.policy].remove(backend_id)
        self._homes.forget_backend(backend_id)
        self._note_change()
        log.info("backend.removed", backend=backend_id)
        await entry.backend.aclose()

    def _entry(self, backend_id: str) -> PoolEntry:
        entry = self._entries.get(backend_id)
        if entry is None:
            raise NotFound(f"no engine {backend_id!r}")
        return entry

    # --- who gets which -----------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def lease(
        self, policy: str, *, group_id: str | None = None, group_size: int | None = None
    ) -> AsyncIterator[Lease]:
        """An engine of the policy for the length of the block; waits for one, under the caller's deadline.

        Members of a group come to the same engine as long as it is not much busier than the others.
        """
        slack = slack_of(group_size)
        entry = await self.assign(policy, group_id=group_id, slack=slack, avoid=())
        lease = Lease(self, policy, group_id, slack, entry)
        try:
            yield lease
        finally:
            lease.release()

    async def assign(self, policy: str, *, group_id: str | None, slack: float, avoid: Iterable[str]) -> PoolEntry:
        """For leases: wait for an engine and count one on it; one of ``avoid`` only where there is no other."""
        shunned = frozenset(avoid)
        await trio.lowlevel.checkpoint()
        while True:
            if self._closed:
                raise NoBackend(f"policy {policy!r}: the pool has ended", retryable=False)
            chosen = self._pick(policy, group_id, slack, shunned) or self._pick(policy, None, slack, frozenset())
            if chosen is not None:
                if group_id is not None:
                    self._homes.note(f"{policy}/{group_id}", chosen)
                return self._entries[chosen]
            await self._changed.wait()

    def _pick(self, policy: str, group_id: str | None, slack: float, avoid: frozenset[str]) -> str | None:
        table = self._tables.get(policy)
        if table is None:
            return None
        if group_id is not None:
            rows = table.rows()
            home = shared_home(rows, self._homes.of(f"{policy}/{group_id}"), slack, avoid)
            if home is not None:
                return table.lease(avoid=[row.backend_id for row in rows if row.backend_id != home])
        return table.lease(avoid)

    def unassign(self, entry: PoolEntry) -> None:
        """For leases: give one back."""
        if not entry.removed:
            self._tables[entry.request.policy].release(entry.backend_id)

    # --- who is well --------------------------------------------------------------------------------------------------

    def succeeded(self, entry: PoolEntry) -> None:
        """For leases: a call went well, so what was held against the engine is forgotten."""
        entry.row.strikes = 0
        if entry.row.state is BackendState.SUSPECT:
            self._set_state(entry, entry.reachable_state)

    def failed(self, entry: PoolEntry, error: BackendError) -> None:
        """For leases: a call did not go well."""
        entry.errors_total += 1
        if is_strike(error) and not entry.removed:
            entry.row.strikes += 1
            entry.struck_at = trio.current_time()
            if is_unreachable(error) or entry.row.strikes >= STRIKES_MAX:
                self._lose(entry, error.message)
            else:
                self._set_state(entry, entry.reachable_state)

    def count(self, entry: PoolEntry, result: str, seconds: float, *, prompted: int, sampled: int) -> None:
        """For leases: a call ended, in whatever way."""
        self._metrics.engine_called(entry.request.kind, result=result, seconds=seconds)
        self._metrics.tokens_counted(entry.request.policy, prompted=prompted, sampled=sampled)

    def _lose(self, entry: PoolEntry, reason: str) -> None:
        if entry.row.state is BackendState.DOWN:
            return
        entry.struck_at = trio.current_time()
        self._homes.forget_backend(entry.backend_id)
        self._set_state(entry, BackendState.DOWN)
        log.warning("backend.lost", backend=entry.backend_id, leases=entry.row.leases, reason=reason)

    def _set_state(self, entry: PoolEntry, state: BackendState) -> None:
        if entry.row.state is not state and not entry.removed:
            self._tables[entry.request.policy].set_state(entry.backend_id, state)
            self._note_change()

    def _note_change(self) -> None:
        self._generation += 1
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch the engines until cancelled, then close their sockets. A lease that waits then is told so."""
        task_status.started()
        try:
            async with trio.open_nursery() as nursery:
                for turn in itertools.count():
                    await trio.sleep(HEALTH_SECONDS)
                    for entry in tuple(self._entries.values()):
                        # One that hangs in its own check must not keep the others from theirs.
                        if not entry.in_check:
                            nursery.start_soon(self._check, entry, turn, name=f"health of {entry.backend_id}")
        finally:
            self._closed = True
            self._note_change()
            with trio.move_on_after(CLOSE_SECONDS_MAX, shield=True):
                await self._close_clients()

    async def _close_clients(self) -> None:
        for entry in tuple(self._entries.values()):
            await entry.backend.aclose()

    async def _check(self, entry: PoolEntry, turn: int) -> None:
        entry.in_check = True
        try:
            await self._look_after(entry, turn)
        except Exception:
            # What an engine says, or what a plugin's client makes of it, must not end the pool for all the others.
            log.exception("backend.broken", backend=entry.backend_id, kind=entry.request.kind)
            self._miss(entry)
        finally:
            entry.in_check = False

    async def _look_after(self, entry: PoolEntry, turn: int) -> None:
        answered = False
        with trio.move_on_after(HEALTH_SECONDS_MAX):
            answered = await entry.backend.healthy()
        if entry.removed:
            return
        if not answered:
            self._miss(entry)
            return
        entry.missed = 0
        quiet_seconds = trio.current_time() - entry.struck_at
        if entry.row.state is BackendState.DOWN:
            if quiet_seconds >= DOWN_SECONDS_MIN:
                await self._welcome_back(entry)
        elif entry.row.strikes and quiet_seconds >= FORGIVE_SECONDS:
            entry.row.strikes = 0
            self._set_state(entry, entry.reachable_state)
        if turn % LOAD_ROUNDS == 0:
            await self._read_load(entry)

    def _miss(self, entry: PoolEntry) -> None:
        entry.missed += 1
        if entry.missed >= STRIKES_MAX and not entry.removed:
            self._lose(entry, f"missed {entry.missed} health checks")

    async def _welcome_back(self, entry: PoolEntry) -> None:
        """An engine that was down comes back only through its probe: it may be another one by now."""
        try:
            found = await self._probe(entry.backend)
        except BackendError:
            entry.struck_at = trio.current_time()
            return
        entry.row.strikes = 0
        if found.weights is None and not found.control:
            # It never says its version: it has the one that it was said to have.
            found = msgspec.structs.replace(found, weights=entry.found.weights)
        if found.model != entry.found.model:
            # Its tokens would be another model's under this policy's name. Whoever wants that adds it anew.
            words = f"it serves {found.model} now and not {entry.found.model}; remove it and add it anew"
            entry.quarantine = Quarantine("model", words)
        elif entry.quarantine is None or entry.quarantine.code == "version":
            policy = entry.request.policy
            objection = None if self.keeper is None else self.keeper.objection(policy, found)
            entry.quarantine = None if objection is None else Quarantine("version", objection)
            entry.found = found
        if entry.quarantine is not None:
            self._set_state(entry, BackendState.QUARANTINED)
            log.error("backend.quarantined", backend=entry.backend_id, reason=entry.quarantine.message)
            return
        entry.found = found
        self._set_state(entry, entry.reachable_state)
        log.info("backend.recovered", backend=entry.backend_id, model=found.model, version=found.version)

    async def _read_load(self, entry: PoolEntry) -> None:
        try:
            with trio.move_on_after(HEALTH_SECONDS_MAX):
                entry.load = await entry.backend.load()
        except BackendError:
            # Its health check tells whether it is well; the load is for people to look at.
            return
