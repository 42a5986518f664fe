"""The server actor: listens, gives every connection a task, and ends in two steps.

First it takes no more connections and every held request is answered with 503 and ``Retry-After``; then what is being
answered has a short while to be finished. It never starts or ends anything but connections.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.trio.worker_context import WorkerContext
from structlog.typing import FilteringBoundLogger

from prorld.http.app import App
from prorld.http.binding import DEFAULT_BIND, listening
from prorld.http.guarded import Connection, ConnectionCount, ConnectionLimits, server_config

__all__ = ["GRACE_S", "HttpServer", "run_http"]

log: FilteringBoundLogger = structlog.get_logger("prorld.http")

GRACE_S: Final = 2.0


@dataclass(frozen=True, kw_only=True)
class HttpServer:
    """A server that runs: where it listens, and how to end it without cancelling whoever started it."""

    address: str
    count: ConnectionCount
    close: Callable[[], None]


async def run_http(
    app: App,
    *,
    bind: str = DEFAULT_BIND,
    limits: ConnectionLimits | None = None,
    grace_s: float = GRACE_S,
    connection: type[Connection] = Connection,
    task_status: trio.TaskStatus[HttpServer] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve ``app`` until cancelled or closed; ``started`` carries the address it really got.

    ``ConfigError`` when ``bind`` can't be used, or is open to other machines while authentication is off.
    """
    limits = limits or ConnectionLimits()
    count = ConnectionCount(limits.connections_max)
    closing = trio.Event()
    async with listening(bind, private_only=app.deps.auth.is_open) as place:
        config = server_config()
        context = WorkerContext(None)
        wrapped = ASGIWrapper(app)

        async def handle(stream: trio.SocketStream) -> None:
            await connection(wrapped, config, context, stream, limits=limits, count=count).run()

        accepting = trio.CancelScope()
        grace = trio.CancelScope(shield=True)
        async with trio.open_nursery() as nursery:
            # The connections below are shielded, so somebody outside has to notice that the end is near.
            nursery.start_soon(_watch, closing, accepting, name="http watch")
            with grace:
                async with trio.open_nursery() as connections:
                    task_status.started(HttpServer(address=place.address, count=count, close=closing.set))
                    log.info("http.listening", address=place.address)
                    with accepting:
                        await trio.serve_listeners(handle, [place.listener], handler_nursery=connections)
                    grace.deadline = trio.current_time() + grace_s
                    app.holds.close()
                    await context.terminated.set()
                    count.end_idle()
        log.info("http.closed", address=place.address, cut=grace.cancelled_caught)


async def _watch(closing: trio.Event, accepting: trio.CancelScope) -> None:
    try:
        await closing.wait()
    finally:
        accepting.cancel("the server closes")
