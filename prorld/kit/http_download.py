"""GET over HTTP/1.1 for files: followed through redirects, handed on piece by piece, bounded, never kept in memory.

It owns one connection for each hop and closes it. A hop never goes from TLS to none, and what authorizes the caller to
one server is never sent to another. A server that is silent for too long is given up; the deadline of the whole is the
caller's.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable
from urllib.parse import SplitResult, urljoin, urlsplit

import h11
import msgspec
import trio

from prorld.kit.http_client import ConnectFailed, ResponseTooLarge, TransportFailed

__all__ = ["Got", "Origin", "download", "origin_of"]

REDIRECTS_MAX = 5
CONNECT_SECONDS_MAX = 15.0
SILENCE_SECONDS_MAX = 30.0

_RECEIVE_BYTES = 64 * 1024
_INFORMATIONAL_MAX = 8
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PORTS = {"http": 80, "https": 443}

Origin = tuple[str, str, int]


class Got(msgspec.Struct, frozen=True, kw_only=True):
    """How it ended. Only the body of a 200 was handed on; ``url`` is the one that answered."""

    url: str
    status: int
    headers: dict[str, str]
    bytes: int


def origin_of(url: str) -> Origin:
    """Scheme, host and port; ``ValueError`` for what is no address of a web server."""
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ValueError("not an http:// or https:// address")
    return parts.scheme, parts.hostname, parts.port or _PORTS[parts.scheme]


async def download(
    url: str,
    write: Callable[[bytes], object],
    *,
    bytes_max: int,
    headers: Callable[[Origin], Iterable[tuple[str, str]]],
    plain_allowed: Callable[[Origin], bool],
    trust: ssl.SSLContext,
) -> Got:
    """Fetch; every piece of the body goes through ``write``. Raises ``HttpError``.

    ``headers`` are those for one server; ``plain_allowed`` says which may be asked without TLS. A URL must not hold a
    password.
    """
    for _ in range(REDIRECTS_MAX + 1):
        try:
            origin = origin_of(url)
        except ValueError as exc:
            raise TransportFailed(f"a redirect leads to no web server: {exc}") from None
        if origin[0] == "http" and not plain_allowed(origin):
            raise ConnectFailed(f"{origin[1]} would be asked without TLS")
        got, location = await _hop(url, origin, [*headers(origin)], write, bytes_max, trust)
        if location is None:
            return got
        following = urljoin(url, location)
        if origin[0] == "https" and urlsplit(following).scheme != "https":
            raise TransportFailed(f"{origin[1]} redirects to an address without TLS")
        url = following
    raise TransportFailed(f"more than {REDIRECTS_MAX} redirects")


async def _hop(
    url: str,
    origin: Origin,
    headers: list[tuple[str, str]],
    write: Callable[[bytes], object],
    bytes_max: int,
    trust: ssl.SSLContext,
) -> tuple[Got, str | None]:
    stream = await _connect(origin, trust)
    try:
        exchange = _Exchange(stream)
        await exchange.send(urlsplit(url), headers)
        head = await exchange.head()
        found = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in head.headers}
        if head.status_code in _REDIRECTS and "location" in found:
            return Got(url=url, status=head.status_code, headers=found, bytes=0), found["location"]
        size = await exchange.body(write, bytes_max) if head.status_code == 200 else 0
        return Got(url=url, status=head.status_code, headers=found, bytes=size), None
    except h11.RemoteProtocolError as exc:
        raise TransportFailed(f"the answer of {origin[1]} is not HTTP/1.1, or ends in the middle") from exc
    except h11.LocalProtocolError as exc:
        raise TransportFailed(f"{origin[1]} can't be asked for that: {exc}") from exc
    except (trio.BrokenResourceError, trio.ClosedResourceError, OSError) as exc:
        raise TransportFailed(f"the connection to {origin[1]} broke") from exc
    finally:
        # Without a farewell: the socket below is closed at once, also in a cancelled task.
        await trio.aclose_forcefully(stream)


async def _connect(origin: Origin, trust: ssl.SSLContext) -> trio.abc.Stream:
    scheme, host, port = origin
    with trio.move_on_after(CONNECT_SECONDS_MAX):
        try:
            plain = await trio.open_tcp_stream(host, port)
        except OSError as exc:
            raise ConnectFailed(f"can't connect to {host}") from exc
        if scheme == "http":
            return plain
        secret = trio.SSLStream(plain, trust, server_hostname=host, https_compatible=True)
        try:
            await secret.do_handshake()
        except trio.BrokenResourceError as exc:
            plain.socket.close()
            raise ConnectFailed(f"no TLS with {host}: {exc.__cause__ or exc}") from exc
        except BaseException:
            plain.socket.close()
            raise
        return secret
    raise ConnectFailed(f"no connection to {host} within {CONNECT_SECONDS_MAX:g} s")


class _Exchange:
    """One request and its response on one connection."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._protocol = h11.Connection(h11.CLIENT)

    async def send(self, url: SplitResult, headers: list[tuple[str, str]]) -> None:
        """Ask."""
        target = (url.path or "/") + (f"?{url.query}" if url.query else "")
        ours = [("host", url.netloc.rpartition("@")[2]), ("connection", "close"), ("accept-encoding", "identity")]
        request = h11.Request(method="GET", target=target, headers=[*ours, *headers])
        data = self._protocol.send(request) + self._protocol.send(h11.EndOfMessage())
        with trio.move_on_after(SILENCE_SECONDS_MAX) as scope:
            await self._stream.send_all(data)
        if scope.cancelled_caught:
            raise TransportFailed("the server does not take the request")

    async def head(self) -> h11.Response:
        """What stands before the body."""
        for _ in range(_INFORMATIONAL_MAX):
            event = await self._next()
            if isinstance(event, h11.Response):
                return event
            if not isinstance(event, h11.InformationalResponse):
                break
        raise h11.RemoteProtocolError("no response")

    async def body(self, write: Callable[[bytes], object], bytes_max: int) -> int:
        """Hand on the body; how long it was."""
        total = 0
        while not isinstance(event := await self._next(), h11.EndOfMessage):
            if not isinstance(event, h11.Data):
                raise h11.RemoteProtocolError("the response ends in the middle")
            total += len(event.data)
            if total > bytes_max:
                raise ResponseTooLarge(f"the body is over {bytes_max} bytes")
            write(bytes(event.data))
        return total

    async def _next(self) -> object:
        while (event := self._protocol.next_event()) is h11.NEED_DATA:
            with trio.move_on_after(SILENCE_SECONDS_MAX) as scope:
                self._protocol.receive_data(bytes(await self._stream.receive_some(_RECEIVE_BYTES)))
            if scope.cancelled_caught:
                raise TransportFailed(f"the server said nothing for {SILENCE_SECONDS_MAX:g} s")
        return event
