"""One HTTP/1.1 connection of the server: hypercorn's, behind a guard.

hypercorn 0.18 with quart-trio 0.12 has five faults that matter to a daemon, and what is here removes them:

1. An exception in one connection leaves the server's nursery and ends the process. ``Connection.run`` is a barrier.
2. Sending is shielded without a deadline, so a peer that stops reading blocks the shutdown. Here sending can be
   cancelled, and a peer that takes nothing for ``send_stall_s`` is dropped.
3. An answer given before the body has arrived leaves a dead socket,
4. the idle timer never starts again after a request, and
5. every shutdown waits for idle connections. All three come from quart-trio, which cancels the task of a request while
   that task is inside hypercorn's own end of the request. Here that end is shielded, with a deadline.

Upgrades (WebSocket, HTTP/2) are not offered: a request that asks for one is answered as the plain request it also is.
What a request says is never looked at here; that is the application's.
"""

from __future__ import annotations

import math
import socket
from typing import Any, Final, cast

import h11
import msgspec
import structlog
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.logging import Logger
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.events import StreamClosed
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ConnectionState, H11SendableEvent
from hypercorn.utils import parse_socket_addr
from structlog.typing import FilteringBoundLogger

from prorld.kit.cleanup import shielded
from prorld.wire.codec import encode
from prorld.wire.ops import ErrorBody, ErrorDetail

__all__ = ["Connection", "ConnectionCount", "ConnectionLimits", "server_config"]

log: FilteringBoundLogger = structlog.get_logger("prorld.http")

# The end of a request is a few changes of state; when it takes longer it is stuck.
_REQUEST_END_S: Final = 2.0
_REFUSAL_S: Final = 1.0
_HEADER_BYTES_MAX: Final = 32 << 10
# A longer piece of a body goes out by itself: copying it would cost more than another call of the kernel.
_JOINED_BYTES_MAX: Final = 64 << 10


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How many connections; how long one may idle, take nothing, or go on sending after its answer."""

    connections_max: int = 10_000
    keep_alive_s: float = 75.0
    send_stall_s: float = 30.0
    linger_s: float = 2.0


class ConnectionCount:
    """How many connections are open, how many may be, and which of them wait for a request."""

    def __init__(self, most: int) -> None:
        assert most >= 1, most
        self._most = most
        self.live = 0
        self.idle: set[Connection] = set()

    def enter(self) -> bool:
        """Count one more; whether there is room for it."""
        if self.live >= self._most:
            return False
        self.live += 1
        return True

    def leave(self, connection: Connection) -> None:
        """One less."""
        assert self.live > 0
        self.live -= 1
        self.idle.discard(connection)

    def end_idle(self) -> None:
        """End the connections that wait for a request; one that is in a request ends after it."""
        for connection in tuple(self.idle):
            connection.end_idle()


class Connection(TCPServer):
    """One accepted connection, from its first byte until its socket is closed."""

    def __init__(
        self,
        app: AppWrapper,
        config: Config,
        context: WorkerContext,
        stream: trio.SocketStream,
        *,
        limits: ConnectionLimits,
        count: ConnectionCount,
    ) -> None:
        super().__init__(app, config, context, {}, cast("Any", stream))
        self._socket = stream.socket
        self._limits = limits
        self._count = count
        self._lingering = False
        self._life = trio.CancelScope()
        # The deadline of an idle connection is that of the read it waits in, so it costs no task.
        self._reading = trio.CancelScope()
        self._idle_until = math.inf

    async def run(self) -> None:
        """Serve the connection. Nothing but a cancellation leaves this, and then the socket is closed."""
        if not self._count.enter():
            await self._refuse()
            return
        try:
            await self._serve()
        except* OSError as group:
            log.debug("connection.lost", error=repr(group.exceptions[0]))
        except* Exception:
            log.exception("connection.crashed")
        finally:
            self._count.leave(self)
            self._socket.close()

    async def _serve(self) -> None:
        client = parse_socket_addr(self._socket.family, self._socket.getpeername())
        server = parse_socket_addr(self._socket.family, self._socket.getsockname())
        with self._life:
            async with TaskGroup() as group:
                self._task_group = group
                self._http = _PlainHttp(
                    self.app,
                    self.config,
                    self.context,
                    group,
                    ConnectionState({}),
                    False,
                    client,
                    server,
                    self.protocol_send,
                )
                self._becomes_idle()
                await self._read_data()
                self._drop()

    async def protocol_send(self, event: Event) -> None:
        """What the protocol wants done with the socket."""
        match event:
            case RawData(data=data):
                await self._send(data)
            case Closed():
                await self._end()
            case Updated(idle=True):
                self._becomes_idle()
            case _:
                self._becomes_busy()

    def _becomes_idle(self) -> None:
        self._count.idle.add(self)
        patience = 0.0 if self.context.terminated.is_set() else self._limits.keep_alive_s
        self._idle_until = self._reading.deadline = trio.current_time() + patience

    def _becomes_busy(self) -> None:
        self._count.idle.discard(self)
        self._idle_until = self._reading.deadline = math.inf

    def end_idle(self) -> None:
        """End the wait for a request; for the server, when it closes."""
        self._reading.cancel("the server closes")

    async def _read_data(self) -> None:
        while data := await self._receive():
            if not self._lingering:
                await self._http.handle(RawData(data))

    async def _receive(self) -> bytes:
        try:
            # What has been read when the time is up is a request; so only the wait itself can be cut off.
            with trio.CancelScope(deadline=self._idle_until) as self._reading:
                return await self._socket.recv(MAX_RECV)
        except (OSError, trio.ClosedResourceError):
            pass
        return b""

    async def _send(self, data: bytes) -> None:
        async with self.send_lock:
            whole = await self._send_all(data)
        if not whole:
            self._drop()

    async def _send_all(self, data: bytes) -> bool:
        rest = memoryview(data)
        try:
            while rest:
                # Per progress: a long answer to a slow but living peer may take as long as it takes.
                with trio.move_on_after(self._limits.send_stall_s) as scope:
                    rest = rest[await self._socket.send(rest) :]
                if scope.cancelled_caught:
                    log.debug("connection.stalled", unsent_bytes=len(rest))
                    return False
        except (OSError, trio.ClosedResourceError):
            return False
        return True

    async def _end(self) -> None:
        if self._lingering:
            return
        if not self._http.peer_is_sending:
            self._drop()
            return
        # Closing with unread bytes makes the kernel reset the connection, and the peer would lose its answer.
        self._lingering = True
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            self._drop()
        else:
            self._task_group.spawn(self._stop_lingering)
            await self._http.handle(Closed())

    def _drop(self) -> None:
        """The end of the connection and of everything that is done for it: there is nobody left to answer."""
        if self._http.stream is not None:
            self._http.stream.closed = True
        self._socket.close()
        self._life.cancel("the connection has ended")

    async def _stop_lingering(self) -> None:
        with trio.move_on_after(self._limits.linger_s):
            await self.context.terminated.wait()
        self._drop()

    async def _refuse(self) -> None:
        try:
            with trio.move_on_after(_REFUSAL_S):
                # An unread request would turn the answer into a reset.
                await self._socket.recv(MAX_RECV)
                await self._socket.send(_REFUSAL)
        except OSError as exc:
            log.debug("connection.lost", error=repr(exc))
        finally:
            self._socket.close()
        log.debug("connection.refused", live=self._count.live)


class _PlainHttp(H11Protocol):
    """hypercorn's HTTP/1.1 without upgrades, with errors in JSON, and with an end of requests that always ends."""

    @property
    def peer_is_sending(self) -> bool:
        """Whether bytes that nobody will read may still arrive."""
        return self.connection.their_state in (h11.SEND_BODY, h11.ERROR)

    _unsent = b""

    async def stream_send(self, event: StreamEvent) -> None:
        if not isinstance(event, StreamClosed):
            await super().stream_send(event)
            return
        with shielded(_REQUEST_END_S, "ending a request") as scope:
            await super().stream_send(event)
        if scope.cancelled_caught:
            await self.send(Closed())

    async def _send_h11_event(self, event: H11SendableEvent) -> None:
        """Encode and send; a head that names the length of its body waits for it, so most answers are one packet."""
        try:
            data = self.connection.send(event) or b""
        except h11.LocalProtocolError:
            if self.connection.their_state is not h11.ERROR:
                raise
            return
        if self._unsent and len(data) > _JOINED_BYTES_MAX:
            await self._send_unsent()
        self._unsent += data
        if not (isinstance(event, h11.Response) and any(name == b"content-length" for name, _ in event.headers)):
            await self._send_unsent()

    async def _send_unsent(self) -> None:
        data, self._unsent = self._unsent, b""
        if data:
            await self.send(RawData(data))

    async def _check_protocol(self, event: h11.Request) -> None:
        """Offer no other protocol."""

    async def _create_stream(self, request: h11.Request) -> None:
        headers = [(name, value) for name, value in request.headers if name != b"upgrade"]
        plain = h11.Request(
            method=request.method, target=request.target, headers=headers, http_version=request.http_version
        )
        await super()._create_stream(plain)

    async def _send_error_response(self, status_code: int) -> None:
        body = _error(f"http_{status_code}", "the request is not well-formed HTTP/1.1", retryable=False)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            *self.config.response_headers("h11"),
        ]
        await self._send_h11_event(h11.Response(status_code=status_code, headers=headers))
        await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())


class _ServerLog(Logger):
    """What hypercorn says, as events of ours. Its access line is left out: the application writes one."""

    def __init__(self, config: Config) -> None:
        self.access_logger = None
        self.error_logger = None

    async def exception(self, message: str, *args: Any, **kwargs: Any) -> None:
        log.error("request.crashed", where=message, exc_info=True)  # noqa: LOG014 - hypercorn calls it in its handlers

    async def warning(self, message: str, *args: Any, **kwargs: Any) -> None:
        log.warning("server.warned", what=message)


def server_config() -> Config:
    """The settings of hypercorn; what is not here, the guard does itself."""
    config = Config()
    config.logger_class = _ServerLog
    config.include_server_header = False
    config.h11_max_incomplete_size = _HEADER_BYTES_MAX
    # The default closes a trainer's connection every thousand requests for no gain.
    config.keep_alive_max_requests = 1_000_000_000
    return config


def _error(code: str, message: str, *, retryable: bool) -> bytes:
    return encode(ErrorBody(error=ErrorDetail(code=code, message=message, retryable=retryable)))


_REFUSAL_BODY: Final = _error("too_many_connections", "the daemon has no room for another connection", retryable=True)
_REFUSAL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\nretry-after: 1\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_REFUSAL_BODY), _REFUSAL_BODY)
)
