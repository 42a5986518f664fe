"""Writes a tree of this host as tar, piece by piece. It reads what is there and follows no links."""

from __future__ import annotations

import os
import stat
from collections.abc import Generator, Iterator
from pathlib import Path

__all__ = ["BLOCK_BYTES", "ENTRIES_MAX", "pack_file", "pack_tree"]

BLOCK_BYTES = 512
ENTRIES_MAX = 200_000
PIECE_BYTES = 1 << 18
_FIELD_BYTES = 100
_SIZE_MAX = 8 << 30  # what a size in octal digits can say


def pack_file(path: Path, size: int) -> Generator[bytes]:
    """The content of a file that had ``size`` bytes. Raises ``OSError`` where it has fewer by now."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        while size:
            piece = os.read(descriptor, min(PIECE_BYTES, size))
            if not piece:
                raise OSError(f"{path}: it became shorter while it was read")
            size -= len(piece)
            yield piece
    finally:
        os.close(descriptor)


def pack_tree(root: Path, last: str = "") -> Generator[bytes]:
    """The directory ``root`` as tar, with modes and symbolic links as they are.

    ``last`` is the name of an empty file that comes at the end: who reads a part of it is told by many programs that
    it was all.

    Raises ``ValueError`` for what is no file, directory or link, and for a tree of too many entries.
    """
    yield _header(b".", b"5", root.stat(), b"")
    # What is in a directory follows it at once: programs that read this close a directory when it is left.
    levels = [(b".", _entries(root))]
    left = ENTRIES_MAX
    while levels:
        parent, entries = levels[-1]
        path = next(entries, None)
        if path is None:
            levels.pop()
            continue
        left -= 1
        if left < 0:
            raise ValueError(f"{root}: more than {ENTRIES_MAX} entries")
        name, found = parent + b"/" + os.fsencode(path.name), path.lstat()
        if stat.S_ISDIR(found.st_mode):
            yield _header(name, b"5", found, b"")
            levels.append((name, _entries(path)))
        elif stat.S_ISLNK(found.st_mode):
            yield _header(name, b"2", found, os.fsencode(path.readlink()))
        elif stat.S_ISREG(found.st_mode):
            yield _header(name, b"0", found, b"")
            yield from pack_file(path, found.st_size)
            yield bytes(-found.st_size % BLOCK_BYTES)
        else:
            raise ValueError(f"{path}: neither a file nor a directory nor a link")
    if last:
        yield _block(b"./" + os.fsencode(last), b"0", 0o600, 0, 0, b"")
    yield bytes(2 * BLOCK_BYTES)


def _entries(directory: Path) -> Iterator[Path]:
    return iter(sorted(directory.iterdir()))


def _header(name: bytes, kind: bytes, found: os.stat_result, link: bytes) -> bytes:
    size = found.st_size if kind == b"0" else 0
    if size >= _SIZE_MAX:
        raise ValueError(f"{os.fsdecode(name)}: a file of {size} bytes is too large")
    before = b"".join(_long(b"L" if text is name else b"K", text) for text in (name, link) if len(text) > _FIELD_BYTES)
    return before + _block(name, kind, found.st_mode & 0o777, size, max(0, int(found.st_mtime)), link)


def _long(kind: bytes, text: bytes) -> bytes:
    content = text + b"\0"
    return _block(b"././@LongLink", kind, 0o644, len(content), 0, b"") + content + bytes(-len(content) % BLOCK_BYTES)


def _block(name: bytes, kind: bytes, mode: int, size: int, at: int, link: bytes) -> bytes:
    fields = b"%07o\0%07o\0%07o\0%011o\0%011o\0" % (mode, 0, 0, size, at)
    start = name[:_FIELD_BYTES].ljust(_FIELD_BYTES, b"\0") + fields
    end = kind + link[:_FIELD_BYTES].ljust(_FIELD_BYTES, b"\0") + b"ustar  \0"
    end = end.ljust(BLOCK_BYTES - len(start) - 8, b"\0")
    total = sum(start) + sum(end) + 8 * ord(" ")
    return start + b"%06o\0 " % total + end
