"""Who is there: the engines of all policies, their tables and generations, shared by the parts of the pool.

Everything changes between two awaits; whoever waits for an engine is told by ``changed``. It asks no engine anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec
import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.domain.backends import BackendRow, BackendState, BackendTable
from prorld.domain.versions import PolicyVersion
from prorld.errors import BackendError, NotFound
from prorld.inference.affinity import GroupHomes
from prorld.inference.contract import Backend, Capabilities
from prorld.inference.pool_entry import EngineRules, PoolEntry, Quarantine, QuarantineCode
from prorld.inference.version_keeper import VersionKeeper
from prorld.wire.ops import AddBackend

__all__ = ["BACKENDS_MAX", "Engines", "same_address"]

log: FilteringBoundLogger = structlog.get_logger("prorld.inference.pool")

BACKENDS_MAX = 1024

_OFFERED = (BackendState.UP, BackendState.SUSPECT)


def same_address(url: str) -> str:
    """What two spellings of an engine's address have in common."""
    return url.rstrip("/")


class Engines:
    """The set of each policy, and what is leaving it."""

    def __init__(self, rules: EngineRules, boot_id: str = "") -> None:
        """``boot_id`` is part of the ids, so that an id of an earlier life never means an engine of this one."""
        self.rules = rules
        self._prefix = f"b-{boot_id}-" if boot_id else "b-"
        # Looks at every engine that comes or comes back; without one, all are taken as they are.
        self.keeper: VersionKeeper | None = None
        self.homes = GroupHomes()
        self.changed = trio.Event()
        self.ended = False
        # Clients whose engines are forgotten, for whoever closes them.
        self.retired: list[Backend] = []
        self._entries: dict[str, PoolEntry] = {}
        self._tables: dict[str, BackendTable] = {}
        self._generations: dict[str, int] = {}
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[PoolEntry]:
        return iter(tuple(self._entries.values()))

    def of(self, policy: str | None) -> list[PoolEntry]:
        """The engines of one policy, or of all, in the order they came; those that are leaving, too."""
        return [entry for entry in self._entries.values() if policy in (None, entry.policy)]

    def entry(self, backend_id: str) -> PoolEntry:
        """One engine; ``NotFound``."""
        entry = self._entries.get(backend_id)
        if entry is None:
            raise NotFound(f"no engine {backend_id!r}")
        return entry

    def at(self, policy: str, url: str) -> PoolEntry | None:
        """The policy's engine with this address, with or without a slash at its end."""
        wanted = same_address(url)
        return next(
            (
                entry
                for entry in self._entries.values()
                if entry.policy == policy and same_address(entry.request.url) == wanted
            ),
            None,
        )

    def table(self, policy: str) -> BackendTable | None:
        """The rows of a policy's engines."""
        return self._tables.get(policy)

    def generation(self, policy: str | None) -> int:
        """How often the set of a policy has changed, or those of all together. Health and load change no set."""
        if policy is None:
            return sum(self._generations.values())
        return self._generations.get(policy, 0)

    def is_paused(self, policy: str) -> bool:
        """Whether a policy's engines are meant to stand still now."""
        return self.keeper is not None and self.keeper.is_paused(policy)

    def has_offer(self, policy: str) -> bool:
        """Whether a new lease would be given at once."""
        table = self._tables.get(policy)
        return table is not None and any(row.state in _OFFERED for row in table.rows())

    # --- changes ---

    def take_in(self, request: AddBackend, backend: Backend, found: Capabilities) -> PoolEntry:
        """A new engine, or one that was leaving and is wanted again: that one keeps its id and its leases."""
        known = self.at(request.policy, request.url)
        if known is not None:
            self.renew(known, request)
            self.refresh(known, backend, found)
            return known
        row = BackendRow(backend_id=self._new_id(), weight=request.weight, max_inflight=request.max_inflight)
        entry = PoolEntry(row, request, backend, found, self.rules)
        self._entries[entry.backend_id] = entry
        self._judge(entry)
        row.state = entry.reachable_state
        self._tables.setdefault(request.policy, BackendTable()).add(row)
        log.info("backend.added", backend=entry.backend_id, policy=request.policy, kind=request.kind, url=request.url)
        return entry

    def restore(
        self, backend_id: str, request: AddBackend, backend: Backend, found: Capabilities, *, draining: bool
    ) -> PoolEntry:
        """An engine of an earlier life of the daemon, as one that is down: it comes back when it answers a probe.

        Its id is what it was: whoever named it knows it by that.
        """
        row = BackendRow(backend_id=backend_id, weight=request.weight, max_inflight=request.max_inflight)
        entry = PoolEntry(row, request, backend, found, self.rules)
        entry.draining = draining
        # Whoever paused it may say that it goes on before it answers.
        entry.asleep = found.control and self.is_paused(request.policy)
        row.state = BackendState.DOWN
        self._entries[entry.backend_id] = entry
        self._tables.setdefault(request.policy, BackendTable()).add(row)
        log.info("backend.restored", backend=entry.backend_id, policy=request.policy, url=request.url)
        return entry

    def _new_id(self) -> str:
        return next(found for number in self._ids if (found := f"{self._prefix}{number}") not in self._entries)

    def renew(self, entry: PoolEntry, request: AddBackend) -> None:
        """An engine that is there is named again: its settings hold from now on, and it takes leases again."""
        entry.take_request(request)
        entry.row.max_inflight = request.max_inflight
        self._tables[entry.policy].set_weight(entry.backend_id, request.weight)
        entry.draining = entry.leaving = False
        if entry.row.state is BackendState.DRAINING:
            self.set_state(entry, entry.reachable_state)

    def refresh(self, entry: PoolEntry, backend: Backend, found: Capabilities) -> None:
        """It has been probed anew, perhaps through another client; calls on the old one run to their end."""
        is_other = backend is not entry.backend
        if is_other:
            self.retired.append(entry.backend)
            entry.backend = backend
        silent = found.weights is None or (found.weights == PolicyVersion() and not is_other)
        if silent and not found.control:
            # It never says its version: it has the one that it was said to have, be it to a client of an earlier life.
            found = msgspec.structs.replace(found, weights=entry.found.weights)
        entry.found = found
        if is_other:
            entry.quarantine = None
        self._judge(entry)
        if is_other or entry.row.state not in _OFFERED:
            entry.came_back()
        self.set_state(entry, entry.reachable_state)

    def _judge(self, entry: PoolEntry) -> None:
        """Whether it may serve with the version that it says. What else is held against it stays."""
        if self.keeper is None or (entry.quarantine is not None and entry.quarantine.code != "version"):
            return
        objection = self.keeper.objection(entry.policy, entry.found)
        entry.quarantine = None if objection is None else Quarantine("version", objection)
        if objection is not None:
            log.error("backend.quarantined", backend=entry.backend_id, policy=entry.policy, reason=objection)

    def put_out(self, entry: PoolEntry, code: QuarantineCode, message: str) -> None:
        """It may not serve from now on. Leases on it go elsewhere at their next call."""
        entry.quarantine = Quarantine(code, message)
        self.homes.forget_backend(entry.backend_id)
        if entry.row.state is not BackendState.DOWN:
            self.set_state(entry, BackendState.QUARANTINED)
            entry.places.lose_waiting(entry.gone())
        self.note_change()
        log.error("backend.quarantined", backend=entry.backend_id, policy=entry.policy, reason=message)

    def let_in(self, entry: PoolEntry, version: PolicyVersion) -> None:
        """It serves this version, and has nothing against it any more."""
        entry.found = msgspec.structs.replace(entry.found, weights=version)
        entry.quarantine = None
        if entry.row.state is not BackendState.DOWN:
            self.set_state(entry, entry.reachable_state)
        self.note_change()

    def let_go(self, entry: PoolEntry) -> None:
        """Of the set no more; its leases go on to their end, and with the last of them it is forgotten."""
        entry.draining = entry.leaving = True
        if entry.row.state not in (BackendState.DOWN, BackendState.QUARANTINED):
            self.set_state(entry, BackendState.DRAINING)
        log.info("backend.leaving", backend=entry.backend_id, leases=entry.row.leases)
        self.forget_if_left(entry)

    def forget_if_left(self, entry: PoolEntry) -> None:
        """For an engine that is leaving and has no lease any more."""
        if entry.leaving and not entry.removed and not entry.row.leases:
            self.retired.append(self.forget(entry))

    def forget(self, entry: PoolEntry) -> Backend:
        """It is not there any more; the client is the caller's to close. Calls in line are sent elsewhere."""
        entry.removed = True
        del self._entries[entry.backend_id]
        self._tables[entry.policy].remove(entry.backend_id)
        self.homes.forget_backend(entry.backend_id)
        entry.places.lose_waiting(entry.gone())
        self.note_change()
        log.info("backend.removed", backend=entry.backend_id)
        return entry.backend

    def set_state(self, entry: PoolEntry, state: BackendState) -> None:
        """Whether it is offered, and why not."""
        if entry.row.state is not state and not entry.removed:
            self._tables[entry.policy].set_state(entry.backend_id, state)
            self.note_change()

    def lose(self, entry: PoolEntry, reason: str) -> None:
        """It is down: no new calls. Those in it are left to end while there is hope; those in line go elsewhere."""
        if entry.row.state is BackendState.DOWN or entry.removed:
            return
        entry.went_down()
        self.homes.forget_backend(entry.backend_id)
        self.set_state(entry, BackendState.DOWN)
        entry.places.lose_waiting(entry.gone())
        log.warning("backend.lost", backend=entry.backend_id, leases=entry.row.leases, reason=reason)

    def abandon(self, entry: PoolEntry, reason: str) -> None:
        """Nothing will come of the calls in it: they fail now, and can be made elsewhere."""
        if entry.places.inside or entry.places.waiting:
            log.warning("backend.abandoned", backend=entry.backend_id, calls=entry.places.inside, reason=reason)
        entry.places.lose_all(BackendError(f"engine {entry.backend_id}: {reason}", code="engine_lost"))

    def move_on(self, policy: str) -> None:
        """The set of a policy has changed."""
        self._generations[policy] = self.generation(policy) + 1
        self.note_change()

    def note_change(self) -> None:
        """Those who wait for an engine look again."""
        changed, self.changed = self.changed, trio.Event()
        changed.set()
