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
from prorld.client.find import Address

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


class Transport:
    """One kept connection to one daemon; not for several threads at once."""

    def __init__(self, address: Address, token: str | None) -> None:
        self.address = address
        self._token = token
        self._connection: http.client.HTTPConnection | None = None

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def request(self, method: str, path: str, body: bytes | None, *, within_s: float, accept: str = JSON) -> Reply:
        """One request and its whole reply. A kept connection that turns out dead before it answers is replaced once."""
        fresh = self._connection is None
        reply: Reply | None = None
        try:
            reply = self._once(method, path, body, time.monotonic() + within_s, accept)
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError) as exc:
            if fresh:
                raise self._lost(exc) from exc
        except (OSError, http.client.HTTPException) as exc:
            raise self._lost(exc) from exc
        finally:
            # Whatever interrupted an exchange, the rest of its reply must not be taken for the next one's.
            if reply is None:
                self.close()
        # The daemon had closed an idle connection. It never answered on it, and every call of the contract may be
        # repeated: submits carry an id.
        return reply or self.request(method, path, body, within_s=within_s, accept=accept)

    def _once(self, method: str, path: str, body: bytes | None, until: float, accept: str) -> Reply:
        connection = self._connection
        if connection is None:
            connection = self._open()
            connection.connect()
            self._connection = connection
        self._limit(connection, until)
        connection.request(method, path, body=body, headers=self._headers(body, accept))
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
            if size > REPLY_BYTES_MAX:
                raise ClientError(f"the reply is larger than {REPLY_BYTES_MAX} bytes", code=BAD_REPLY)
            if time.monotonic() > until:
                raise TimeoutError("the reply took too long")
        if response.length:
            raise http.client.IncompleteRead(b"", response.length)
        # Without it the connection takes the reply for unfinished and refuses the next request.
        response.close()
        return b"".join(parts)

    def _open(self) -> http.client.HTTPConnection:
        where = self.address
        if where.socket_path is not None:
            return _UnixConnection(where.socket_path)
        kind = http.client.HTTPSConnection if where.tls else http.client.HTTPConnection
        return kind(where.host, where.port, timeout=CONNECT_S)

    def _headers(self, body: bytes | None, accept: str) -> dict[str, str]:
        headers = {"Accept": accept}
        if body is not None:
            headers["Content-Type"] = JSON
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        return headers

    @staticmethod
    def _limit(connection: http.client.HTTPConnection, until: float) -> None:
        if connection.sock is not None:
            connection.sock.settimeout(max(0.1, until - time.monotonic()))

    def _lost(self, exc: Exception) -> ClientError:
        if isinstance(exc, socket.gaierror):
            message = f"the host {self.address.host} is not known: {exc.strerror}"
            return ClientError(message, code=NO_DAEMON, retryable=True)
        if isinstance(exc, (ConnectionRefusedError, FileNotFoundError)):
            message = f"no daemon answers at {self.address}; start one with `prorld serve`"
            return ClientError(message, code=NO_DAEMON, retryable=True)
        if isinstance(exc, ssl.SSLCertVerificationError):
            # Nothing about it changes by itself.
            message = f"{self.address} is not trusted: {exc.verify_message}; name its authority by $SSL_CERT_FILE"
            return ClientError(message, code=CONNECTION_LOST)
        if isinstance(exc, TimeoutError):
            return ClientError(f"{self.address} did not answer in time", code=CONNECTION_LOST, retryable=True)
        what = str(exc) or type(exc).__name__
        return ClientError(f"the connection to {self.address} failed: {what}", code=CONNECTION_LOST, retryable=True)
