"""One HTTP/1.1 connection on the standard library: TCP, TLS or a Unix socket; replies bounded in size and time.

It never decides what may be tried again; ``prorld.client.caller`` does.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from typing import NamedTuple

from prorld.client.errors import BAD_REPLY, CONNECTION_LOST, NO_DAEMON, ClientError
from prorld.client.find import Address, Target
from prorld.client.flows import Ask

__all__ = ["CONNECT_S", "JSON", "MSGPACK", "Reply", "Transport", "headers_of", "lost", "must_fit"]

# A trajectory of a million tokens is about 25 MB of JSON.
REPLY_BYTES_MAX = 512 << 20
CONNECT_S = 5.0
_CHUNK_BYTES = 1 << 18
JSON = "application/json"
MSGPACK = "application/msgpack"


class Reply(NamedTuple):
    """A whole reply."""

    status: int
    headers: dict[str, str]
    body: bytes


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=CONNECT_S)
        self._path = path

    def connect(self) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(CONNECT_S)
            sock.connect(self._path)
        except BaseException:
            sock.close()
            raise
        self.sock = sock


def must_fit(size: int) -> None:
    """A reply has a bound."""
    if size > REPLY_BYTES_MAX:
        raise ClientError(f"the reply is larger than {REPLY_BYTES_MAX} bytes", code=BAD_REPLY)


def headers_of(target: Target, body: bytes | None, accept: str) -> dict[str, str]:
    """What goes with every request."""
    headers = {"Accept": accept}
    if body is not None:
        headers["Content-Type"] = JSON
    if target.token is not None:
        headers["Authorization"] = f"Bearer {target.token}"
    return headers


def lost(address: Address, exc: Exception) -> ClientError:
    """Why there is no reply, and whether there may be one later."""
    if isinstance(exc, socket.gaierror):
        message = f"the host {address.host} is not known: {exc.strerror}"
        return ClientError(message, code=NO_DAEMON, retryable=True)
    if isinstance(exc, (ConnectionRefusedError, FileNotFoundError)):
        message = f"no daemon answers at {address}; start one with `prorld serve`"
        return ClientError(message, code=NO_DAEMON, retryable=True)
    if isinstance(exc, ssl.SSLCertVerificationError):
        # Nothing about it changes by itself.
        message = f"{address} is not trusted: {exc.verify_message}; name its authority by $SSL_CERT_FILE"
        return ClientError(message, code=CONNECTION_LOST)
    if isinstance(exc, TimeoutError):
        return ClientError(f"{address} did not answer in time", code=CONNECTION_LOST, retryable=True)
    what = str(exc) or type(exc).__name__
    return ClientError(f"the connection to {address} failed: {what}", code=CONNECTION_LOST, retryable=True)


class Transport:
    """One kept connection to one daemon at a time; not for several threads at once."""

    def __init__(self) -> None:
        self._target: Target | None = None
        self._connection: http.client.HTTPConnection | None = None

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def request(self, ask: Ask) -> Reply:
        """One request and its whole reply. A kept connection that turns out dead before it answers is replaced once."""
        if ask.target != self._target:
            self.close()
            self._target = ask.target
        fresh = self._connection is None
        reply: Reply | None = None
        try:
            reply = self._once(ask, time.monotonic() + ask.within_s)
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError) as exc:
            if fresh or not ask.is_repeatable:
                raise lost(ask.target.address, exc) from exc
        except (OSError, http.client.HTTPException) as exc:
            raise lost(ask.target.address, exc) from exc
        finally:
            # Whatever interrupted an exchange, the rest of its reply must not be taken for the next one's.
            if reply is None:
                self.close()
        # The daemon had closed an idle connection. It never answered on it, and the call may be repeated: submits carry
        # an id.
        return reply or self.request(ask)

    def _once(self, ask: Ask, until: float) -> Reply:
        connection = self._connection
        if connection is None:
            connection = _open(ask.target.address)
            connection.connect()
            self._connection = connection
        if connection.sock is not None:
            connection.sock.settimeout(max(0.1, until - time.monotonic()))
        headers = headers_of(ask.target, ask.body, ask.accept)
        connection.request(ask.method, ask.path, body=ask.body, headers=headers)
        response = connection.getresponse()
        reply = Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, self._body(response, until))
        if response.will_close:
            self.close()
        return reply

    def _body(self, response: http.client.HTTPResponse, until: float) -> bytes:
        parts: list[bytes] = []
        size = 0
        while chunk := response.read1(_CHUNK_BYTES):
            parts.append(chunk)
            size += len(chunk)
            must_fit(size)
            if time.monotonic() > until:
                raise TimeoutError("the reply took too long")
        if response.length:
            raise http.client.IncompleteRead(b"", response.length)
        # Without it the connection takes the reply for unfinished and refuses the next request.
        response.close()
        return b"".join(parts)


def _open(where: Address) -> http.client.HTTPConnection:
    if where.socket_path is not None:
        return _UnixConnection(where.socket_path)
    kind = http.client.HTTPSConnection if where.tls else http.client.HTTPConnection
    return kind(where.host, where.port, timeout=CONNECT_S)
