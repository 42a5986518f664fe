"""HTTP/1.1 on anyio's streams: a bounded set of kept connections, each used by one call at a time."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import h11
from anyio.abc import ByteStream

from prorld.client.errors import TOO_MANY_CALLS, ClientError
from prorld.client.find import Address, Target
from prorld.client.flows import Ask
from prorld.client.http import CONNECT_S, Reply, headers_of, lost, must_fit

__all__ = ["CONNECTIONS_MAX", "Connections"]

CONNECTIONS_MAX = 64
# Long-polls leave these to calls that are answered at once: an acknowledgement never waits for a group.
QUICK_SHARE = 0.25
# A call that may take longer than this is a long-poll.
QUICK_S = 60.0
# How long a call waits until others let go of a connection.
ROOM_S = 300.0
CLOSE_S = 1.0
_CHUNK_BYTES = 1 << 18


class _Dead(Exception):
    """A kept connection that ended before it answered."""


class _Connection:
    """One exchange after the other."""

    def __init__(self, stream: ByteStream, target: Target) -> None:
        self.target = target
        self.is_reusable = False
        self._has_begun = False
        self._stream = stream
        self._http = h11.Connection(h11.CLIENT)

    async def aclose(self) -> None:
        """Close it, also while the caller is being cancelled."""
        try:
            with anyio.move_on_after(CLOSE_S, shield=True):
                await self._stream.aclose()
        except (OSError, anyio.BrokenResourceError):
            # It was broken already; its descriptor is closed all the same.
            return

    async def exchange(self, ask: Ask) -> Reply:
        """One request and its whole reply. Raises ``_Dead`` where the other side had gone before."""
        self.is_reusable = self._has_begun = False
        try:
            await self._stream.send(self._request(ask))
            head = await self._next_event()
            while isinstance(head, h11.InformationalResponse):
                head = await self._next_event()
        except (anyio.BrokenResourceError, anyio.EndOfStream, BrokenPipeError, ConnectionResetError) as exc:
            raise _Dead(str(exc) or "it was closed") from exc
        if not isinstance(head, h11.Response):
            raise h11.RemoteProtocolError(f"{head!r} where a response was expected")
        parts: list[bytes] = []
        size = 0
        while not isinstance(event := await self._next_event(), h11.EndOfMessage):
            if not isinstance(event, h11.Data):
                raise h11.RemoteProtocolError(f"{event!r} within a response")
            parts.append(bytes(event.data))
            size += len(event.data)
            must_fit(size)
        headers = {name.decode("ascii").lower(): value.decode("latin-1") for name, value in head.headers}
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
            self.is_reusable = True
        return Reply(head.status_code, headers, b"".join(parts))

    def _request(self, ask: Ask) -> bytes:
        headers = {"Host": _host(ask.target.address), **headers_of(ask.target, ask.body, ask.accept)}
        if ask.body is not None or ask.method not in ("GET", "DELETE"):
            headers["Content-Length"] = str(len(ask.body or b""))
        request = h11.Request(method=ask.method, target=ask.path, headers=list(headers.items()))
        data = [self._http.send(request), self._http.send(h11.Data(ask.body)) if ask.body else b""]
        return b"".join(part or b"" for part in [*data, self._http.send(h11.EndOfMessage())])

    async def _next_event(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            try:
                data = await self._stream.receive(_CHUNK_BYTES)
            except anyio.EndOfStream:
                if not self._has_begun:
                    raise
                data = b""
            self._has_begun = True
            self._http.receive_data(data)
        return event


class Connections:
    """The connections of one client. Belongs to one event loop."""

    def __init__(self, connections_max: int) -> None:
        self._places = anyio.Semaphore(connections_max)
        self._long = anyio.Semaphore(max(1, connections_max - int(connections_max * QUICK_SHARE)))
        self._idle: list[_Connection] = []
        self._is_closed = False

    async def aclose(self) -> None:
        """Close those that nobody uses, and the others after their use."""
        self._is_closed = True
        while self._idle:
            await self._idle.pop().aclose()

    async def request(self, ask: Ask) -> Reply:
        """One request and its whole reply. A kept connection that turns out dead before it answers is replaced once."""
        async with self._place(ask):
            try:
                with anyio.fail_after(ask.within_s):
                    return await self._exchange(ask)
            except (_Dead, OSError, h11.ProtocolError, anyio.BrokenResourceError, anyio.EndOfStream) as exc:
                raise lost(ask.target.address, exc) from exc

    @asynccontextmanager
    async def _place(self, ask: Ask) -> AsyncIterator[None]:
        """Room for one more call; short ones don't wait for long ones."""
        rooms = [self._long, self._places] if ask.within_s > QUICK_S else [self._places]
        taken: list[anyio.Semaphore] = []
        try:
            try:
                with anyio.fail_after(ROOM_S):
                    for room in rooms:
                        await room.acquire()
                        taken.append(room)
            except TimeoutError as exc:
                message = f"all connections to {ask.target.address} were in use for {ROOM_S:g} s"
                raise ClientError(message, code=TOO_MANY_CALLS) from exc
            yield
        finally:
            for room in taken:
                room.release()

    async def _exchange(self, ask: Ask) -> Reply:
        kept = await self._kept(ask.target)
        if kept is not None:
            try:
                return await self._through(kept, ask)
            except _Dead:
                # It never answered on it, and most calls of the contract may be repeated: submits carry an id.
                if not ask.is_repeatable:
                    raise
        return await self._through(_Connection(await _connected(ask.target.address), ask.target), ask)

    async def _kept(self, target: Target) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.target == target:
                return connection
            # Of a daemon that was somewhere else.
            await connection.aclose()
        return None

    async def _through(self, connection: _Connection, ask: Ask) -> Reply:
        is_whole = False
        try:
            reply = await connection.exchange(ask)
            is_whole = connection.is_reusable and not self._is_closed
        finally:
            # Whatever interrupted an exchange, the rest of its reply must not be taken for the next one's.
            if is_whole:
                self._idle.append(connection)
            else:
                await connection.aclose()
        return reply


async def _connected(where: Address) -> ByteStream:
    with anyio.fail_after(CONNECT_S):
        try:
            if where.socket_path is not None:
                return await anyio.connect_unix(where.socket_path)
            if not where.tls:
                return await anyio.connect_tcp(where.host, where.port)
            context = ssl.create_default_context()
            return await anyio.connect_tcp(where.host, where.port, ssl_context=context, tls_standard_compatible=False)
        except OSError as exc:
            # What the addresses of a name said is within it.
            inner = exc.__cause__
            while isinstance(inner, BaseExceptionGroup):
                inner = inner.exceptions[0]
            if isinstance(inner, OSError):
                raise inner from None
            raise


def _host(address: Address) -> str:
    host = f"[{address.host}]" if ":" in address.host else address.host
    return host if address.socket_path is not None else f"{host}:{address.port}"
