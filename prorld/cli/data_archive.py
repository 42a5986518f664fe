"""Files in a distribution, read where they lie: nothing is unpacked by name, nothing of it is run, all is bounded.

An archive is hostile until read: names are only compared and shown, and what unfolds without end is given up.
"""

from __future__ import annotations

import gzip
import io
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any, cast

import msgspec
import zstandard

from prorld.errors import ProrldError

__all__ = ["ArchiveError", "Member", "archive_members", "bounded", "local_members", "opened", "plain_name"]

MEMBERS_MAX = 100_000
# Of one member, and of all together.
UNPACKED_BYTES_MAX = 8 << 30
SPOOLED_BYTES_MAX = 4 << 30
# Of a header that is a member of its own: a long name, say. It is read into memory whole.
HEADER_BYTES_MAX = 1 << 20
ZSTD_WINDOW_BYTES_MAX = 1 << 27
_COPY_BYTES = 1 << 20


class ArchiveError(ProrldError):
    """An archive, or a file in it, can't be read, is not what it says it is, or unfolds beyond its bounds."""

    code = "archive_unreadable"


# What the readers of archives and of compressed streams raise for what is no such thing.
_UNREADABLE = (
    OSError, EOFError, RuntimeError, NotImplementedError, ValueError, zlib.error, zipfile.BadZipFile, tarfile.TarError,
    zstandard.ZstdError, zipfile.LargeZipFile,
)  # fmt: skip


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A file to read rows from; ``where`` is what it is called in what is said about it."""

    name: str
    where: str
    stream: IO[bytes]


class _Bounded(io.RawIOBase):
    """A stream that gives so many bytes and no more, its errors told as ours."""

    def __init__(self, stream: IO[bytes], what: str, bytes_max: int) -> None:
        self._stream = stream
        self._what = what
        self._left = bytes_max
        self._bytes_max = bytes_max

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        try:
            data = self._stream.read(len(view))
        except ProrldError:
            raise
        except _UNREADABLE as exc:
            raise ArchiveError(f"{self._what} can't be read: {exc}") from exc
        self._left -= len(data)
        if self._left < 0:
            raise ArchiveError(f"{self._what} unfolds to more than {self._bytes_max} bytes", code="archive_too_large")
        view[: len(data)] = data
        return len(data)


def bounded(stream: IO[bytes], what: str, bytes_max: int | None = None) -> io.BufferedReader:
    """The stream, buffered; ``ArchiveError`` where it gives more than it may, or breaks."""
    limit = UNPACKED_BYTES_MAX if bytes_max is None else bytes_max
    return io.BufferedReader(cast("Any", _Bounded(stream, what, limit)), 1 << 16)


def plain_name(name: str) -> str:
    """Without what says that it is compressed."""
    return name[: name.rindex(".")] if name.lower().endswith((".gz", ".zst")) else name


class _PlainHeaders(tarfile.TarInfo):
    """Headers of tapes whose reading takes no more memory than they should; files with holes are no data of ours."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _PlainHeaders:
        """A header as it was read; those that would be read on into memory are looked at first."""
        info = super().frombuf(buf, encoding, errors)
        if info.type == tarfile.GNUTYPE_SPARSE:
            cls._sparse()
        if info.type in _HEADERS and info.size > HEADER_BYTES_MAX:
            raise ArchiveError(f"a header of an archive has {info.size} bytes", code="archive_too_large")
        return info

    @staticmethod
    def _sparse(*_: object) -> None:
        raise ArchiveError("an archive holds a file with holes, which is not read")

    # Where tarfile reads the maps of holes.
    _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _sparse


_HEADERS = frozenset({
    tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE
})  # fmt: skip


@contextmanager
def opened(member: Member) -> Iterator[io.BufferedReader]:
    """The content, unfolded where its name ends in ``.gz`` or ``.zst``."""
    name = member.name.lower()
    raw = bounded(member.stream, member.where)
    if name.endswith(".gz"):
        with gzip.GzipFile(fileobj=raw) as inner:
            yield bounded(cast("IO[bytes]", inner), member.where)
    elif name.endswith(".zst"):
        unfolder = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES_MAX)
        with unfolder.stream_reader(raw, read_across_frames=True) as folded:
            yield bounded(cast("IO[bytes]", folded), member.where)
    else:
        yield raw


def local_members(names: Sequence[str]) -> Iterator[Member]:
    """Files of this machine, as they were typed."""
    for name in names:
        with ExitStack() as stack:
            try:
                stream = stack.enter_context(Path(name).open("rb"))
            except OSError as exc:
                raise ArchiveError(f"{name} can't be read: {exc.strerror or exc}", code="bad_input") from exc
            yield Member(name=Path(name).name, where=name, stream=stream)


def archive_members(path: Path, patterns: Sequence[str]) -> Iterator[Member]:
    """The files that any of the globs fits, in order of their names. ``ArchiveError`` where one fits none."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                yield from _of_zip(archive, path.name, patterns)
        else:
            with gzip.open(path) as unfolded, tempfile.TemporaryFile() as spool:
                everything = bounded(cast("IO[bytes]", unfolded), path.name)
                with tarfile.open(fileobj=everything, mode="r|", tarinfo=_PlainHeaders) as tape:
                    places = _spooled(tape, spool, path.name, patterns)
                yield from _of_spool(spool, places, path.name)
    except _UNREADABLE as exc:
        raise ArchiveError(f"{path.name} can't be read: {exc}") from exc


def _of_zip(archive: zipfile.ZipFile, name: str, patterns: Sequence[str]) -> Iterator[Member]:
    infos = [info for info in archive.infolist() if not info.is_dir()]
    chosen = _chosen([info.filename for info in infos], name, patterns)
    by_name = {info.filename: info for info in infos}
    for each in chosen:
        with archive.open(by_name[each]) as stream:
            yield Member(name=each, where=f"{name}:{each}", stream=stream)


def _spooled(tape: tarfile.TarFile, spool: IO[bytes], name: str, patterns: Sequence[str]) -> list[tuple[str, int, int]]:
    """Where the members are in a file without a name: a tape is read once, from its start to its end."""
    places: list[tuple[str, int, int]] = []
    left = SPOOLED_BYTES_MAX
    for seen, info in enumerate(tape, 1):
        if seen > MEMBERS_MAX:
            raise ArchiveError(f"{name} has more than {MEMBERS_MAX} members", code="archive_too_large")
        if not info.isreg() or not any(fnmatchcase(info.name, pattern) for pattern in patterns):
            continue
        left -= info.size
        if left < 0:
            raise ArchiveError(f"{name} has more than {SPOOLED_BYTES_MAX} bytes to read", code="archive_too_large")
        stream = tape.extractfile(info)
        assert stream is not None
        begin = spool.tell()
        while piece := stream.read(_COPY_BYTES):
            spool.write(piece)
        places.append((info.name, begin, spool.tell() - begin))
    order = {each: place for place, each in enumerate(_chosen([place[0] for place in places], name, patterns))}
    return sorted(places, key=lambda place: order[place[0]])


def _of_spool(spool: IO[bytes], places: list[tuple[str, int, int]], name: str) -> Iterator[Member]:
    for each, begin, size in places:
        yield Member(name=each, where=f"{name}:{each}", stream=cast("IO[bytes]", _Slice(spool, begin, size)))


class _Slice(io.RawIOBase):
    """A part of a file."""

    def __init__(self, file: IO[bytes], begin: int, size: int) -> None:
        self._file = file
        self._at = begin
        self._end = begin + size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        self._file.seek(self._at)
        data = self._file.read(min(len(view), self._end - self._at))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


def _chosen(names: Sequence[str], archive: str, patterns: Sequence[str]) -> list[str]:
    if len(names) > MEMBERS_MAX:
        raise ArchiveError(f"{archive} has more than {MEMBERS_MAX} members", code="archive_too_large")
    chosen: list[str] = []
    for pattern in patterns:
        fitting = [name for name in names if fnmatchcase(name, pattern)]
        if not fitting:
            raise ArchiveError(f"{archive} has no file {pattern}", code="archive_misses_member")
        chosen += fitting
    once = set(chosen)
    if sum(name in once for name in names) != len(once):
        raise ArchiveError(f"{archive} has two files of one name")
    return sorted(once)
