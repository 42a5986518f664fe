"""How one policy's weights change, step by step: pause, install, decide, resume.

Every method is the whole of one change and runs in a task of ``policy_work``, one at a time for a policy. The order
is what matters: the gate is closed and written down before an engine is touched; the version is in force before an
engine goes on; the end is written down before the gate opens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec
import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.domain.backends import BackendState
from prorld.domain.policy import BackendResult, Pause, PolicyState, Update, end_update, resumed
from prorld.domain.versions import PolicyVersion
from prorld.errors import NoBackend, Overloaded, Unsupported, WeightsRefused
from prorld.inference.policy_engines import PolicyEngines, failures
from prorld.inference.policy_gate import PolicyGate
from prorld.inference.pool import BackendPool
from prorld.inference.pool_entry import PoolEntry
from prorld.inference.weight_seal import seal_of
from prorld.metrics import Metrics
from prorld.wire.policies import PausedPolicy, PausePolicy, ResumedPolicy

__all__ = ["Begun", "Changes", "usable"]

log: FilteringBoundLogger = structlog.get_logger()

# An adapter's last call ends with its job; an engine can do without an adapter that is still in use.
RETIRE_SECONDS_MAX = 3600.0


class Begun(Protocol):
    """What whoever asked for a change waits for first."""

    begun: trio.Event


def usable(entry: PoolEntry) -> bool:
    """Whether an engine can be talked to, and may come to serve the policy."""
    if entry.removed or entry.row.state is BackendState.DOWN:
        return False
    return entry.quarantine is None or entry.quarantine.code != "model"


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The changes of one policy. ``state`` is it now, ``keep`` makes and writes down the next one,
    ``remember`` only makes it.
    """

    name: str
    gate: PolicyGate
    engines: PolicyEngines
    pool: BackendPool
    state: Callable[[], PolicyState]
    keep: Callable[[PolicyState], Awaitable[None]]
    remember: Callable[[PolicyState], None]
    wall: Callable[[], str]
    metrics: Metrics
    say: Callable[..., None]
    beside: Callable[[Callable[[], Awaitable[None]], str], None]

    # --- pause and resume ---------------------------------------------------------------------------------------------

    async def pause(self, begun: PolicyState, request: PausePolicy, work: Begun) -> PausedPolicy:
        """Close the gate, pause the engines."""
        await self._close(begun)
        pause, present = self._held(), self._present()
        anew = [entry for entry in present if entry.request.url not in pause.engines]
        said = {result.id: result for result in await self._pause(anew, pause.mode, request.timeout_s)}
        results = [said.get(entry.backend_id) or BackendResult(id=entry.backend_id, ok=True) for entry in present]
        self.say("policy.paused", policy=self.name, holder=pause.holder, mode=pause.mode, pause_id=pause.pause_id)
        return PausedPolicy(pause_id=pause.pause_id, backends=results)

    async def _close(self, begun: PolicyState) -> None:
        was_open = self.gate.is_open
        self.gate.close()
        try:
            await self.keep(begun)
        except Overloaded:
            if was_open:
                self.gate.open()
            raise

    async def _pause(self, entries: Sequence[PoolEntry], mode: Any, timeout_s: float) -> list[BackendResult]:
        """Pause them, and keep in mind which are; one that can't be is out, with its calls cut off."""
        results = await self.engines.pause(entries, mode, timeout_s)
        bad = failures(results)
        for entry in entries:
            if entry.backend_id in bad:
                self.gate.cut(entry.backend_id)
                self._put_out(entry, f"it could not be paused: {bad[entry.backend_id].error}")
        paused = {entry.request.url for entry in entries if entry.backend_id not in bad}
        state, pause = self.state(), self._held()
        known = tuple(sorted(paused.union(pause.engines)))
        await self._keep_surely(msgspec.structs.replace(state, pause=msgspec.structs.replace(pause, engines=known)))
        return results

    async def resume(self, version: PolicyVersion, work: Begun) -> ResumedPolicy:
        """Label the engines that were paused, let them go on, open the gate.

        Engines that came meanwhile were not there when the weights were changed, so they stay out of a new version.
        """
        state, pause = self.state(), self._held()
        present = self._present()
        changes = version != state.version
        held = [entry for entry in present if entry.request.url in pause.engines]
        targets = [entry for entry in held if changes or entry.quarantine is None]
        label = version if changes else state.base
        results = {r.id: r for r in await self.engines.clear_caches(targets, label)}
        if changes:
            after = resumed(state, version, ())
            self._advance(after)
        else:
            after = state
        self._settle(targets, results, version)
        if changes:
            self._leave_out(targets, version)
        # Those, too, that were down when an earlier pause ended.
        await self._let_go_on([entry for entry in present if entry in held or entry.asleep], results)
        told = [_with_version(results[entry.backend_id], version) for entry in targets]
        await self._keep_surely(resumed(state, version, told))
        if changes:
            self._leave_out_late(version)
        self.gate.open()
        if changes and state.adapter is not None:
            self._retire(state.adapter.name)
        self.say("policy.resumed", policy=self.name, version=version.version, epoch=version.epoch, ok=_count(told))
        return ResumedPolicy(policy=self.name, version=version.version, epoch=version.epoch, backends=told)

    # --- updates ------------------------------------------------------------------------------------------------------

    async def update(self, begun: PolicyState, pause: Pause, timeout_s: float, work: Begun) -> Update:
        """Pause, load, resume. Under a pause of the asker it ends that pause, unless no engine takes the weights."""
        update = begun.running
        assert update is not None
        was_held = begun.pause is not None
        catches_up = update.target == begun.version
        pauses = update.how != "lora" and not catches_up
        if pauses and not was_held:
            begun = msgspec.structs.replace(begun, pause=pause)
        if pauses:
            await self._close(begun)
        else:
            await self.keep(begun)
        work.begun.set()
        try:
            return await self._update(update, timeout_s, was_held=was_held, pauses=pauses, catches_up=catches_up)
        except Exception as exc:
            # A bug of ours. The gate stays as it is: what the engines have is not known.
            log.exception("update.broken", policy=self.name)
            ended = self._ended(update, "failed", (), code="internal", message=repr(exc))
            await self._keep_surely(end_update(self.state(), ended, moved=False, resume=False))
            return ended

    async def _update(
        self, update: Update, timeout_s: float, *, was_held: bool, pauses: bool, catches_up: bool
    ) -> Update:
        before, present = self.state(), self._present()
        targets = [entry for entry in present if update.only is None or entry.backend_id in update.only]
        results: dict[str, BackendResult] = {}
        if pauses:
            held = self._held().engines if was_held else ()
            anew = [entry for entry in present if entry.request.url not in held]
            results |= failures(await self._pause(anew, update.mode, timeout_s))
        elif catches_up:
            # They take no calls; what they had before they were put out is cut off with them.
            results |= failures(await self.engines.pause(targets, "abort", timeout_s))
        ready = [entry for entry in targets if entry.backend_id not in results]
        # Engines that catch up are named as the others are; an adapter has the name that calls ask for in any case.
        label = before.base if catches_up and update.how != "lora" else update.target
        if update.path is not None and any(entry.found.reads_here for entry in ready):
            update = msgspec.structs.replace(update, seal=await seal_of(update.path))
        installed = await self.engines.install(ready, update, label, before.base)
        results |= {result.id: result for result in installed}
        results |= {
            named: BackendResult(id=named, ok=False, error="it is not there", code=NoBackend.code)
            for named in update.only or ()
            if named not in results
        }
        told = [results[entry.backend_id] for entry in targets]
        # With nobody to load them, weights are not there; a name needs nobody.
        moved = any(result.ok for result in told) or (update.how == "none" and not targets)
        ended = self._judged(update, list(results.values()), moved=moved)
        resume = moved or not was_held
        after = end_update(before, ended, moved=moved, resume=resume and not (catches_up and was_held))
        if moved:
            self._advance(after)
            self._settle(targets, results, update.target)
        else:
            self._settle([entry for entry in targets if _may_be_spoilt(results[entry.backend_id])], results, None)
        if moved and not catches_up:
            self._leave_out(targets, update.target)
        opens = after.pause is None
        if catches_up:
            await self._let_go_on(targets, results)
        elif opens and self.state().pause is not None:
            await self._let_go_on(present, results)
        final = msgspec.structs.replace(
            ended, backends=tuple(_with_version(result, update.target) for result in results.values()),
            ended_at=self.wall(),
        )  # fmt: skip
        pause = None if opens else self.state().pause
        after = end_update(before, final, moved=moved, resume=opens)
        await self._keep_surely(msgspec.structs.replace(after, pause=pause))
        if moved and not catches_up:
            self._leave_out_late(update.target)
        if opens:
            self.gate.open()
        if moved and not catches_up and before.adapter is not None:
            self._retire(before.adapter.name)
        self._tell(final)
        return final

    def _judged(self, update: Update, results: Sequence[BackendResult], *, moved: bool) -> Update:
        """How it ended. Where at least one engine has the weights it is done, and the others are out."""
        if moved:
            return self._ended(update, "done", results)
        codes = {result.code for result in results}
        code = codes.pop() if len(codes) == 1 else "update_failed"
        words = "; ".join(f"{result.id}: {result.error}" for result in results[:8])
        if not results:
            code, words = NoBackend.code, f"policy {self.name!r} has no engine to load them"
        return self._ended(update, "failed", results, code=code, message=words)

    def _ended(
        self, update: Update, state: Any, results: Sequence[BackendResult], *, code: str | None = None,
        message: str | None = None,
    ) -> Update:  # fmt: skip
        return msgspec.structs.replace(
            update, state=state, backends=tuple(results), code=code, message=message, ended_at=self.wall()
        )

    def _tell(self, update: Update) -> None:
        self.metrics.policy_updated(update.how, result=update.state)
        self.say(
            "policy.updated", policy=self.name, update_id=update.update_id, version=update.version, epoch=update.epoch,
            how=update.how, state=update.state, code=update.code, ok=_count(update.backends),
            failed=len(update.backends) - _count(update.backends),
        )  # fmt: skip

    # --- steps --------------------------------------------------------------------------------------------------------

    def _present(self) -> list[PoolEntry]:
        return [entry for entry in self.pool.entries(self.name) if usable(entry)]

    def _held(self) -> Pause:
        pause = self.state().pause
        assert pause is not None
        return pause

    def _advance(self, after: PolicyState) -> None:
        adapter = None if after.adapter is None else after.adapter.name
        self.gate.advance(after.version, adapter=adapter, rollbacks=after.rollbacks)

    def _settle(
        self, targets: Collection[PoolEntry], results: dict[str, BackendResult], version: PolicyVersion | None
    ) -> None:
        """Those that have the version serve it; the others are out."""
        for entry in targets:
            result = results[entry.backend_id]
            if result.ok and version is not None:
                self.pool.let_in(entry, version)
            elif not result.ok:
                self._put_out(entry, f'{result.error}; an update that names it in "backends" tries again')

    def _leave_out(self, targets: Collection[PoolEntry], version: PolicyVersion) -> None:
        """Whoever was not part of it has the weights of before."""
        named = {entry.backend_id for entry in targets}
        for entry in self.pool.entries(self.name):
            if entry.backend_id not in named and usable(entry) and not entry.removed:
                words = f"it was not updated to version {version.version}; an update that names it brings it in"
                self.pool.put_out(entry, "version", words)

    def _leave_out_late(self, version: PolicyVersion) -> None:
        """Whoever came while the others were told to go on was still judged by the version of before."""
        there = self.pool.entries(self.name)
        self._leave_out([e for e in there if e.found.weights == version or e.quarantine is not None], version)

    def _put_out(self, entry: PoolEntry, words: str) -> None:
        if not entry.removed:
            self.pool.put_out(entry, "failed", words)

    async def _let_go_on(self, entries: Collection[PoolEntry], results: dict[str, BackendResult]) -> None:
        """Let the engines go on. One that does not is out, also when it took the weights."""
        went = failures(await self.engines.resume(entries))
        for entry in entries:
            result = went.get(entry.backend_id)
            if result is not None:
                self._put_out(entry, f"it could not be resumed: {result.error}")
                results[entry.backend_id] = result

    async def _keep_surely(self, after: PolicyState) -> None:
        """Keep a state that the engines are in already. Not written down, it is so all the same until a restart."""
        try:
            await self.keep(after)
        except Overloaded:
            log.error("policy.unkept", policy=self.name)  # noqa: TRY400 - said with its traceback where it was met
            self.remember(after)

    def _retire(self, adapter: str) -> None:
        self.beside(partial(self._unload, adapter), f"unload {adapter}")

    async def _unload(self, adapter: str) -> None:
        """Forget an adapter after its last call."""
        with trio.move_on_after(RETIRE_SECONDS_MAX):
            await self.gate.wait_landed(adapter=adapter)
        # Those that are down for the moment, too: nobody will tell them later, and adapters have few places.
        there = [entry for entry in self.pool.entries(self.name) if not entry.removed]
        results = await self.engines.unload(there, adapter)
        log.info("adapter.unloaded", policy=self.name, adapter=adapter, ok=_count(results))


def _may_be_spoilt(result: BackendResult) -> bool:
    """An engine that can't do it at all, or refused, has what it had; of any other nobody knows how far it came."""
    return result.code not in (Unsupported.code, WeightsRefused.code)


def _with_version(result: BackendResult, version: PolicyVersion) -> BackendResult:
    return msgspec.structs.replace(result, version=version.version) if result.ok else result


def _count(results: Sequence[BackendResult]) -> int:
    return sum(result.ok for result in results)
