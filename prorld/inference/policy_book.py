"""The book of the policies: the state of each, its gate and its engines, and what of it is written down.

State is changed between two awaits and written down before anything is answered. It changes no weights and talks to no
engine: that is for ``policy_control`` and ``policy_change``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.domain.policy import (
    Pause,
    PolicySettings,
    PolicyState,
    interrupted,
    moved_to,
    must_be_free,
    next_version,
    quarantine_words,
    weights_in_force,
)
from prorld.domain.versions import PolicyVersion
from prorld.errors import Conflict, Impossible, NotFound, Overloaded
from prorld.inference.contract import Capabilities, WeightRef
from prorld.inference.policies import Policies
from prorld.inference.policy_engines import LOAD_SECONDS, PolicyEngines
from prorld.inference.policy_gate import PolicyGate
from prorld.inference.policy_views import settings_of, source_of
from prorld.inference.policy_work import Work
from prorld.inference.pool import BackendPool
from prorld.inference.pool_entry import PoolEntry
from prorld.metrics import Metrics
from prorld.wire.policies import PausedPolicy

__all__ = ["Pins", "Policy", "PolicyBook", "PolicyStore"]

log: FilteringBoundLogger = structlog.get_logger()

PINS_NAMED_MAX = 8


class PolicyStore(Protocol):
    """Where states are kept; ``prorld.store.policy_file.PolicyFile`` is one."""

    async def save(self, policies: Iterable[PolicyState]) -> None:
        """Keep these and no others. Raises ``OSError``."""
        ...


class Policy:
    """One policy. ``configured`` is what the configuration says of it."""

    def __init__(
        self, state: PolicyState, configured: PolicySettings, gate: PolicyGate, engines: PolicyEngines
    ) -> None:
        self.state = state
        self.gate = gate
        self.engines = engines
        self.busy_with: str | None = None
        self.pausing: tuple[str, Work[PausedPolicy]] | None = None
        self.news = trio.Event()
        self._configured = configured

    def must_be_idle(self) -> None:
        """``Conflict`` while engines are being paused or resumed."""
        if self.busy_with is not None:
            raise Conflict(f"policy {self.state.name!r} is being {self.busy_with}", code="policy_busy")

    def note_done(self) -> None:
        """What it was busy with is done."""
        self.busy_with = None
        news, self.news = self.news, trio.Event()
        news.set()

    @property
    def settings(self) -> PolicySettings:
        """What was set while the daemon ran, else what the configuration says."""
        return self.state.settings or self._configured


class Pins(Protocol):
    """Who wants a policy to stay as it is."""

    def pinned(self, policy: str) -> Sequence[tuple[str, str]]:
        """The tenants and ids of batches that do."""
        ...

    async def wait_unpinned(self, policy: str) -> None:
        """Wait until none does. The caller's scope bounds the wait."""
        ...


class PolicyBook:
    """All policies. Implements ``prorld.inference.version_keeper.VersionKeeper`` for the pool."""

    def __init__(
        self,
        pool: BackendPool,
        policies: Policies,
        store: PolicyStore,
        metrics: Metrics,
        wall: Callable[[], str],
        *,
        states: Iterable[PolicyState] = (),
        load_s: float = LOAD_SECONDS,
    ) -> None:
        """``states`` are those of an earlier life."""
        self.pool = pool
        self.policies = policies
        self.metrics = metrics
        self.wall = wall
        self._store = store
        self._load_s = load_s
        self._all: dict[str, Policy] = {}
        self._listeners: list[Callable[[str], None]] = []
        self.pins: Pins | None = None
        self._dormant = {state.name: interrupted(state, wall()) for state in states}
        for state in self._dormant.values():
            if state.settings is not None:
                policies.put(state.name, source_of(state.settings))
        for name in policies.names():
            self.open(name)
        pool.keeper = self

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Policy]:
        return iter([policy for _, policy in sorted(self._all.items())])

    def __contains__(self, name: str) -> bool:
        return name in self._all

    def of(self, name: str) -> Policy:
        """One policy; ``NotFound``."""
        policy = self._all.get(name)
        if policy is None:
            raise NotFound(f"there is no policy {name!r}", code="unknown_policy")
        return policy

    def entries(self, name: str) -> Sequence[PoolEntry]:
        """Its engines, in the order they came."""
        return self.pool.entries(name)

    # --- changes ------------------------------------------------------------------------------------------------------

    def open(self, name: str) -> Policy:
        """A policy that has a source of tokens, as an earlier life left it or new."""
        state = self._dormant.pop(name, None) or PolicyState(name=name)
        gate = PolicyGate(
            name,
            version=state.version,
            adapter=None if state.adapter is None else state.adapter.name,
            rollbacks=state.rollbacks,
            on_wrong_version=partial(self._wrong_version, name),
            on_advance=partial(self._advanced, name),
        )
        if state.is_closed:
            gate.close()
        configured = settings_of(self.policies.source(name))
        policy = Policy(state, configured, gate, PolicyEngines(gate, load_s=self._load_s))
        gate.max_staleness = policy.settings.max_staleness
        self._all[name] = policy
        self.metrics.policy_version(name, state.version.version)
        return policy

    def forget(self, name: str) -> None:
        """As if it had never been."""
        del self._all[name]
        self.policies.forget(name)

    async def write(self, policy: Policy, after: PolicyState) -> None:
        """Another state, written down. ``Overloaded`` where that can't be, and then it is as it was."""
        before, policy.state = policy.state, after
        states = [*self._dormant.values(), *(one.state for one in self._all.values())]
        try:
            await self._store.save(states)
        except OSError as exc:
            # Unless somebody has built on it meanwhile.
            if policy.state is after:
                policy.state = before
            log.exception("policy.unkept", policy=after.name)
            raise Overloaded(f"the state of the policies can't be written: {exc}", code="state_unwritable") from exc
        self.metrics.policy_version(after.name, after.version.version)

    def listen(self, advanced: Callable[[str], None]) -> None:
        """Call it with the name of every policy that gets another version. It may neither block nor raise."""
        self._listeners.append(advanced)

    def _advanced(self, name: str) -> None:
        for listener in self._listeners:
            listener(name)

    def _wrong_version(self, name: str, backend_id: str, words: str) -> None:
        for entry in self.entries(name):
            if entry.backend_id == backend_id:
                self.pool.put_out(entry, "failed", words)

    # --- for the sessions and the pool --------------------------------------------------------------------------------

    def gate(self, policy: str) -> PolicyGate:
        """The gate that every call of a policy goes through."""
        return self.of(policy).gate

    def must_know(self, policy: str) -> None:
        """``Impossible`` for a policy that there is not."""
        if policy not in self._all:
            raise Impossible(f"there is no policy {policy!r}", code="unknown_policy")

    def must_be_free(self, policy: str, pause_id: str | None = None) -> None:
        """``Conflict`` while somebody changes a policy, or holds it paused under another id."""
        found = self.of(policy)
        found.must_be_idle()
        must_be_free(found.state, pause_id)

    def is_paused(self, policy: str) -> bool:
        """Whether its engines are meant to stand still now."""
        return not self.of(policy).gate.is_open

    def objection(self, policy: str, found: Capabilities) -> str | None:
        """Why an engine that comes or comes back may not serve the policy now."""
        state = self.of(policy).state
        words = quarantine_words(policy, state.base, found.weights, adapter=state.adapter, told=found.control)
        return words if words is None or found.behind is None else f"{words}; {found.behind}"

    def weights(self, policy: str) -> WeightRef | None:
        """The weights in force, as the update that brought them named them."""
        state = self.of(policy).state
        update = weights_in_force(state)
        if update is None or update.path is None:
            return None
        return WeightRef(how="reload", path=update.path, version=state.base, seal=update.seal)

    def declared(self, policy: str, version: int) -> PolicyVersion:
        """What the policy would have if its engines had this version; ``Conflict`` for one that falls or is pinned."""
        state = self.of(policy).state
        if version == state.version.version:
            return state.base
        declared = next_version(state, version, rollback=False)
        self.must_be_unpinned(policy)
        return declared

    def pinned(self, policy: str) -> Sequence[tuple[str, str]]:
        """Who wants its version to stay: tenants and ids of their batches."""
        return [] if self.pins is None else self.pins.pinned(policy)

    def must_be_unpinned(self, policy: str, tenant: str | None = None) -> None:
        """``Conflict`` where somebody does; it names the batches of the tenant that asks, and counts the others."""
        holders = self.pinned(policy)
        if not holders:
            return
        mine = [batch_id for owner, batch_id in holders if owner == tenant][:PINS_NAMED_MAX]
        named = f": {', '.join(mine)}" if mine else ""
        words = f"batches pin the version of policy {policy!r}, {len(holders)} of them{named}"
        raise Conflict(words, code="pinned", details={"batches": mine, "count": len(holders)})

    def has_now(self, policy: str, version: PolicyVersion) -> None:
        """A new set of engines has this version; ``keep`` writes it down."""
        found = self.of(policy)
        if version != found.state.base:
            found.state = moved_to(found.state, version, None)
            found.gate.advance(version, adapter=None, rollbacks=found.state.rollbacks)

    async def keep(self, policy: str) -> None:
        """Write down what the policy has. Where that can't be it holds until a restart, and is said."""
        found = self.of(policy)
        with suppress(Overloaded):
            await self.write(found, found.state)

    # --- for operators ------------------------------------------------------------------------------------------------

    def paused(self) -> list[tuple[str, Pause]]:
        """Policies that somebody holds paused, and that are not being updated just now."""
        return [
            (name, policy.state.pause)
            for name, policy in self._all.items()
            if policy.state.pause is not None and policy.state.running is None
        ]

    def quarantined(self) -> list[tuple[str, str, str]]:
        """Engines that are kept out: the policy, the engine and why."""
        return [
            (name, entry.backend_id, entry.quarantine.message)
            for name in self._all
            for entry in self.entries(name)
            if entry.quarantine is not None
        ]

    def closed_s(self) -> dict[str, float]:
        """How long every policy's gate has been closed so far."""
        return {name: policy.gate.closed_s for name, policy in self._all.items()}

    def cut_total(self) -> dict[str, int]:
        """Calls of every policy that were cut off, because their engine can't be paused or did not stop."""
        return {name: policy.gate.cut_total for name, policy in self._all.items()}
