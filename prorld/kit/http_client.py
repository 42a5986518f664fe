"""A pooled HTTP/1.1 client for engines, on trio; plain responses it reads itself, all others by h11.

It owns its sockets: one exchange at a time on each, the newest reused first, every one closed when its exchange failed
or was cancelled. Closing is how an engine learns that nobody waits any more, so no socket of an unfinished exchange is
ever kept. It follows no redirects, speaks no HTTP/2, sets no deadline beyond connecting (the caller's scope does), and
knows nothing of rollouts.
"""

from __future__ import annotations

import socket
import ssl
from collections import deque
from collections.abc import Iterable
from typing import TypeVar
from urllib.parse import urlsplit

import h11
import msgspec
import trio

from prorld.kit.http_wire import Head, plain_head, request_head

__all__ = [
    "BodyMalformed",
    "ClientStatistics",
    "ConnectFailed",
    "HttpClient",
    "HttpError",
    "Response",
    "ResponseTooLarge",
    "TransportFailed",
    "decode_json",
]

T = TypeVar("T")
Headers = Iterable[tuple[str, str]]

CONNECTIONS_MAX = 512
RESPONSE_BYTES_MAX = 64 * 1024 * 1024
CONNECT_SECONDS_MAX = 5.0

# The servers that most engines run on close an idle socket after 5 s, and agents run tools for longer than that.
IDLE_SECONDS_MAX = 4.0

# A reply of 500 tokens in one piece; a buffer over 128 KiB comes from the kernel and goes back to it, each time.
_RECEIVE_BYTES = 64 * 1024
# A long one, once its length is known.
_RECEIVE_BYTES_MAX = 1024 * 1024
_INFORMATIONAL_MAX = 8
_OWN_HEADERS = frozenset({"host", "content-length", "transfer-encoding", "connection", "upgrade", "expect"})


class HttpError(Exception):
    """Base of what a request can fail with."""


class ConnectFailed(HttpError):
    """No connection came about: refused, unreachable, not trusted, or not within the connect deadline."""


class TransportFailed(HttpError):
    """The connection broke, or what came over it is not HTTP."""


class ResponseTooLarge(HttpError):
    """The body is over ``response_bytes_max``; the rest of it was not read."""


class BodyMalformed(HttpError):
    """The body is not the JSON that was expected."""


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """A complete response."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    def header(self, name: str) -> str | None:
        """The first header of that name."""
        wanted = name.lower().encode("ascii")
        return next((value.decode("latin-1") for key, value in self.headers if key == wanted), None)

    def excerpt(self, limit: int = 500) -> str:
        """The start of the body for an error message."""
        return self.body[:limit].decode("utf-8", "replace")


class ClientStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """``opened``, ``reused`` and ``retried`` count since the start; ``live`` and ``idle`` are sockets open now."""

    opened: int
    reused: int
    retried: int
    live: int
    idle: int
    waiting: int


def decode_json(response: Response, decoder: msgspec.json.Decoder[T]) -> T:
    """The body as the decoder's type; ``BodyMalformed`` says what is wrong with it."""
    try:
        return decoder.decode(response.body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise BodyMalformed(f"unexpected body: {exc}") from exc


class _Broken(Exception):
    """An exchange failed; ``received`` says whether any byte of a response had come."""

    def __init__(self, why: str, *, received: bool) -> None:
        super().__init__(why)
        self.received = received


class _Connection:
    """One socket, and since when it has nothing to do."""

    __slots__ = ("idle_since", "socket", "stream")

    def __init__(self, plain: trio.SocketStream, secret: trio.SSLStream[trio.SocketStream] | None = None) -> None:
        self.socket = plain.socket
        self.stream = plain if secret is None else secret
        self.idle_since = 0.0


class _Address(msgspec.Struct, frozen=True):
    """Where requests go, and what is said about it in the Host header."""

    host: str
    port: int
    socket_path: str | None
    authority: str
    prefix: str
    tls: bool = False

    @classmethod
    def parse(cls, base_url: str) -> _Address:
        """``http://host[:port][/prefix]``, the same with ``https``, or ``unix:/path/to/socket``."""
        parts = urlsplit(base_url)
        if parts.scheme == "unix" and parts.path.startswith("/") and not parts.netloc:
            return cls("", 0, parts.path, "localhost", "")
        tls = parts.scheme == "https"
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"not an http://, https:// or unix: address: {base_url!r}")
        if parts.username:
            raise ValueError(f"an address can't hold a password: {parts.hostname!r}")
        port = parts.port or (443 if tls else 80)
        return cls(parts.hostname, port, None, parts.netloc, parts.path.rstrip("/"), tls)

    async def connect(self, trust: ssl.SSLContext | None) -> _Connection:
        if self.socket_path is not None:
            return _Connection(await trio.open_unix_socket(self.socket_path))
        plain = await _open_tcp(self.host, self.port)
        if trust is None:
            return _Connection(plain)
        try:
            secret = trio.SSLStream(plain, trust, server_hostname=self.host, https_compatible=True)
            await secret.do_handshake()
        except BaseException:
            # The socket itself: no await, so it is also closed in a cancelled task.
            plain.socket.close()
            raise
        return _Connection(plain, secret)


async def _open_tcp(host: str, port: int) -> trio.SocketStream:
    """A name may stand for several places, which race; a number is one, and there is nothing to look up."""
    if not _is_number(host):
        return await trio.open_tcp_stream(host, port)
    plain = trio.socket.socket()
    try:
        await plain.connect((host, port))
        return trio.SocketStream(plain)
    except BaseException:
        plain.close()
        raise


def _is_number(host: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET, host)
    except OSError:
        return False
    return True


class HttpClient:
    """Requests to one server. ``connections_max`` requests run at once; the others wait their turn."""

    def __init__(
        self,
        base_url: str,
        *,
        connections_max: int = CONNECTIONS_MAX,
        response_bytes_max: int = RESPONSE_BYTES_MAX,
        connect_seconds_max: float = CONNECT_SECONDS_MAX,
        idle_seconds_max: float = IDLE_SECONDS_MAX,
    ) -> None:
        self.base_url = base_url
        self._address = _Address.parse(base_url)
        # Whom this machine trusts, or whom SSL_CERT_FILE names.
        self._trust = ssl.create_default_context() if self._address.tls else None
        self._limiter = trio.CapacityLimiter(connections_max)
        self._response_bytes_max = response_bytes_max
        self._connect_seconds_max = connect_seconds_max
        self._idle_seconds_max = idle_seconds_max
        self._idle: deque[_Connection] = deque()
        self._closed = False
        self._live = 0
        self._opened = 0
        self._reused = 0
        self._retried = 0

    def __repr__(self) -> str:
        return f"<HttpClient {self.base_url}: {self._live} live, {len(self._idle)} idle>"

    def statistics(self) -> ClientStatistics:
        """Counters and sockets as they are now."""
        return ClientStatistics(
            opened=self._opened,
            reused=self._reused,
            retried=self._retried,
            live=self._live,
            idle=len(self._idle),
            waiting=self._limiter.statistics().tasks_waiting,
        )

    def close(self) -> None:
        """Close the idle sockets now and each busy one when its exchange ends; further requests are refused."""
        self._closed = True
        while self._idle:
            self._close(self._idle.pop())

    async def request(self, method: str, path: str, body: bytes = b"", headers: Headers = ()) -> Response:
        """Send one request and read the whole response, whatever its status. Raises ``HttpError``.

        It is sent a second time only if a kept socket turned out to be closed before anything of a response had come:
        the server had hung up while the socket lay idle, and did not see the request.
        """
        data = self._request(method, path, body, headers)
        try:
            # Without a turn of the loop where there is a place: every exchange has turns enough.
            self._limiter.acquire_nowait()
        except trio.WouldBlock:
            await self._limiter.acquire()
        try:
            return await self._attempt(method, data)
        finally:
            self._limiter.release()

    async def _attempt(self, method: str, data: bytes) -> Response:
        kept = self._take_idle()
        if kept is not None:
            self._reused += 1
            try:
                return await self._exchange(kept, method, data)
            except _Broken as broken:
                if broken.received:
                    raise TransportFailed(str(broken)) from broken.__cause__
                self._retried += 1
        fresh = await self._connect()
        try:
            return await self._exchange(fresh, method, data)
        except _Broken as broken:
            raise TransportFailed(str(broken)) from broken.__cause__

    def _request(self, method: str, path: str, body: bytes, headers: Headers) -> bytes:
        if self._closed:
            raise ConnectFailed("the client is closed")
        lines = tuple(headers)
        for name, _ in lines:
            if name.lower() in _OWN_HEADERS:
                raise ValueError(f"the header {name!r} is not for callers to set")
        address = self._address
        return request_head(method, address.prefix + path, address.authority, len(body), lines) + body

    async def _connect(self) -> _Connection:
        connection: _Connection | None = None
        try:
            with trio.move_on_after(self._connect_seconds_max):
                connection = await self._address.connect(self._trust)
        except trio.BrokenResourceError as exc:
            raise ConnectFailed(f"no TLS with {self.base_url}: {exc.__cause__ or exc}") from exc
        except OSError as exc:
            raise ConnectFailed(f"can't connect to {self.base_url}") from exc
        if connection is None:
            raise ConnectFailed(f"no connection to {self.base_url} within {self._connect_seconds_max:g} s")
        self._opened += 1
        self._live += 1
        return connection

    def _take_idle(self) -> _Connection | None:
        oldest_allowed = trio.current_time() - self._idle_seconds_max
        while self._idle and self._idle[0].idle_since < oldest_allowed:
            self._close(self._idle.popleft())
        while self._idle:
            connection = self._idle.pop()
            # An idle socket has nothing to say; if it is readable, that is the server's farewell.
            if not connection.socket.is_readable():
                return connection
            self._close(connection)
        return None

    def _close(self, connection: _Connection) -> None:
        # Closing the socket itself, not the stream: no await, so it also happens in a cancelled task.
        connection.socket.close()
        self._live -= 1

    async def _exchange(self, connection: _Connection, method: str, data: bytes) -> Response:
        reusable = False
        reader = _Reader(connection, method, self._response_bytes_max)
        try:
            await connection.stream.send_all(data)
            response = await reader.response()
            reusable = reader.is_done and not self._closed
        except h11.RemoteProtocolError as exc:
            raise _Broken("the answer is not HTTP/1.1, or ends in the middle", received=reader.received) from exc
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError) as exc:
            raise _Broken("the connection broke", received=reader.received) from exc
        finally:
            if reusable:
                connection.idle_since = trio.current_time()
                self._idle.append(connection)
            else:
                self._close(connection)
        return response


class _Reader:
    """Reads one response within its bounds. ``is_done`` says that the connection is fit for another request."""

    __slots__ = ("_bytes_max", "_connection", "_method", "is_done", "received")

    def __init__(self, connection: _Connection, method: str, bytes_max: int) -> None:
        self._connection = connection
        self._method = method
        self._bytes_max = bytes_max
        self.received = False
        self.is_done = False

    async def response(self) -> Response:
        data = await self._receive(_RECEIVE_BYTES)
        # The answer to HEAD names the length of a body that does not come.
        head = None if self._method == "HEAD" else plain_head(data)
        return await (self._by_h11(data) if head is None else self._plain(head, data))

    async def _plain(self, head: Head, data: bytes) -> Response:
        self._check_size(head.length)
        parts, missing = [data[head.body_at : head.body_at + head.length]], head.body_at + head.length - len(data)
        # What follows the body belongs to nothing that was asked.
        self.is_done = missing >= 0
        while missing > 0:
            more = await self._receive(min(missing, _RECEIVE_BYTES_MAX))
            if not more:
                raise h11.RemoteProtocolError("the response ends in the middle")
            parts.append(more)
            missing -= len(more)
        return Response(status=head.status, headers=head.headers, body=b"".join(parts))

    async def _by_h11(self, data: bytes) -> Response:
        protocol = h11.Connection(h11.CLIENT)
        protocol.send(h11.Request(method=self._method, target="/", headers=[("host", "sent-already")]))
        protocol.send(h11.EndOfMessage())
        protocol.receive_data(data)
        head = await self._head(protocol)
        parts: list[bytes] = []
        total = 0
        while True:
            event = await self._next_event(protocol)
            if isinstance(event, h11.Data):
                total += len(event.data)
                self._check_size(total)
                parts.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                self.is_done = protocol.their_state is h11.DONE and not protocol.trailing_data[0]
                return Response(status=head.status_code, headers=tuple(head.headers), body=b"".join(parts))
            else:
                raise h11.RemoteProtocolError("the response ends in the middle")

    async def _head(self, protocol: h11.Connection) -> h11.Response:
        for _ in range(_INFORMATIONAL_MAX):
            event = await self._next_event(protocol)
            if isinstance(event, h11.Response):
                return event
            if not isinstance(event, h11.InformationalResponse):
                raise h11.RemoteProtocolError("no response")
        raise h11.RemoteProtocolError("too many informational responses")

    async def _next_event(self, protocol: h11.Connection) -> object:
        while (event := protocol.next_event()) is h11.NEED_DATA:
            protocol.receive_data(await self._receive(_RECEIVE_BYTES))
        return event

    async def _receive(self, bytes_max: int) -> bytes:
        data = await self._connection.stream.receive_some(bytes_max)
        self.received = self.received or bool(data)
        return bytes(data)

    def _check_size(self, size: int) -> None:
        if size > self._bytes_max:
            raise ResponseTooLarge(f"the body is over {self._bytes_max} bytes")
