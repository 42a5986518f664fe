"""Where the server listens: an address as it is written, the socket, and the address that it really got.

A Unix socket is private to its owner from the moment it exists; its file goes away with the server.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import trio

from prorld.errors import ConfigError

__all__ = ["DEFAULT_BIND", "Listening", "listening"]

DEFAULT_BIND = "127.0.0.1:8650"
_BACKLOG = 1024
_CONNECT_S = 1.0


class Listening(NamedTuple):
    """A socket that takes connections, and how a client names it."""

    listener: trio.SocketListener
    address: str


@asynccontextmanager
async def listening(bind: str, *, private_only: bool) -> AsyncIterator[Listening]:
    """Listen on ``HOST:PORT`` (port 0: any free one) or ``unix:/PATH``; ``ConfigError`` where that can't be.

    With ``private_only`` an address that other machines can reach is refused.
    """
    path = bind.removeprefix("unix:") if bind.startswith("unix:") else None
    if path is None:
        sock = await _tcp_socket(*_host_and_port(bind), private_only=private_only)
    else:
        sock = await _unix_socket(path)
    inode = None
    try:
        inode = None if path is None else os.lstat(path).st_ino
        yield Listening(trio.SocketListener(sock), _url(sock) if path is None else f"unix:{path}")
    finally:
        sock.close()
        if path is not None:
            _unlink_own(path, inode)


def _host_and_port(bind: str) -> tuple[str, int]:
    host, _, port = bind.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{bind!r} is not an address to listen on; expected HOST:PORT or unix:/PATH")
    return host, int(port)


async def _tcp_socket(host: str, port: int, *, private_only: bool) -> trio.socket.SocketType:
    try:
        found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as exc:
        raise ConfigError(f"the host {host!r} to listen on is not known: {exc.strerror}") from exc
    family, _, _, _, target = found[0]
    if private_only and not ipaddress.ip_address(str(target[0]).partition("%")[0]).is_loopback:
        raise ConfigError(f"without authentication the server listens on loopback or a Unix socket only, not on {host}")
    sock = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        await sock.bind(target)
        sock.listen(_BACKLOG)
    except OSError as exc:
        sock.close()
        cure = "; use another --port" if exc.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"can't listen on {host}:{port}: {exc.strerror}{cure}") from exc
    except BaseException:
        sock.close()
        raise
    return sock


def _url(sock: trio.socket.SocketType) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _unix_socket(path: str) -> trio.socket.SocketType:
    if not path.startswith("/"):
        raise ConfigError(f"a Unix socket needs an absolute path, not {path!r}")
    await _remove_stale(path)
    sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Linux gives the file the mode of the unbound socket; a umask would be the whole process's.
        os.fchmod(sock.fileno(), 0o600)
        await sock.bind(path)
        sock.listen(_BACKLOG)
    except OSError as exc:
        sock.close()
        raise ConfigError(f"can't listen on the Unix socket {path}: {exc.strerror or exc}") from exc
    except BaseException:
        sock.close()
        raise
    return sock


async def _remove_stale(path: str) -> None:
    """Remove the socket of a server that is gone; a living one, or another kind of file, is left alone."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as exc:
        raise ConfigError(f"can't listen on the Unix socket {path}: {exc.strerror}") from exc
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} exists and is not a socket")
    with trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            with trio.fail_after(_CONNECT_S):
                await probe.connect(path)
        except OSError as exc:
            if exc.errno != errno.ECONNREFUSED:
                raise ConfigError(f"can't tell whether a server listens on {path}: {exc.strerror}") from exc
            os.unlink(path)  # noqa: PTH108
            return
        except trio.TooSlowError as exc:
            raise ConfigError(f"another server listens on {path} and does not answer") from exc
    raise ConfigError(f"another server listens on {path}")


def _unlink_own(path: str, inode: int | None) -> None:
    try:
        if os.lstat(path).st_ino == inode:
            os.unlink(path)  # noqa: PTH108
    except FileNotFoundError:
        return
