"""The policies of a daemon while it runs: who holds them paused, which version they have, what changes it.

It owns every policy's state, its gate and the tasks that change weights. Those live in its own nursery: whoever asked
may leave, the change goes on. State is changed between two awaits and written down before anything is answered.
What may be done is decided by ``prorld.domain.policy``, what is done to engines is in ``policy_engines``.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.domain.ids import is_client_id
from prorld.domain.policy import (
    Mode,
    Pause,
    PolicySettings,
    PolicyState,
    Resumed,
    Update,
    begin_pause,
    begin_update,
    changed,
    check_resume,
    interrupted,
    moved_to,
    must_be_free,
    next_version,
    quarantine_words,
)
from prorld.domain.versions import PolicyVersion
from prorld.errors import (
    BadRequest,
    Conflict,
    Impossible,
    NotFound,
    Overloaded,
    ProrldError,
    RendererError,
    RequestError,
    TooMany,
    chain,
)
from prorld.inference.contract import Capabilities
from prorld.inference.policies import Policies, PolicySource
from prorld.inference.policy_change import Changes
from prorld.inference.policy_engines import LOAD_SECONDS, Engines
from prorld.inference.policy_gate import PolicyGate
from prorld.inference.policy_views import merged, policy_info, settings_of, source_of, update_view
from prorld.inference.pool import BackendPool
from prorld.metrics import Metrics
from prorld.wire.policies import (
    PausedPolicy,
    PausePolicy,
    PolicyInfo,
    PolicyList,
    PolicyUpdate,
    PolicyUpdateList,
    PutPolicy,
    ResumedPolicy,
    ResumePolicy,
    UpdatePolicy,
)

__all__ = ["PolicyControl", "PolicyStore", "Tell"]

log: FilteringBoundLogger = structlog.get_logger()

T = TypeVar("T")

POLICIES_MAX = 256

Tell = Callable[..., None]


class PolicyStore(Protocol):
    """Where states are kept; ``prorld.store.policy_file.PolicyFile`` is one."""

    async def save(self, policies: Iterable[PolicyState]) -> None:
        """Keep these and no others. Raises ``OSError``."""
        ...


class _Work(Generic[T]):
    """A task that was started for somebody who may have gone when it is done."""

    def __init__(self) -> None:
        self.begun = trio.Event()
        self.done = trio.Event()
        self.result: T | None = None
        self.error: Exception | None = None

    async def outcome(self) -> T:
        """What came of it. The caller's scope bounds the wait, and not the work."""
        await self.done.wait()
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


class _Policy:
    """One policy."""

    def __init__(self, state: PolicyState, source: PolicySource, gate: PolicyGate, engines: Engines) -> None:
        self.state = state
        self.source = source
        self.gate = gate
        self.engines = engines
        self.busy_with: str | None = None
        self.pausing: tuple[str, _Work[PausedPolicy]] | None = None
        self.news = trio.Event()

    def must_be_idle(self) -> None:
        """``Conflict`` while engines are being paused or resumed."""
        if self.busy_with is not None:
            raise Conflict(f"policy {self.state.name!r} is being {self.busy_with}", code="policy_busy")

    @property
    def settings(self) -> PolicySettings:
        """What was set while the daemon ran, else what the configuration says."""
        return self.state.settings or settings_of(self.source)


class PolicyControl:
    """All policies. ``run`` is the task in which their weights are changed."""

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
        tell: Tell | None = None,
    ) -> None:
        """``states`` are those of an earlier life; ``tell`` gets the name and the facts of every event."""
        self._pool = pool
        self._policies = policies
        self._store = store
        self._metrics = metrics
        self._wall = wall
        self._load_s = load_s
        self.tell = tell
        self._nursery: trio.Nursery | None = None
        self._putting = trio.Lock()
        self._all: dict[str, _Policy] = {}
        self._dormant = {state.name: interrupted(state, wall()) for state in states}
        for state in self._dormant.values():
            if state.settings is not None:
                policies.put(state.name, source_of(state.settings))
        for name in policies.names():
            self._open(name)
        pool.keeper = self

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Change weights when asked, until cancelled. What is in progress then has failed for the next life."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None

    def _open(self, name: str) -> _Policy:
        state = self._dormant.pop(name, None) or PolicyState(name=name)
        source = self._policies.source(name)
        gate = PolicyGate(
            name,
            version=state.version,
            adapter=None if state.adapter is None else state.adapter.name,
            rollbacks=state.rollbacks,
            on_wrong_version=partial(self._wrong_version, name),
        )
        if state.is_closed:
            gate.close()
        policy = _Policy(state, source, gate, Engines(gate, load_s=self._load_s))
        gate.max_staleness = policy.settings.max_staleness
        self._all[name] = policy
        self._metrics.policy_version(name, state.version.version)
        return policy

    def _of(self, name: str) -> _Policy:
        policy = self._all.get(name)
        if policy is None:
            raise NotFound(f"there is no policy {name!r}", code="unknown_policy")
        return policy

    def _wrong_version(self, name: str, backend_id: str, words: str) -> None:
        for entry in self._pool.entries(name):
            if entry.backend_id == backend_id:
                self._pool.put_out(entry, "failed", words)

    # --- for the pool and the sessions --------------------------------------------------------------------------------

    def gate(self, policy: str) -> PolicyGate:
        """The gate that every call of a policy goes through."""
        return self._of(policy).gate

    def must_know(self, policy: str) -> None:
        """``Impossible`` for a policy that there is not."""
        if policy not in self._all:
            raise Impossible(f"there is no policy {policy!r}", code="unknown_policy")

    def is_paused(self, policy: str) -> bool:
        """Whether its engines are meant to stand still now."""
        return not self._of(policy).gate.is_open

    def declared(self, policy: str, version: int) -> PolicyVersion:
        """What the policy would have if its engines had this version; ``Conflict`` for one that falls."""
        state = self._of(policy).state
        if version == state.version.version:
            return state.base
        return next_version(state, version, rollback=False)

    def has_now(self, policy: str, version: PolicyVersion) -> None:
        """A new set of engines has this version; ``keep`` writes it down."""
        found = self._of(policy)
        if version != found.state.base:
            found.state = moved_to(found.state, version, None)
            found.gate.advance(version, adapter=None, rollbacks=found.state.rollbacks)

    async def keep(self, policy: str) -> None:
        """Write down what the policy has. Where that can't be it holds until a restart, and is said."""
        found = self._of(policy)
        with suppress(Overloaded):
            await self._keep(found, found.state)

    def must_be_free(self, policy: str, pause_id: str | None = None) -> None:
        """``Conflict`` while somebody changes a policy, or holds it paused under another id."""
        found = self._of(policy)
        found.must_be_idle()
        must_be_free(found.state, pause_id)

    def objection(self, policy: str, found: Capabilities) -> str | None:
        """Why an engine that comes or comes back may not serve the policy now."""
        state = self._of(policy).state
        return quarantine_words(policy, state.base, found.weights, adapter=state.adapter, told=found.control)

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
            for entry in self._pool.entries(name)
            if entry.quarantine is not None
        ]

    def closed_s(self) -> dict[str, float]:
        """How long every policy's gate has been closed so far."""
        return {name: policy.gate.closed_s for name, policy in self._all.items()}

    def cut_total(self) -> dict[str, int]:
        """Calls of every policy that were cut off, because their engine can't be paused or did not stop."""
        return {name: policy.gate.cut_total for name, policy in self._all.items()}

    # --- what is read -------------------------------------------------------------------------------------------------

    def list(self, tenant: str | None) -> PolicyList:
        """All policies; they are nobody's alone."""
        return PolicyList(items=[self._info(policy, tenant) for _, policy in sorted(self._all.items())])

    def get(self, name: str, tenant: str | None) -> PolicyInfo:
        """One policy; ``NotFound``."""
        return self._info(self._of(name), tenant)

    def _info(self, policy: _Policy, tenant: str | None) -> PolicyInfo:
        entries = self._pool.entries(policy.state.name)
        return policy_info(policy.state, policy.settings, entries, tenant, closed_s=policy.gate.closed_s)

    def updates(self, name: str) -> PolicyUpdateList:
        """The updates that are remembered, newest first."""
        return PolicyUpdateList(items=[update_view(name, update) for update in reversed(self._of(name).state.updates)])

    def get_update(self, name: str, update_id: str) -> PolicyUpdate:
        """One of them; ``NotFound``."""
        for update in self._of(name).state.updates:
            if update.update_id == update_id:
                return update_view(name, update)
        raise NotFound(f"policy {name!r} has no update {update_id!r}", code="unknown_update")

    async def wait_update(self, name: str, update_id: str) -> PolicyUpdate:
        """One of them once it has ended. The caller's scope bounds the wait."""
        policy = self._of(name)
        await trio.lowlevel.checkpoint()
        while (found := self.get_update(name, update_id)).state == "running":
            await policy.news.wait()
        return found

    # --- what is changed ----------------------------------------------------------------------------------------------

    async def put(self, name: str, request: PutPolicy, tenant: str | None) -> tuple[PolicyInfo, bool]:
        """Make or change a policy; the flag says whether it is new."""
        if not is_client_id(name):
            raise BadRequest(
                f"{name[:64]!r} can't be the name of a policy", code="invalid_field", details={"path": "policy"}
            )
        # One at a time: what is left out stays as whoever came first has made it.
        async with self._putting:
            known = self._all.get(name)
            if known is None and len(self._all) >= POLICIES_MAX:
                raise TooMany(f"there are {POLICIES_MAX} policies already")
            if known is None and request.pause_id is not None:
                raise Conflict(f"policy {name!r} is not paused", code="not_paused")
            settings = merged(PolicySettings() if known is None else known.settings, request)
            try:
                await self._policies.check(source_of(settings))
            except RendererError as exc:
                raise Impossible(chain(exc), code=exc.stable_code) from exc
            work = self._start(partial(self._put, name, settings, request.pause_id))
            is_new = await work.outcome()
        return self.get(name, tenant), is_new

    async def _put(self, name: str, settings: PolicySettings, pause_id: str | None, work: _Work[bool]) -> bool:
        is_new = name not in self._all
        if not is_new:
            self._all[name].must_be_idle()
            after = changed(self._all[name].state, settings, pause_id)
        else:
            after = PolicyState(name=name, settings=settings)
            self._policies.put(name, source_of(settings))
            self._open(name)
        policy = self._all[name]
        before = policy.state
        policy.busy_with = "changed"
        try:
            await self._keep(policy, after)
        except ProrldError:
            if is_new:
                del self._all[name]
                self._policies.forget(name)
            raise
        finally:
            policy.busy_with = None
        self._policies.put(name, source_of(settings))
        policy.gate.max_staleness = settings.max_staleness
        log.info("policy.changed", policy=name, is_new=is_new, differs=before.settings != settings)
        return is_new

    async def pause(self, name: str, request: PausePolicy, tenant: str) -> PausedPolicy:
        """Close the gate and pause the engines. Told when that is done; it goes on if the asker leaves."""
        policy = self._of(name)
        if request.release:
            raise Impossible(
                "engines can't give memory back through this daemon; put them to sleep yourself while it is paused",
                code="release_unsupported",
                details={"path": "release"},
            )
        held = policy.state.pause
        is_repeat = held is not None and held.pause_id == request.pause_id
        if is_repeat and policy.pausing is not None and policy.pausing[0] == request.pause_id:
            return await policy.pausing[1].outcome()
        policy.must_be_idle()
        # After a restart nobody remembers what the engines said, nor whether all of them were asked.
        new = self._new_pause(request.mode, tenant, request.pause_id)
        begun = policy.state if is_repeat else begin_pause(policy.state, new)
        work: _Work[PausedPolicy] = self._start(partial(self._changes(policy).pause, begun, request), policy, "paused")
        policy.pausing = (begun.pause.pause_id if begun.pause else "", work)
        return await work.outcome()

    async def resume(self, name: str, request: ResumePolicy) -> ResumedPolicy:
        """Label the engines, read that back, let them go on, open the gate."""
        policy = self._of(name)
        policy.must_be_idle()
        decided = check_resume(policy.state, request.pause_id, request.version, rollback=request.rollback)
        if isinstance(decided, Resumed):
            return ResumedPolicy(
                policy=name, version=decided.version, epoch=policy.state.version.epoch, backends=[*decided.backends]
            )
        work: _Work[ResumedPolicy] = self._start(partial(self._changes(policy).resume, decided), policy, "resumed")
        return await work.outcome()

    async def update(self, name: str, request: UpdatePolicy, tenant: str) -> PolicyUpdate:
        """Begin an update, or find the one that the same body began before. Told when it is written down."""
        policy = self._of(name)
        entries = {entry.backend_id: entry for entry in self._pool.entries(name)}
        only = None if request.backends is None else tuple(sorted(set(request.backends)))
        asked = Update(
            update_id=f"u-{secrets.token_hex(6)}", version=request.version, epoch=policy.state.version.epoch,
            how=request.how, path=request.path, mode=request.mode, only=only, rollback=request.rollback,
            holder=tenant, created_at=self._wall(),
        )  # fmt: skip
        behind = frozenset(entry.backend_id for entry in entries.values() if entry.quarantine is not None)
        decided = begin_update(policy.state, asked, request.pause_id, behind=behind)
        if isinstance(decided, Update):
            return update_view(name, decided)
        policy.must_be_idle()
        strange = [named for named in only or () if named not in entries]
        if strange:
            words = f"policy {name!r} has no engine {', '.join(strange[:8])}"
            raise Impossible(words, code="unknown_backend", details={"path": "backends"})
        pause = self._new_pause(request.mode, tenant)
        work = self._start(partial(self._changes(policy).update, decided, pause, request.timeout_s), policy, "updated")
        await work.begun.wait()
        if work.error is not None:
            raise work.error
        return self.get_update(name, asked.update_id)

    def _new_pause(self, mode: Mode, tenant: str, pause_id: str | None = None) -> Pause:
        return Pause(pause_id=pause_id or f"p-{secrets.token_hex(8)}", holder=tenant, mode=mode, since=self._wall())

    def _changes(self, policy: _Policy) -> Changes:
        return Changes(
            name=policy.state.name, gate=policy.gate, engines=policy.engines, pool=self._pool,
            state=lambda: policy.state, keep=partial(self._keep, policy), remember=partial(_remember, policy),
            wall=self._wall, metrics=self._metrics, say=self._say, beside=self._beside,
        )  # fmt: skip

    # --- how --------------------------------------------------------------------------------------------------------

    def _start(
        self, do: Callable[[_Work[T]], Awaitable[T]], policy: _Policy | None = None, what: str | None = None
    ) -> _Work[T]:
        """Do it in a task of its own; ``what`` is being done to the policy meanwhile."""
        if self._nursery is None:
            raise _closing()
        work: _Work[T] = _Work()
        if policy is not None:
            policy.busy_with = what
        self._nursery.start_soon(self._do, do, work, policy, name=f"policy {what or 'put'}")
        return work

    async def _do(self, do: Callable[[_Work[T]], Awaitable[T]], work: _Work[T], policy: _Policy | None) -> None:
        try:
            work.result = await do(work)
        except Exception as exc:
            # Whatever it is, it belongs to whoever asked; the other policies go on.
            if not isinstance(exc, RequestError):
                log.exception("policy.broken")
            work.error = exc
        finally:
            if work.result is None and work.error is None:
                work.error = _closing()
            if policy is not None:
                policy.busy_with = None
                policy.news.set()
                policy.news = trio.Event()
            work.begun.set()
            work.done.set()

    def _beside(self, do: Callable[[], Awaitable[None]], what: str) -> None:
        if self._nursery is not None:
            self._nursery.start_soon(do, name=what)

    async def _keep(self, policy: _Policy, after: PolicyState) -> None:
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
        self._metrics.policy_version(after.name, after.version.version)

    def _say(self, event: str, **facts: Any) -> None:
        log.info(event, **facts)
        if self.tell is not None:
            self.tell(event, **facts)


def _closing() -> Overloaded:
    return Overloaded("the daemon is going away", code="closing")


def _remember(policy: _Policy, after: PolicyState) -> None:
    policy.state = after
