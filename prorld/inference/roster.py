"""Who comes to the pool by itself: configured engines as soon as they answer, the embedded one for as long as it lives.

It owns the waiting and the starting again; who gets a lease, and who is well, is the pool's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec
import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.errors import BackendError, ConfigError, NotFound, ProrldError, RequestError, chain, leaves
from prorld.inference.embedded_backend import WEIGHTS_BYTES_MAX, EmbeddedBackend, run_embedded_backend
from prorld.inference.pool import BackendPool
from prorld.kit.cleanup import shielded
from prorld.wire.ops import AddBackend

__all__ = ["EmbeddedWish", "join", "keep_embedded"]

log: FilteringBoundLogger = structlog.get_logger("prorld.inference")

REJOIN_MIN_S = 1.0
REJOIN_MAX_S = 30.0
# A model in a child process may crash; one that crashes so often in that time is not made well by another start.
STARTS_MAX = 5
STARTS_WITHIN_S = 600.0
REMOVE_S_MAX = 1.0


class EmbeddedWish(msgspec.Struct, frozen=True, kw_only=True):
    """The embedded engine as it is wanted. ``required``: that it can't be started at all ends the daemon."""

    policy: str
    slots: int
    context_per_slot: int
    threads: int | None
    required: bool
    weights_bytes_max: int = WEIGHTS_BYTES_MAX


async def join(pool: BackendPool, request: AddBackend, *, told: Callable[[ProrldError], None] = lambda _: None) -> None:
    """Take a configured engine in as soon as it answers; it may well start later than the daemon.

    One that is in the pool already is in; one that the pool can never take is said once. ``told`` hears why each try
    has failed.
    """
    pause = REJOIN_MIN_S
    while True:
        try:
            await pool.add(request)
        except RequestError as exc:
            log.error("backend.refused", url=request.url, policy=request.policy, reason=exc.message)  # noqa: TRY400
            told(exc)
            return
        except ProrldError as exc:
            told(exc)
            log.warning("backend.absent", url=request.url, policy=request.policy, reason=chain(exc), again_in_s=pause)
        else:
            return
        await trio.sleep(pause)
        pause = min(REJOIN_MAX_S, 2 * pause)


async def keep_embedded(pool: BackendPool, wish: EmbeddedWish) -> None:
    """Keep the embedded engine running and in the pool, unless it can't be or keeps dying."""
    starts: deque[float] = deque(maxlen=STARTS_MAX)
    while True:
        starts.append(trio.current_time())
        absent = False
        try:
            await _run_embedded(pool, wish)
        except* ConfigError as group:
            if wish.required:
                raise next(leaves(group)) from group
            # Nobody asked for it by name: readiness says that there is no engine, and how to get one.
            log.warning("engine.absent", reason=chain(next(leaves(group))))
            absent = True
        except* ProrldError as group:
            log.error("engine.died", starts=len(starts), reason=chain(next(leaves(group))))  # noqa: TRY400
        crowded = len(starts) == STARTS_MAX and trio.current_time() - starts[0] < STARTS_WITHIN_S
        if absent or crowded:
            return
        await trio.sleep(REJOIN_MIN_S)


async def _run_embedded(pool: BackendPool, wish: EmbeddedWish) -> None:
    run = partial(
        run_embedded_backend, slots=wish.slots, context_per_slot=wish.context_per_slot, threads=wish.threads,
        weights_bytes_max=wish.weights_bytes_max,
    )  # fmt: skip
    async with trio.open_nursery() as nursery:
        backend: EmbeddedBackend = await nursery.start(run, name="embedded engine")
        await _catch_up(pool, wish.policy, backend)
        request = AddBackend(url=backend.url, kind="llamacpp", policy=wish.policy, max_inflight=wish.slots)
        with pool.client(backend):
            info = await pool.add(request)
            try:
                await trio.sleep_forever()
            finally:
                # A set that left it out has removed it already.
                with shielded(REMOVE_S_MAX, "removing the embedded engine"), suppress(NotFound):
                    await pool.remove(info.backend_id)  # noqa: ASYNC102  (shielded with a deadline by the line above)


async def _catch_up(pool: BackendPool, policy: str, backend: EmbeddedBackend) -> None:
    """A new engine begins with the weights of its model; those of the policy may still be where they were loaded from.

    Where they are not, or may be others by now, it comes to the pool as it is, and says why it is behind.
    """
    ref = None if pool.keeper is None else pool.keeper.weights(policy)
    if ref is None:
        return
    reason = f"it is not known what {ref.path} was when it was loaded"
    if ref.seal is not None:
        try:
            await backend.load_weights(ref)
        except BackendError as exc:
            reason = chain(exc)
        else:
            return
    backend.behind = f"after a start it could not load the weights of {ref.version.label} again: {reason}"
    log.warning("engine.behind", policy=policy, path=ref.path, version=ref.version.label, reason=reason)
