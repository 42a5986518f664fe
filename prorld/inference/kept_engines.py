"""The engines as those who name them over HTTP see them: what is named there is written down before it is answered.

It owns which engines are kept. Those of the configuration come by themselves and are not kept, nor is the embedded one,
nor those of the surface for old trainers, which has a file of its own. Everything else is the pool's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Protocol

import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.errors import NotFound, Overloaded, ProrldError, chain
from prorld.inference.contract import Capabilities
from prorld.inference.engines import same_address
from prorld.inference.pool import BackendPool
from prorld.inference.pool_entry import PoolEntry
from prorld.store.engine_file import ENGINES_MAX, KeptEngine
from prorld.wire.ops import AddBackend, BackendInfo, BackendList, BackendSet, SetBackends

__all__ = ["EngineStore", "KeptEngines"]

log: FilteringBoundLogger = structlog.get_logger("prorld.inference")

WRITE_SECONDS_MAX = 30.0
RETRY_SECONDS = 30.0
REMOVE_SECONDS_MAX = 5.0


class EngineStore(Protocol):
    """Where they are kept; ``prorld.store.engine_file.EngineFile`` is one."""

    async def save(self, engines: Iterable[KeptEngine]) -> None:
        """Keep these and no others. Raises ``OSError``."""
        ...


class KeptEngines:
    """What the routes of engines ask. Which entries of the pool are kept, each of them says itself."""

    def __init__(self, pool: BackendPool, store: EngineStore) -> None:
        self._pool = pool
        self._store = store
        # Kept, and of no use in this life: their policy or the plugin for their kind is not there.
        self._dormant: list[KeptEngine] = []
        self._written: list[KeptEngine] = []
        self._turn = trio.Lock()

    def restore(self, kept: Iterable[KeptEngine], *, configured: Collection[tuple[str, str]] = ()) -> None:
        """Take in those of an earlier life, as engines that went away: the pool's watch asks them what they are now.

        ``configured`` are the policies and addresses of the configuration, whose word holds for them.
        """
        mine = {(policy, same_address(url)) for policy, url in configured}
        self._written = list(kept)
        for each in self._written:
            if _place(each) in mine:
                continue
            found = Capabilities(
                model=each.model, max_context_tokens=each.max_context_tokens, control=each.control, weights=each.weights
            )
            try:
                entry = self._pool.restore(each.backend_id, each.request, found, draining=each.draining)
            except Exception as exc:
                # Whatever a plugin's client raises, too: it must not keep the daemon from its start.
                self._dormant.append(each)
                log.warning(
                    "backend.dormant", url=each.request.url, policy=each.request.policy, reason=chain(exc),
                    exc_info=not isinstance(exc, ProrldError),
                )  # fmt: skip
            else:
                entry.kept = True

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write down, too, what changes of them without being asked for here: the versions that they are given."""
        task_status.started()
        while True:
            changed = self._pool.changed
            try:
                await self._write()
            except Overloaded:
                await trio.sleep(RETRY_SECONDS)
            else:
                await changed.wait()

    def list(self, policy: str | None = None) -> BackendList:
        """The engines of one policy, or of all."""
        return self._pool.list(policy)

    async def add(self, request: AddBackend) -> BackendInfo:
        """As the pool does. ``Overloaded`` where it can't be written down, and then it is not there."""
        info = await self._pool.add(request)
        entry = next(each for each in self._pool.entries(request.policy) if each.backend_id == info.backend_id)
        entry.kept = True
        try:
            await self._write()
        except Overloaded:
            entry.kept = False
            with trio.move_on_after(REMOVE_SECONDS_MAX, shield=True), suppress(NotFound):
                await self._pool.remove(info.backend_id)
            raise
        return info

    async def replace(self, wanted: SetBackends) -> BackendSet:
        """As the pool does. ``Overloaded`` where the new set can't be written down; it holds until a restart then."""
        there = {entry.backend_id for entry in self._pool.entries(wanted.policy)}
        named = {same_address(item.url) for item in wanted.backends}
        try:
            replaced = await self._pool.replace(wanted)
            # Those that this life has no use for are of the old set, too.
            self._dormant = [each for each in self._dormant if each.request.policy != wanted.policy]
            return replaced
        finally:
            # Also where it was cancelled right after the set was exchanged.
            for entry in self._pool.entries(wanted.policy):
                if entry.backend_id not in there and same_address(entry.request.url) in named:
                    entry.kept = True
            await self._write()  # noqa: ASYNC102  (shielded with a deadline where it waits)

    async def drain(self, backend_id: str) -> BackendInfo:
        """As the pool does, also after a restart."""
        info = await self._pool.drain(backend_id)
        await self._write()
        return info

    async def remove(self, backend_id: str) -> None:
        """As the pool does. ``Overloaded`` where that can't be written down, and then it is still there."""
        entry = next((each for each in self._pool.entries(None) if each.backend_id == backend_id), None)
        if entry is not None and entry.kept:
            entry.kept = False
            try:
                await self._write()
            except Overloaded:
                entry.kept = True
                raise
        await self._pool.remove(backend_id)

    async def _write(self) -> None:
        """Write down what is kept now, where that is something else than what is written."""
        try:
            # Whoever asked may be gone already; what was done is written down all the same.
            with trio.fail_after(WRITE_SECONDS_MAX, shield=True):
                # Not before its turn is it known what is written.
                async with self._turn:
                    there = [_kept(entry) for entry in self._pool.entries(None) if _is_kept(entry)]
                    named = {_place(each) for each in there}
                    kept = [*(each for each in self._dormant if _place(each) not in named), *there]
                    # No more than the next life reads; those that this one has no use for go first.
                    kept = kept[-ENGINES_MAX:]
                    if kept != self._written:
                        await self._store.save(kept)
                        self._written = kept
                        # What was named anew is meant so, and is not to come back as it was.
                        self._dormant = [each for each in self._dormant if _place(each) not in named]
        except (OSError, trio.TooSlowError) as exc:
            log.exception("backend.unkept")
            raise Overloaded(f"the engines can't be written down: {exc}", code="state_unwritable") from exc


def _place(engine: KeptEngine) -> tuple[str, str]:
    return engine.request.policy, same_address(engine.request.url)


def _is_kept(entry: PoolEntry) -> bool:
    return entry.kept and not entry.leaving


def _kept(entry: PoolEntry) -> KeptEngine:
    return KeptEngine(
        backend_id=entry.backend_id,
        request=entry.request,
        model=entry.found.model,
        max_context_tokens=entry.found.max_context_tokens,
        control=entry.found.control,
        # Others are asked. What one that is kept out has is not known.
        weights=None if entry.found.control or entry.quarantine is not None else entry.found.weights,
        draining=entry.draining,
    )
