"""What a change of weights does to the engines of a policy: pause, load, label, resume.

All engines at once, each step under a deadline of its own, so that one that hangs keeps nobody waiting beyond it. What
goes wrong with an engine is its result and never an exception. It decides nothing of versions and keeps no state.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial

import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.domain.policy import BackendResult, Mode, Update
from prorld.domain.versions import PolicyVersion, adapter_name
from prorld.errors import BackendError, Unsupported, chain
from prorld.inference.contract import WeightRef
from prorld.inference.policy_gate import PolicyGate
from prorld.inference.pool_entry import PoolEntry

__all__ = ["LOAD_SECONDS", "PolicyEngines", "failures"]

log: FilteringBoundLogger = structlog.get_logger()

# An engine that is told to abort its calls answers within a second; a loaded one takes some.
PAUSE_SECONDS_MAX = 60.0
RESUME_SECONDS_MAX = 60.0
CACHE_SECONDS_MAX = 60.0
LABEL_SECONDS_MAX = 30.0
LOAD_SECONDS = 1800.0
# After an engine has said that it is paused, its last answers are on their way.
LANDING_SECONDS_MAX = 5.0
# For the calls of an engine that can't be paused, where they are to be aborted.
GRACE_SECONDS = 5.0

# Codes of results beside those of errors.
HANGS, OTHER_VERSION, BROKEN = "engine_hangs", "other_version", "engine_failed"

Step = Callable[[PoolEntry], Awaitable[BackendResult]]


class PolicyEngines:
    """The engines of one policy, behind its gate."""

    def __init__(self, gate: PolicyGate, *, load_s: float = LOAD_SECONDS) -> None:
        self._gate = gate
        self._load_s = load_s

    # --- pause and resume ---------------------------------------------------------------------------------------------

    async def pause(self, entries: Collection[PoolEntry], mode: Mode, timeout_s: float) -> list[BackendResult]:
        """Stop them as ``mode`` says. The gate is closed, so nothing new comes to them."""
        return await self._all(entries, partial(self._pause, mode=mode, timeout_s=timeout_s))

    async def _pause(self, entry: PoolEntry, *, mode: Mode, timeout_s: float) -> BackendResult:
        if not entry.found.control:
            return await self._wait_out(entry, GRACE_SECONDS if mode == "abort" else timeout_s)
        entry.asleep, paused = True, False
        if mode == "wait":
            with trio.move_on_after(timeout_s):
                await entry.backend.pause("wait")
                paused = True
        if not paused:
            with trio.fail_after(PAUSE_SECONDS_MAX):
                await entry.backend.pause("keep" if mode == "keep" else "abort")
        if mode == "keep":
            self._gate.freeze(entry.backend_id)
            return _ok(entry)
        return await self._wait_out(entry, LANDING_SECONDS_MAX)

    async def _wait_out(self, entry: PoolEntry, seconds: float) -> BackendResult:
        """Let its calls end, then cut off those that did not: nobody has seen what they had."""
        with trio.move_on_after(seconds):
            await self._gate.wait_landed(entry.backend_id)
        lost = self._gate.cut(entry.backend_id)
        if lost:
            log.warning("calls.cut", policy=self._gate.policy, backend=entry.backend_id, calls=lost)
            await self._gate.wait_landed(entry.backend_id)
        return _ok(entry)

    async def resume(self, entries: Collection[PoolEntry]) -> list[BackendResult]:
        """Let them go on."""
        return await self._all(entries, self._resume)

    async def _resume(self, entry: PoolEntry) -> BackendResult:
        try:
            if entry.found.control:
                with trio.fail_after(RESUME_SECONDS_MAX):
                    await entry.backend.resume()
            entry.asleep = False
        except BaseException:
            # It will never go on with what it froze.
            self._gate.cut(entry.backend_id)
            raise
        finally:
            self._gate.thaw(entry.backend_id)
        return _ok(entry)

    # --- weights ------------------------------------------------------------------------------------------------------

    async def install(
        self, entries: Collection[PoolEntry], update: Update, version: PolicyVersion, base: PolicyVersion
    ) -> list[BackendResult]:
        """Load the weights and name them, then read the name back. An adapter goes beside weights named ``base``."""
        if update.how == "lora":
            return await self._all(entries, partial(self._adapt, update=update, version=version, base=base))
        return await self._all(entries, partial(self._replace, update=update, version=version))

    async def _replace(self, entry: PoolEntry, *, update: Update, version: PolicyVersion) -> BackendResult:
        if update.path is not None:
            if not entry.found.reload:
                raise Unsupported("it can't load weights by itself")
            ref = WeightRef(how="reload", path=update.path, version=version, seal=update.seal)
            with trio.fail_after(self._load_s):
                await entry.backend.load_weights(ref)
        return await self._label(entry, version)

    async def _label(self, entry: PoolEntry, version: PolicyVersion) -> BackendResult:
        if not entry.found.control:
            return await self._tell(entry, version)
        with trio.fail_after(CACHE_SECONDS_MAX):
            await entry.backend.clear_cache()
        with trio.fail_after(LABEL_SECONDS_MAX):
            await entry.backend.set_version(version)
            found = await entry.backend.read_version()
        if found == version:
            return _ok(entry, version)
        says = "no version of ours" if found is None else found.label
        return _failed(entry, f"it reads back {says} and not {version.label}", OTHER_VERSION, found)

    async def _tell(self, entry: PoolEntry, version: PolicyVersion) -> BackendResult:
        """One that can't be asked has the version that it is said to have."""
        try:
            with trio.fail_after(LABEL_SECONDS_MAX):
                await entry.backend.set_version(version)
        except Unsupported:
            log.debug("policy.untold", backend=entry.backend_id)
        return _ok(entry, version)

    async def _adapt(
        self, entry: PoolEntry, *, update: Update, version: PolicyVersion, base: PolicyVersion
    ) -> BackendResult:
        if not entry.found.lora:
            raise Unsupported("it can't load adapters while it runs")
        if entry.found.control:
            with trio.fail_after(LABEL_SECONDS_MAX):
                found = await entry.backend.read_version()
            if found != base:
                words = f"its weights are not those that the adapters of this policy are for ({base.label})"
                return _failed(entry, words, OTHER_VERSION, found)
        name = adapter_name(self._gate.policy, version)
        ref = WeightRef(how="lora", path=update.path or "", version=version, name=name, seal=update.seal)
        with trio.fail_after(self._load_s):
            await entry.backend.load_weights(ref)
        return _ok(entry, version)

    async def unload(self, entries: Collection[PoolEntry], adapter: str) -> list[BackendResult]:
        """Forget an adapter."""
        return await self._all([entry for entry in entries if entry.found.lora], partial(self._unload, adapter=adapter))

    async def _unload(self, entry: PoolEntry, *, adapter: str) -> BackendResult:
        with trio.fail_after(LABEL_SECONDS_MAX):
            await entry.backend.unload_adapter(adapter)
        return _ok(entry)

    async def clear_caches(self, entries: Collection[PoolEntry], version: PolicyVersion) -> list[BackendResult]:
        """Forget what was computed, and name the weights; for weights that somebody else has put there."""
        return await self._all(entries, partial(self._label, version=version))

    # --- all at once --------------------------------------------------------------------------------------------------

    async def _all(self, entries: Collection[PoolEntry], step: Step) -> list[BackendResult]:
        results: dict[str, BackendResult] = {}

        async def one(entry: PoolEntry) -> None:
            results[entry.backend_id] = await _contained(entry, step)

        async with trio.open_nursery() as nursery:
            for entry in entries:
                nursery.start_soon(one, entry, name=f"engine {entry.backend_id}")
        return [results[entry.backend_id] for entry in entries]


async def _contained(entry: PoolEntry, step: Step) -> BackendResult:
    """A step with one engine; whatever it raises is told of that engine alone."""
    try:
        return await step(entry)
    except BackendError as exc:
        return _failed(entry, chain(exc), exc.stable_code)
    except trio.TooSlowError:
        return _failed(entry, "it did not answer in time", HANGS)
    except Exception as exc:
        # What a plugin's client makes of an engine must not stop the change for the others.
        log.exception("backend.broken", backend=entry.backend_id)
        return _failed(entry, chain(exc), BROKEN)


def _ok(entry: PoolEntry, version: PolicyVersion | None = None) -> BackendResult:
    return BackendResult(id=entry.backend_id, ok=True, version=None if version is None else version.version)


def _failed(entry: PoolEntry, words: str, code: str, found: PolicyVersion | None = None) -> BackendResult:
    return BackendResult(
        id=entry.backend_id, ok=False, error=words, code=code, version=None if found is None else found.version
    )


def failures(results: Sequence[BackendResult]) -> dict[str, BackendResult]:
    """Those that did not go well, by engine."""
    return {result.id: result for result in results if not result.ok}
