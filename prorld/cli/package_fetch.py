"""Distributions of the package index, fetched by name and kept by hash. Nothing of them is unpacked, built or run.

One process fetches a distribution at a time; the others wait for it and find it. A file appears in the directory whole
and checked, or not at all.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Self

import msgspec
import trio

from prorld.cli.image_progress import sized
from prorld.cli.package_index import Candidate, Kind, PackageError, Wanted, choose, wanted
from prorld.cli.package_settings import IndexSettings
from prorld.cli.package_source import Source, Write
from prorld.handlers.packages import cached_package

__all__ = ["BYTES_MAX", "Package", "alone", "fetch"]

BYTES_MAX = 512 << 20
DEADLINE_S = 1800.0
LOCK_POLL_S = 0.2

_RECORD_BYTES_MAX = 4096


class Package(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution that is there. ``fetched`` says that it was not there before."""

    path: Path
    sha256: str
    fetched: bool


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """Which file a version was, so that it need not be asked for again."""

    sha256: str


async def fetch(
    requirement: str,
    *,
    kind: Kind,
    sha256: str | None,
    into: Path,
    index: IndexSettings,
    progress: Callable[[str], None],
    bytes_max: int = BYTES_MAX,
    deadline_s: float = DEADLINE_S,
) -> Package:
    """The distribution, from the directory or from the index. Raises ``PackageError``."""
    what = wanted(requirement, kind, sha256)
    with trio.move_on_after(deadline_s) as scope:
        found = await trio.to_thread.run_sync(_there, what, into)
        if found is not None:
            return found
        await trio.to_thread.run_sync(_make, into)
        async with alone(into, what.name, progress):
            found = await trio.to_thread.run_sync(_there, what, into)
            return found or await _fetch(what, into, Source(index), progress, bytes_max)
    assert scope.cancelled_caught
    raise PackageError(f"{what} could not be fetched within {deadline_s:g} s", code="index_failed", retryable=True)


async def _fetch(
    what: Wanted, into: Path, source: Source, progress: Callable[[str], None], bytes_max: int
) -> Package:  # fmt: skip
    progress(f"asking the index for {what}")
    chosen = choose(await source.links(what, progress), what)
    expected = what.sha256 or chosen.link.sha256
    if expected is not None and (known := await trio.to_thread.run_sync(cached_package, expected, into)) is not None:
        await trio.to_thread.run_sync(_note, what, into, chosen, expected)
        return Package(path=known, sha256=expected, fetched=False)
    # The lock makes it ours; what a process that died left there is written over.
    half = into / f".{what.name}-{what.kind}.part"
    try:
        # Buffered writes into the page cache; what may last is in a thread.
        with _Half(half, chosen.link.filename, progress) as writing:
            await source.file(chosen.link, writing.begin, bytes_max)
            digest = writing.digest()
            if expected is not None and digest != expected:
                message = f"{chosen.link.filename} has the SHA-256 {digest}, and not {expected}"
                raise PackageError(message, code="package_mismatch")
            await trio.to_thread.run_sync(writing.sync)
        path = await trio.to_thread.run_sync(_place, half, into, digest, chosen.link.filename)
    except OSError as exc:
        raise _unwritable(into, exc) from exc
    finally:
        half.unlink(missing_ok=True)
    await trio.to_thread.run_sync(_note, what, into, chosen, digest)
    return Package(path=path, sha256=digest, fetched=True)


class _Half:
    """The file that is being written, its hash, and how far it is."""

    def __init__(self, path: Path, name: str, progress: Callable[[str], None]) -> None:
        self._path = path
        self._name = name
        self._progress = progress
        self._hash = hashlib.sha256()
        self._size = 0

    def __enter__(self) -> Self:
        self._file: BinaryIO = self._path.open("wb")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def begin(self) -> Write:
        """From the start, again where an earlier try broke."""
        self._file.seek(0)
        self._file.truncate()
        self._hash, self._size = hashlib.sha256(), 0
        return self._write

    def _write(self, piece: bytes) -> None:
        try:
            self._file.write(piece)
        except OSError as exc:
            # Not the connection's failure, which is what it would be taken for on the way up.
            raise _unwritable(self._path.parent, exc) from exc
        self._hash.update(piece)
        self._size += len(piece)
        self._progress(f"fetching {self._name}: {sized(self._size)}")

    def digest(self) -> str:
        """Of what was written."""
        return self._hash.hexdigest()

    def sync(self) -> None:
        """Onto the disk; blocks."""
        self._file.flush()
        os.fsync(self._file.fileno())


# --- the directory; these block ---------------------------------------------------------------------------------------


def _make(into: Path) -> None:
    try:
        into.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as exc:
        raise _unwritable(into, exc) from exc


def _unwritable(into: Path, exc: OSError) -> PackageError:
    return PackageError(f"{into} can't be written: {exc.strerror or exc}", code="cache_unwritable")


def _there(what: Wanted, into: Path) -> Package | None:
    """What needs no index: it was asked for by hash, or by a version that was fetched before."""
    sha256 = what.sha256
    if sha256 is None and what.version is not None:
        with suppress(OSError, msgspec.MsgspecError), _record_path(what, into).open("rb") as file:
            sha256 = msgspec.json.decode(file.read(_RECORD_BYTES_MAX), type=_Record).sha256
    path = None if sha256 is None else cached_package(sha256, into)
    return None if path is None or sha256 is None else Package(path=path, sha256=sha256, fetched=False)


def _record_path(what: Wanted, into: Path) -> Path:
    return into / ".versions" / f"{what.name}-{what.version}-{what.kind}.json"


def _note(what: Wanted, into: Path, chosen: Candidate, sha256: str) -> None:
    # Told by a hash, it may be another file than the index's first choice for the version.
    if what.sha256 is not None:
        return
    path = _record_path(msgspec.structs.replace(what, version=what.version or str(chosen.version)), into)
    half = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        path.parent.mkdir(exist_ok=True)
        half.write_bytes(msgspec.json.encode(_Record(sha256=sha256)))
        half.replace(path)
    except OSError as exc:
        raise _unwritable(into, exc) from exc


def _place(half: Path, into: Path, sha256: str, filename: str) -> Path:
    place = into / sha256
    place.mkdir(exist_ok=True)
    half.chmod(0o644)
    # A file under this hash that is another one was cut or changed, and a search would find it first.
    for other in place.iterdir():
        other.unlink()
    return half.replace(place / filename)


@asynccontextmanager
async def alone(into: Path, name: str, progress: Callable[[str], None]) -> AsyncIterator[None]:
    """Hold the distribution's lock; the kernel lets go of it when this process dies."""
    path = into / ".locks" / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as exc:
        raise _unwritable(into, exc) from exc
    try:
        while not _locked(descriptor):
            progress(f"another process fetches {name}; waiting for it")
            await trio.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
