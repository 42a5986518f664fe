"""Keeps an engine running and, where asked, known to a daemon; both end together."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol

import msgspec
import trio

from prorld.cli.output import note, say
from prorld.client import Client, ClientError
from prorld.inference.embedded import EmbeddedEngine, run_embedded_engine
from prorld.inference.vllm_process import VllmProcess, run_vllm
from prorld.kit.cleanup import afterwards
from prorld.wire.ops import AddBackend, BackendKindName

__all__ = ["Registration", "Running", "Start", "run_engine", "start_embedded", "start_vllm"]

# How often the daemon is asked whether it still knows the engine: it may have been started anew.
LOOK_S = 5.0
REMOVE_S = 5.0


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that answers."""

    kind: BackendKindName
    url: str
    model: str
    pid: int


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """Where and as what an engine is made known."""

    connect: Callable[[], Client]
    policy: str = "default"
    max_inflight: int | None = None


class Start(Protocol):
    """Starts an engine into a nursery."""

    def __call__(self, nursery: trio.Nursery) -> Awaitable[Running]:
        """The engine, once it answers."""
        ...


async def start_embedded(
    model: str | None, nursery: trio.Nursery, *, slots: int, context: int, threads: int | None
) -> Running:
    """The embedded engine."""
    run = partial(run_embedded_engine, model_path=model, slots=slots, context_per_slot=context, threads=threads)
    engine: EmbeddedEngine = await nursery.start(run, name="embedded engine")
    return Running(kind="llamacpp", url=engine.url, model=engine.model_path, pid=engine.pid)


async def start_vllm(
    model: str,
    nursery: trio.Nursery,
    *,
    python: str | None,
    host: str,
    port: int,
    control: bool,
    lora: bool,
    more: Sequence[str],
) -> Running:
    """VLLM."""
    run = partial(run_vllm, model, python=python, host=host, port=port, control=control, lora=lora, more=more)
    engine: VllmProcess = await nursery.start(run, name="vllm")
    return Running(kind="vllm", url=engine.url, model=engine.model, pid=engine.pid)


async def run_engine(start: Start, registration: Registration | None) -> None:
    """Until a signal, or until the engine ends by itself, which raises."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_until_told, nursery.cancel_scope, name="signals")
        note("starting the engine")
        engine = await start(nursery)
        say(f"{engine.kind} engine at {engine.url}, model {engine.model}, pid {engine.pid}")
        if registration is not None:
            nursery.start_soon(_keep_registered, engine, registration, name="registration")
    note("the engine has ended")


async def _until_told(scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        await anext(signals)
        scope.cancel("told to end")


async def _keep_registered(engine: Running, registration: Registration) -> None:
    """Add the engine, again wherever the daemon does not know it, and remove it at the end."""
    backend_id: str | None = None

    async def remove() -> None:
        await trio.to_thread.run_sync(_remove, engine, registration, abandon_on_cancel=True)

    async with afterwards(REMOVE_S, "removing the engine from the daemon", remove):
        while True:
            # One short call at a time in a thread; a cancel waits for it, so that its answer is not lost.
            found = await trio.to_thread.run_sync(_registered, engine, registration)
            if found is not None and found != backend_id:
                note(f"registered as {found}")
            backend_id = found
            await trio.sleep(LOOK_S)


def _registered(engine: Running, registration: Registration) -> str | None:
    """The engine's id at the daemon; ``None`` while the daemon can't be asked. Raises what waiting does not cure."""
    try:
        with registration.connect() as client:
            known = _known(client, engine, registration)
            if known is not None:
                return known
            request = AddBackend(
                url=engine.url, kind=engine.kind, policy=registration.policy, max_inflight=registration.max_inflight
            )
            return client.add_backend(request).backend_id
    except ClientError as exc:
        if exc.may_retry or exc.stable_code == "no_daemon":
            return None
        raise


def _known(client: Client, engine: Running, registration: Registration) -> str | None:
    for item in client.backends().items:
        if (item.url, item.policy) == (engine.url, registration.policy):
            return item.backend_id
    return None


def _remove(engine: Running, registration: Registration) -> None:
    try:
        with registration.connect() as client:
            known = _known(client, engine, registration)
            if known is not None:
                client.remove_backend(known)
                note(f"removed {known} from the daemon")
    except ClientError as exc:
        note(f"the engine could not be removed from the daemon: {exc.message}")
