"""One bounded HTTP request with JSON in and out: h11 over a stream of trio's, a connection of its own each time."""

from __future__ import annotations

import ssl
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import h11
import trio

__all__ = ["Address", "HttpFailed", "Reply", "post_json"]

REPLY_BYTES: Final = 4 << 20
HEADER_BYTES: Final = 64 << 10
PIECE_BYTES: Final = 64 << 10
CLOSE_S: Final = 2.0


class HttpFailed(Exception):
    """No complete reply came; nothing of the request's own content is in the message."""


class Address(NamedTuple):
    """Where a request goes."""

    secure: bool
    host: str
    port: int
    path: str

    @classmethod
    def of(cls, url: str) -> Address:
        """From a URL; ``ValueError`` for what is none, and for one with a user, a query or a fragment."""
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"{url[:200]!r} is no http or https address")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("an address has neither a user, nor a query, nor a fragment")
        secure = parts.scheme == "https"
        return cls(secure, parts.hostname, parts.port or (443 if secure else 80), parts.path or "/")

    @property
    def authority(self) -> str:
        """As the header ``Host`` has it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.secure else 80) else f"{host}:{self.port}"


class Reply(NamedTuple):
    """What came back."""

    status: int
    body: bytes


async def post_json(
    address: Address, body: bytes, *, bearer: str | None = None, trust: ssl.SSLContext | None = None
) -> Reply:
    """The reply, whatever its status. Raises ``HttpFailed``; the caller bounds the time."""
    headers = [
        ("Host", address.authority),
        ("Content-Type", "application/json"),
        ("Accept", "application/json"),
        ("Content-Length", str(len(body))),
        ("Connection", "close"),
    ]
    if bearer is not None:
        headers.append(("Authorization", f"Bearer {bearer}"))
    try:
        stream = await _connected(address, trust)
        try:
            return await _exchange(stream, h11.Request(method="POST", target=address.path, headers=headers), body)
        finally:
            with trio.move_on_after(CLOSE_S, shield=True):
                await trio.aclose_forcefully(stream)
    except (OSError, trio.BrokenResourceError, ssl.SSLError, ssl.CertificateError) as exc:
        # The words of the library may quote what was received, and are cut.
        raise HttpFailed(f"no connection to {address.host}: {str(exc)[:200]}") from exc
    except h11.ProtocolError as exc:
        raise HttpFailed(f"{address.host} does not speak HTTP: {str(exc)[:200]}") from exc


async def _connected(address: Address, trust: ssl.SSLContext | None) -> trio.abc.Stream:
    if not address.secure:
        return await trio.open_tcp_stream(address.host, address.port)
    context = trust if trust is not None else ssl.create_default_context()
    stream = await trio.open_ssl_over_tcp_stream(address.host, address.port, ssl_context=context, https_compatible=True)
    try:
        await stream.do_handshake()
    except BaseException:
        with trio.CancelScope(shield=True):
            await trio.aclose_forcefully(stream)
        raise
    return stream


async def _exchange(stream: trio.abc.Stream, request: h11.Request, body: bytes) -> Reply:
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEADER_BYTES)
    sent = b"".join(connection.send(event) or b"" for event in (request, h11.Data(data=body), h11.EndOfMessage()))
    await stream.send_all(sent)
    status: int | None = None
    received = bytearray()
    while True:
        # A long reply may be there at once; a cancelled rollout stops here all the same.
        await trio.lowlevel.checkpoint()
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(bytes(await stream.receive_some(PIECE_BYTES)))
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            received += event.data
            if len(received) > REPLY_BYTES:
                raise HttpFailed(f"a reply is longer than {REPLY_BYTES} bytes")
        elif isinstance(event, h11.EndOfMessage) and status is not None:
            return Reply(status, bytes(received))
        elif not isinstance(event, h11.InformationalResponse):
            raise HttpFailed("a reply ended before its end")
