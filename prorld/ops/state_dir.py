"""The state directory of a daemon: private, locked by one daemon at a time, and saying where that one listens."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from prorld.errors import ConfigError
from prorld.wire.ops import Endpoint

__all__ = ["ENDPOINT_FILE", "OPEN_TO_OTHERS", "announced", "held", "make_private"]

ENDPOINT_FILE = "endpoint.json"
LOCK_FILE = "lock"
# What others may not do in it; passing through they may.
OPEN_TO_OTHERS = 0o066


def make_private(directory: Path) -> None:
    """Make the directory where it is missing, as the daemon wants it: commands may well come before the first start."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise _unusable(directory, exc) from exc


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Hold the directory for this process: a second daemon on it is refused. The kernel lets go when this one dies."""
    make_private(directory)
    try:
        _check_private(directory)
        fd = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as exc:
        raise _unusable(directory, exc) from exc
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another daemon uses {directory}; stop it or choose another --state-dir") from None
        yield
    finally:
        os.close(fd)


def _unusable(directory: Path, exc: OSError) -> ConfigError:
    return ConfigError(f"the state directory {directory} can't be used: {exc.strerror}")


def _check_private(directory: Path) -> None:
    """What is in there is obeyed at the next start (what to remove, what to end), so only we may write into it."""
    found = directory.stat()
    if found.st_uid != os.geteuid():
        raise ConfigError(f"the state directory {directory} belongs to another user; choose another --state-dir")
    # Others may pass through: as root, sandboxes with an image run as somebody else and lie below it.
    if stat.S_IMODE(found.st_mode) & OPEN_TO_OTHERS:
        raise ConfigError(f"others can read or write the state directory {directory}; `chmod 700` it")


@contextmanager
def announced(directory: Path, endpoint: Endpoint) -> Iterator[None]:
    """``endpoint.json`` for as long as the daemon listens; appears whole and is gone afterwards."""
    path = directory / ENDPOINT_FILE
    half = directory / f".{ENDPOINT_FILE}.{endpoint.boot_id}"
    half.write_bytes(msgspec.json.encode(endpoint) + b"\n")
    half.chmod(0o600)
    half.rename(path)
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            path.unlink()
