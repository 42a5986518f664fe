"""The composition root: builds the parts in order, holds the nurseries they live in, and takes them down in reverse.

Four nurseries, one inside the other, so that whatever is needed to clean up outlives what has to be cleaned up:
``ears`` (signals) > ``core`` (warden, engines, pool) > ``jobs`` (supervisor) > ``front`` (HTTP). One signal drains,
two kill; what others do is in ``ops.signals``.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld import __version__
from prorld.config import Config, Loaded
from prorld.daemon_parts import (
    DEFAULT_POLICY,
    Compat,
    make_compat,
    make_rollouts,
    scratch_dir,
    start_sampling,
    start_sandboxes,
    start_store,
)
from prorld.errors import BadRequest, ConfigError
from prorld.handlers.registry import discover
from prorld.http.app import create_app
from prorld.http.auth import CompatAuth, NoAuth, load_token_book
from prorld.http.compat import create_compat_app
from prorld.http.deps import CompatDeps, HttpDeps
from prorld.http.guarded import ConnectionLimits
from prorld.http.serve import HttpServer, run_http
from prorld.inference.models import PooledModels
from prorld.inference.pool import BackendPool
from prorld.inference.roster import EmbeddedWish, join, keep_embedded
from prorld.kit import loop_lag
from prorld.kit.lanes import Lane
from prorld.metrics import Metrics
from prorld.ops import conditions
from prorld.ops.health import Health
from prorld.ops.notify import Notifier
from prorld.ops.service import Outside, Service
from prorld.ops.state_dir import announced, held
from prorld.ops.task_tree import TaskAges, task_tree
from prorld.ops.views import Views
from prorld.rollout.clock import SystemClock
from prorld.rollout.life import World
from prorld.rollout.stages import Gates
from prorld.sandbox import reaper
from prorld.wire.ops import AddBackend, Endpoint

__all__ = ["Outside", "serve"]

log: FilteringBoundLogger = structlog.get_logger("prorld.daemon")

# Tokenizing long texts and loading tokenizers. Each job waits for its own text only, so a few threads do.
TOKENIZER_THREADS = 2


async def serve(
    loaded: Loaded,
    *,
    outside: Outside | None = None,
    task_status: trio.TaskStatus[Endpoint] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run the daemon until a signal, or until cancelled. Hands out where it listens once it does.

    Without an ``outside`` it is a guest in somebody else's process and leaves SIGHUP and SIGQUIT alone.
    """
    faulthandler.enable()
    boot_id = secrets.token_hex(4)
    notifier = Notifier.from_environment(os.environ)
    with held(loaded.state_dir):
        try:
            async with _outliving("ears") as ears, _outliving("core") as core:
                with _task_ages() as ages:
                    await _serve(loaded, boot_id, core, ears, notifier, ages, outside, task_status)
        finally:
            # Last, and without an await: nothing runs any more that could be kept waiting.
            reaper.remove_boot(scratch_dir(loaded), boot_id)
    log.info("daemon.ended", boot_id=boot_id)


@contextmanager
def _task_ages() -> Iterator[TaskAges]:
    ages = TaskAges()
    trio.lowlevel.add_instrument(ages)
    try:
        yield ages
    finally:
        trio.lowlevel.remove_instrument(ages)


@asynccontextmanager
async def _outliving(name: str) -> AsyncIterator[trio.Nursery]:
    """A nursery for what the block needs to the last: shielded, so that an end from outside reaches the block first."""
    scope, opened = trio.CancelScope(shield=True), _Opened()
    async with trio.open_nursery() as nursery:
        # Not ``nursery.start``: cancelled in it, it would wait for ever for a task that nothing reaches.
        nursery.start_soon(_hold, scope, opened, name=name)
        try:
            yield await opened.wait()
        finally:
            scope.cancel("the daemon ends")


class _Opened:
    """A nursery that is about to be opened."""

    def __init__(self) -> None:
        self._nursery: trio.Nursery | None = None
        self._is_open = trio.Event()

    def set(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._is_open.set()

    async def wait(self) -> trio.Nursery:
        await self._is_open.wait()
        assert self._nursery is not None
        return self._nursery


async def _hold(scope: trio.CancelScope, opened: _Opened) -> None:
    """A nursery that outlives whoever uses it, until its scope is cancelled."""
    with scope:
        async with trio.open_nursery() as nursery:
            opened.set(nursery)
            await trio.sleep_forever()


async def _serve(
    loaded: Loaded,
    boot_id: str,
    core: trio.Nursery,
    ears: trio.Nursery,
    notifier: Notifier,
    ages: TaskAges,
    outside: Outside | None,
    task_status: trio.TaskStatus[Endpoint],
) -> None:
    config = loaded.config
    auth = NoAuth() if config.server.no_auth else load_token_book(loaded.state_dir)
    registry = discover(config.handlers.enabled, config.handlers.config)
    metrics, lag, clock = Metrics(), loop_lag.LoopLag(), SystemClock()
    core.start_soon(loop_lag.run, config.metrics.loop_lag_interval_s, _both(lag, metrics), name="loop lag")
    # First of all: what can't be written down must not be accepted, and what was must be found.
    stored = await start_store(loaded, core, metrics, clock)
    lane = Lane("tokenizers", TOKENIZER_THREADS)
    sampling = await start_sampling(loaded, core, lane, metrics, clock, boot_id)
    sandboxes = await start_sandboxes(loaded, core, lane, metrics, boot_id, registry.sources())
    world = World(
        gates=_gates(config), runtime=sandboxes.runtime, expect=sandboxes.runtime.expect,
        models=PooledModels(sampling.pool, sampling.policies, lane, sampling.book.gate),
        clock=clock, boot_id=boot_id, verdicts=config.verdicts.table(), metrics=metrics, journal=stored.journal,
    )  # fmt: skip
    rollouts = make_rollouts(config, world, registry, sampling, stored)
    supervisor = rollouts.supervisor
    compat = make_compat(loaded, rollouts, sampling, registry)
    sandboxes.runtime.keep_while(lambda: not supervisor.draining and supervisor.stages().init.workers > 0)
    disk = conditions.Disk(loaded.state_dir)
    parts = conditions.Parts(
        supervisor=supervisor, auditor=rollouts.auditor, pool=sampling.pool, policies=sampling.policies,
        journal=stored.journal, retention=stored.retention, book=sampling.book, registry=registry,
        warden=sandboxes.warden, lag=lag, disk=disk, breakers=rollouts.batches.floor.room.breakers,
        no_sandbox=sandboxes.lacking, is_root=sandboxes.is_root,
        engines=[(entry.policy, entry.url) for entry in config.backends],
        compat=None if compat is None else compat.service, open_at=config.compat.bind if config.compat.open else None,
    )  # fmt: skip
    health = Health(conditions.checks(parts), trio.current_time)
    core.start_soon(conditions.watch, health, disk, name="health")
    views = Views(
        boot_id=boot_id, supervisor=supervisor, batches=rollouts.batches, pool=sampling.pool,
        registry=registry, runtime=sandboxes.runtime,
        book=sampling.book, metrics=metrics, lag=lag, health=health, cgroups=sandboxes.cgroups,
    )  # fmt: skip
    service = Service(
        config=config, supervisor=supervisor, set_weights=world.gates.set_weights, health=health, notifier=notifier,
        ages=ages, outside=outside,
    )  # fmt: skip
    deps = HttpDeps(
        service=supervisor, batches=rollouts.batches, backends=sampling.engines, policies=sampling.control,
        looks=rollouts.looks, handlers=views.handlers, sandboxes=views.sandboxes, ready=views.ready,
        status=views.status, metrics=views.metrics_page, tasks=partial(task_tree, ages), auth=auth,
        body_bytes_max=config.server.body_bytes_max,
    )  # fmt: skip
    async with registry.open_all(), trio.open_nursery() as jobs:
        # Beside the jobs, not in the core: what ends a sandbox has to outlive it.
        await jobs.start(sandboxes.runtime.keep, name="warm sandboxes")
        await rollouts.start(jobs)
        await jobs.start(stored.retention.run, name="retention")
        if compat is not None:
            await jobs.start(compat.service.run, name="compat")
        _start_engines(config, core, sampling.pool)
        async with trio.open_nursery() as front:
            server: HttpServer = await front.start(
                partial(run_http, create_app(deps), bind=_bind(config), limits=_connections(config)), name="http"
            )
            beside = await _listen_beside(config, front, compat)
            endpoint = Endpoint(
                address=server.address, boot_id=boot_id, pid=os.getpid(), version=__version__, started_at=clock.wall(),
                compat_address=None if beside is None else beside.address,
            )  # fmt: skip
            with announced(loaded.state_dir, endpoint):
                _tune_gc(config)
                running = await service.start(core, ears)
                log.info("daemon.started", address=server.address, boot_id=boot_id, state_dir=str(loaded.state_dir))
                task_status.started(endpoint)
                await running.until_told()
            server.close()
            if beside is not None:
                beside.close()
        jobs.cancel_scope.cancel("the daemon is shutting down")


async def _listen_beside(config: Config, front: trio.Nursery, compat: Compat | None) -> HttpServer | None:
    """The listener for trainers of other servers, where there is to be one."""
    if compat is None or config.compat.bind is None:
        return None
    deps = CompatDeps(
        service=compat.service, gym=compat.gym, auth=CompatAuth(is_public=config.compat.open),
        body_bytes_max=config.server.body_bytes_max,
    )  # fmt: skip
    app = create_compat_app(deps)
    server: HttpServer = await front.start(
        partial(run_http, app, bind=config.compat.bind, limits=_connections(config)), name="http compat"
    )
    log.warning("compat.listening", address=server.address, token="none is asked for", open=config.compat.open)  # noqa: S106
    return server


# --- engines ----------------------------------------------------------------------------------------------------------


def _start_engines(config: Config, core: trio.Nursery, pool: BackendPool) -> None:
    for entry in config.backends:
        request = AddBackend(
            url=entry.url, kind=entry.kind, policy=entry.policy, model=entry.model,
            max_inflight=entry.max_inflight, weight=entry.weight,
        )  # fmt: skip
        try:
            pool.check(request)
        except BadRequest as exc:
            raise ConfigError(f"backends: {entry.url}: {exc.message}") from exc
        core.start_soon(join, pool, request, name=f"join {entry.url}")
    if config.embedded_engine:
        wish = EmbeddedWish(
            policy=DEFAULT_POLICY, slots=config.engine.slots, context_per_slot=config.engine.context_tokens,
            threads=config.engine.threads or None, required=bool(config.engine.enabled),
            weights_bytes_max=config.engine.weights_bytes_max,
        )  # fmt: skip
        core.start_soon(keep_embedded, pool, wish, name="embedded engine")


# --- parts from configuration -----------------------------------------------------------------------------------------


def _gates(config: Config) -> Gates:
    stages = config.stages
    return Gates(
        init=stages.init, run=stages.run, eval=stages.eval, ahead=stages.ahead, weights=config.fairness.weights
    )


def _bind(config: Config) -> str:
    server = config.server
    if server.unix_socket is not None:
        return f"unix:{server.unix_socket}"
    return f"[{server.host}]:{server.port}" if ":" in server.host else f"{server.host}:{server.port}"


def _connections(config: Config) -> ConnectionLimits:
    return ConnectionLimits(
        connections_max=config.server.connections_max,
        send_stall_s=config.server.send_stall_s,
        keep_alive_s=config.server.keep_alive_s,
    )


def _both(lag: loop_lag.LoopLag, metrics: Metrics) -> Callable[[float], None]:
    def note(seconds: float) -> None:
        lag.note(seconds)
        metrics.loop_lagged(seconds)

    return note


def _tune_gc(config: Config) -> None:
    """At a thousand agents the defaults stop the loop for a tenth of a second, several times a minute."""
    gc.set_threshold(config.gc.threshold0, config.gc.threshold1, config.gc.threshold2)
    if config.gc.freeze:
        gc.collect()
        gc.freeze()
