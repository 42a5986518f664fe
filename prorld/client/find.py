"""Finds the daemon of this host: its state directory, its address and the token that opens it.

Never sends the token of a state directory to an address that does not come from the same directory.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

import msgspec

from prorld.client.errors import BAD_ADDRESS, NO_DAEMON, TOKEN_EXPOSED, TOKEN_UNREADABLE, ClientError
from prorld.wire.ops import Endpoint

DEFAULT_PORT = 8650
ENDPOINT_FILE = "endpoint.json"
TOKEN_FILE = "token"  # noqa: S105 - a file name
STATE_VARIABLE = "PRORLD_STATE"
ADDRESS_VARIABLE = "PRORLD_ADDRESS"
TOKEN_VARIABLE = "PRORLD_TOKEN"  # noqa: S105 - the name of a variable

# Both files are a line or two; anything larger is not ours.
_FILE_BYTES_MAX = 64 << 10


class Address(NamedTuple):
    """Where a daemon listens: a Unix socket's path, or host and port."""

    host: str
    port: int
    socket_path: str | None = None
    tls: bool = False

    def __str__(self) -> str:
        if self.socket_path is not None:
            return f"unix:{self.socket_path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"


class Target(NamedTuple):
    """A daemon and what opens it."""

    address: Address
    token: str | None
    token_from: str = ""


def state_dir(chosen: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None) -> Path:
    """The state directory: the one chosen, else ``$PRORLD_STATE``, else ``prorld/`` in the XDG state directory."""
    env = os.environ if environ is None else environ
    if chosen is not None:
        return Path(chosen).expanduser()
    if env.get(STATE_VARIABLE):
        return Path(env[STATE_VARIABLE]).expanduser()
    xdg = env.get("XDG_STATE_HOME", "")
    # The XDG specification tells to ignore a relative path.
    base = Path(xdg) if xdg.startswith("/") else Path(env.get("HOME") or "~").expanduser() / ".local" / "state"
    return base / "prorld"


def parse_address(text: str) -> Address:
    """``HOST:PORT``, ``http://HOST:PORT``, ``https://HOST:PORT`` or ``unix:/PATH``."""
    for prefix in ("unix://", "http+unix://", "unix:"):
        if text.startswith(prefix):
            path = text.removeprefix(prefix)
            if not path.startswith("/"):
                raise _bad_address(text, "a Unix socket needs an absolute path")
            return Address("localhost", 0, socket_path=path)
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        port = parts.port
    except ValueError as exc:
        raise _bad_address(text, str(exc)) from exc
    return _tcp(text, parts, port)


def _tcp(text: str, parts: SplitResult, port: int | None) -> Address:
    if parts.scheme not in ("http", "https"):
        raise _bad_address(text, f"the scheme {parts.scheme} is not known")
    if not parts.hostname or parts.path not in ("", "/") or parts.query or parts.username:
        raise _bad_address(text, "expected HOST:PORT")
    tls = parts.scheme == "https"
    return Address(parts.hostname, (443 if tls else DEFAULT_PORT) if port is None else port, tls=tls)


def _bad_address(text: str, why: str) -> ClientError:
    return ClientError(
        f"{text!r} is not an address: {why} (HOST:PORT, http://HOST:PORT or unix:/PATH)", code=BAD_ADDRESS
    )


def read_endpoint(directory: Path) -> Endpoint:
    """What the daemon of this state directory wrote about itself."""
    path = directory / ENDPOINT_FILE
    try:
        return msgspec.json.decode(_read(path), type=Endpoint)
    except FileNotFoundError as exc:
        message = f"no daemon has {directory} as its state directory; start one with `prorld serve`"
        raise ClientError(message, code=NO_DAEMON) from exc
    except (OSError, msgspec.MsgspecError) as exc:
        raise ClientError(f"{path} can't be read: {exc}", code=NO_DAEMON) from exc


def read_token(directory: Path) -> str | None:
    """The token of this state directory; ``None`` where there is none. One that others can read is refused."""
    return read_token_file(directory / TOKEN_FILE)


def read_token_file(path: Path) -> str | None:
    """The token in a file; ``None`` where there is no file. One that others can read is refused."""
    try:
        mode = path.stat().st_mode
        text = _read(path).decode("ascii").strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as exc:
        message = f"the token in {path} can't be read: {exc}; run as the daemon's user or set ${TOKEN_VARIABLE}"
        raise ClientError(message, code=TOKEN_UNREADABLE) from exc
    if stat.S_IMODE(mode) & 0o077:
        message = f"the token in {path} can be read by others; `chmod 600` it, or delete it and restart the daemon"
        raise ClientError(message, code=TOKEN_EXPOSED)
    return text or None


def find(
    address: str | None = None,
    token: str | None = None,
    directory: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Target:
    """The daemon to talk to: what was named, else what the environment names, else the one of the state directory."""
    env = os.environ if environ is None else environ
    source = "the one given" if token else f"${TOKEN_VARIABLE}"
    token = token or env.get(TOKEN_VARIABLE) or None
    named = address or env.get(ADDRESS_VARIABLE)
    place = state_dir(directory, env)
    if not named:
        endpoint = parse_address(read_endpoint(place).address)
        return Target(endpoint, token, source) if token else _of_place(endpoint, place)
    target = parse_address(named)
    if token is None and _lives_here(place, target):
        return _of_place(target, place)
    return Target(target, token, source)


def _of_place(address: Address, directory: Path) -> Target:
    return Target(address, read_token(directory), str(directory / TOKEN_FILE))


def _lives_here(directory: Path, address: Address) -> bool:
    try:
        return parse_address(read_endpoint(directory).address) == address
    except ClientError:
        return False


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(_FILE_BYTES_MAX + 1)
    if len(data) > _FILE_BYTES_MAX:
        raise OSError(f"larger than {_FILE_BYTES_MAX} bytes")
    return data
