"""Who is well: the health of every engine, its return after a fault, and its load, by which it is given calls.

An engine that does not answer is down after a few checks, and its calls are left to end for a while: it may be only
slow. Then they are ended, and the jobs make them again elsewhere.
"""

from __future__ import annotations

import itertools
from contextlib import suppress

import msgspec
import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.domain.backends import BackendState
from prorld.errors import BackendError
from prorld.inference.contract import Backend, Capabilities
from prorld.inference.desk import STRIKES_MAX
from prorld.inference.engines import Engines
from prorld.inference.pool_entry import PoolEntry, Quarantine

__all__ = ["ABANDON_SECONDS", "CLOSE_SECONDS_MAX", "FORGIVE_SECONDS", "PROBE_SECONDS_MAX", "Watch", "probe"]

log: FilteringBoundLogger = structlog.get_logger("prorld.inference.pool")

PROBE_SECONDS_MAX = 30.0
# Where nothing fits every job would end at once with a full context, as if that were the policy's doing.
CONTEXT_TOKENS_MIN = 8
WAKE_SECONDS_MAX = 30.0
HEALTH_SECONDS = 1.0
# For engines of an earlier life to be there when this one begins to take calls.
FIRST_LOOK_SECONDS_MAX = 3.0
HEALTH_SECONDS_MAX = 2.0
CLOSE_SECONDS_MAX = 5.0

# Health checks between two looks at the load of an engine whose limit holds nobody up.
LOAD_ROUNDS = 5

# A fault is forgotten after this long without another one.
FORGIVE_SECONDS = 10.0

# An engine that is down and has not been heard of for so long will not answer the calls that are in it.
ABANDON_SECONDS = 20.0


async def probe(backend: Backend) -> Capabilities:
    """Ask an engine what it is. Raises ``BackendError``."""
    with trio.move_on_after(PROBE_SECONDS_MAX):
        found = await backend.probe()
        if found.max_context_tokens < CONTEXT_TOKENS_MIN:
            words = f"{backend.url} says that its context holds {found.max_context_tokens} tokens"
            raise BackendError(words, retryable=False)
        return found
    raise BackendError(f"{backend.url} did not answer its probe within {PROBE_SECONDS_MAX:g} s")


class Watch:
    """Looks after the engines, each in a task of its own for as long as one check takes."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch until cancelled, then close all clients. A lease that waits then is told so.

        It has started when the engines that are there already were asked once. Otherwise whoever names weights right
        after a start would name them for none, and those that come back a moment later would have older ones.
        """
        try:
            await self._look_at_all()
            task_status.started()
            async with trio.open_nursery() as nursery:
                for turn in itertools.count():
                    await trio.sleep(HEALTH_SECONDS)
                    await self._close_retired()
                    for entry in self._engines:
                        # One that hangs in its own check must not keep the others from theirs.
                        if not entry.in_check:
                            nursery.start_soon(self._check, entry, turn, name=f"health of {entry.backend_id}")
        finally:
            self._engines.ended = True
            self._engines.note_change()
            with trio.move_on_after(CLOSE_SECONDS_MAX, shield=True):
                self._engines.retired += [entry.backend for entry in self._engines]
                await self._close_retired()

    async def _look_at_all(self) -> None:
        with trio.move_on_after(FIRST_LOOK_SECONDS_MAX):
            async with trio.open_nursery() as nursery:
                for entry in self._engines:
                    nursery.start_soon(self._check, entry, 0, name=f"first look at {entry.backend_id}")

    async def _close_retired(self) -> None:
        retired = self._engines.retired
        while retired:
            try:
                with trio.move_on_after(CLOSE_SECONDS_MAX):
                    await retired[0].aclose()
            except Exception:
                log.exception("backend.broken", url=retired[0].url, kind=retired[0].kind)
            # Not before it is done, so that a cancel leaves it to the end of the pool.
            del retired[0]

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
        entry.heard_at = trio.current_time()
        quiet_seconds = trio.current_time() - entry.struck_at
        if entry.row.state is BackendState.DOWN:
            if quiet_seconds >= entry.down_s:
                await self._welcome_back(entry)
        elif entry.row.strikes and quiet_seconds >= FORGIVE_SECONDS:
            entry.row.strikes = 0
            if entry.row.state is BackendState.SUSPECT:
                self._engines.set_state(entry, entry.reachable_state)
        if turn % LOAD_ROUNDS == 0 or entry.needs_a_look:
            await self._read_load(entry)
        if entry.is_stalled and not self._engines.is_paused(entry.policy) and not entry.removed:
            reason = f"worked on nothing for {entry.rules.stall_s:g} s with {entry.counts.inflight} calls in it"
            self._engines.lose(entry, reason)
            self._engines.abandon(entry, reason)

    def _miss(self, entry: PoolEntry) -> None:
        entry.missed += 1
        if entry.removed or entry.missed < STRIKES_MAX:
            return
        if entry.row.state is not BackendState.QUARANTINED:
            self._engines.lose(entry, f"missed {entry.missed} health checks")
        silent_s = trio.current_time() - entry.heard_at
        if silent_s >= ABANDON_SECONDS:
            self._engines.abandon(entry, f"not heard of for {silent_s:.0f} s")

    async def _welcome_back(self, entry: PoolEntry) -> None:
        """An engine that was down comes back only through its probe: it may be another one by now."""
        backend = entry.backend
        try:
            found = await probe(backend)
            await self._wake(entry, backend)
        except BackendError:
            entry.struck_at = trio.current_time()
            return
        # Somebody else may have asked it meanwhile, with another client perhaps, and have come first.
        if entry.removed or entry.backend is not backend or entry.row.state is not BackendState.DOWN:
            return
        if found.model != entry.found.model:
            # Its tokens would be another model's under this policy's name. Whoever wants that adds it anew.
            words = f"it serves {found.model} now and not {entry.found.model}; remove it and add it anew"
            entry.quarantine = Quarantine("model", words)
            self._engines.set_state(entry, BackendState.QUARANTINED)
            log.error("backend.quarantined", backend=entry.backend_id, policy=entry.policy, reason=words)
            return
        self._engines.refresh(entry, backend, found)
        if entry.quarantine is None:
            log.info("backend.recovered", backend=entry.backend_id, model=found.model, version=found.version)

    async def _wake(self, entry: PoolEntry, backend: Backend) -> None:
        """It was down when the policy went on, and may be paused to this day."""
        if not entry.asleep or self._engines.is_paused(entry.policy):
            return
        with trio.move_on_after(WAKE_SECONDS_MAX):
            await backend.resume()
            entry.asleep = False
            return
        raise BackendError(f"{backend.url} did not go on within {WAKE_SECONDS_MAX:g} s")

    async def _read_load(self, entry: PoolEntry) -> None:
        # Where it does not tell, its health check says whether it is well, and the limit follows its answers to calls.
        load = msgspec.structs.replace(entry.load, running=None, waiting=None, kv_usage=None)
        with suppress(BackendError), trio.move_on_after(HEALTH_SECONDS_MAX):
            load = await entry.backend.load()
        entry.take_load(load, is_paused=self._engines.is_paused(entry.policy))
