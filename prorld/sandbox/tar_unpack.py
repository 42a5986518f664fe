"""Puts a tar stream that nobody vouches for into a directory of this host, piece by piece.

Everything that the stream says is hostile: names that leave the directory, links that do, devices, sizes, numbers. The
directory must be fresh and this process's alone; then a name is safe when each of its parents is a directory that the
stream itself has made. Memory is bounded by the number of entries; content goes to disk as it comes.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from prorld.sandbox.tar_pack import BLOCK_BYTES, ENTRIES_MAX

__all__ = ["Unpacker"]

NAME_BYTES_MAX = 255
PATH_BYTES_MAX = 2048
DIRECTORY_NAMES_BYTES_MAX = 1 << 25  # all that is kept in memory
META_BYTES_MAX = 1 << 16  # of a long name, and of the properties that stand before an entry
_PERMISSIONS = 0o777  # no set-user-id comes out of a sandbox
_END_BLOCKS = 2  # of zeros
_ZEROS = bytes(BLOCK_BYTES)
_FILES, _LONG, _PROPERTIES = b"0\0" + b"7", b"LK", b"xg"


class Unpacker:
    """Feed it until the stream ends, then ``finish``. Raises ``ValueError`` for what it refuses, ``OSError`` else."""

    def __init__(self, root: Path, *, max_bytes: int) -> None:
        self._root = root
        self._left = max_bytes
        self._entries = 0
        self._modes: dict[str, int] = {"": 0o700}
        self._names_left = DIRECTORY_NAMES_BYTES_MAX
        self._buffer = bytearray()
        self._file: int | None = None
        self._file_mode = 0
        self._body = 0  # bytes of a body that are still to come
        self._padding = 0
        self._meta = b""  # the kind of a body that says something of the next entry
        self._said: dict[bytes, bytes] = {}
        self._zeros = 0

    def feed(self, data: bytes) -> None:
        """Take what arrived. What follows the end of the archive is dropped."""
        if self._zeros < _END_BLOCKS:
            self._buffer += data
        while self._zeros < _END_BLOCKS and self._step():
            pass

    def finish(self) -> None:
        """The stream has ended; the directories get their modes. Raises ``OSError`` where it ended too early."""
        if self._zeros < _END_BLOCKS:
            raise OSError("what the sandbox sent ended before its end")
        for name in sorted(self._modes, reverse=True):
            # Its owner must be able to read it, and to remove it.
            (self._root / name).chmod(self._modes[name] & _PERMISSIONS | 0o700)

    def close(self) -> None:
        """Let go of a file that was being written."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _step(self) -> bool:
        """Take one thing off the buffer; false when more must come first."""
        if self._file is not None:
            return self._write()
        if self._meta:
            if len(self._buffer) < self._body:
                return False
            content = bytes(self._buffer[: self._body])
            del self._buffer[: self._body]
            self._note(content)
            return True
        if self._padding:
            count = min(self._padding, len(self._buffer))
            del self._buffer[:count]
            self._padding -= count
            return count > 0
        if len(self._buffer) < BLOCK_BYTES:
            return False
        block = bytes(self._buffer[:BLOCK_BYTES])
        del self._buffer[:BLOCK_BYTES]
        self._zeros = self._zeros + 1 if block == _ZEROS else 0
        if not self._zeros:
            self._begin(block)
        return True

    def _write(self) -> bool:
        assert self._file is not None
        piece = bytes(self._buffer[: self._body])
        del self._buffer[: len(piece)]
        self._body -= len(piece)
        while piece:
            piece = piece[os.write(self._file, piece) :]
        if self._body:
            return False
        os.fchmod(self._file, self._file_mode & _PERMISSIONS | 0o600)
        self.close()
        return True

    def _begin(self, block: bytes) -> None:
        """A header: make what it names, or get ready for what it says of the next one."""
        if sum(block[:148]) + sum(block[156:]) + 8 * ord(" ") != _number(block[148:156]):
            raise ValueError("a header that is none")
        kind, size = block[156:157], _number(block[124:136])
        self._padding = -size % BLOCK_BYTES
        if kind in _LONG or kind in _PROPERTIES:
            if size > META_BYTES_MAX:
                raise ValueError(f"a name or a property of {size} bytes")
            self._meta, self._body = kind, size
            return
        said, self._said = self._said, {}
        size = int(said.get(b"size", b"%d" % size))
        name = said.get(b"path") or _name(block)
        link = said.get(b"linkpath") or block[157:257].partition(b"\0")[0]
        self._entries += 1
        if self._entries > ENTRIES_MAX:
            raise ValueError(f"more than {ENTRIES_MAX} entries")
        self._make(kind, _clean(name), _number(block[100:108]), size, link)

    def _make(self, kind: bytes, name: str, mode: int, size: int, link: bytes) -> None:
        parent = name.rpartition("/")[0]
        if parent not in self._modes:
            raise ValueError(f"{name!r} lies below what is no directory")
        path = self._root / name
        if kind in _FILES:
            self._begin_file(path, name, mode, size)
            return
        self._padding = 0
        try:
            if kind == b"5":
                self._make_directory(path, name, mode)
            elif kind == b"2":
                _check_link(name, link)
                path.symlink_to(os.fsdecode(link))
            elif kind == b"1":
                self._make_hard_link(path, _clean(link))
            else:
                raise ValueError(f"{name!r} is no file, directory or link")
        except FileExistsError as exc:
            raise ValueError(f"{name!r} comes twice") from exc

    def _make_directory(self, path: Path, name: str, mode: int) -> None:
        if name not in self._modes:
            self._names_left -= len(name)
            if self._names_left < 0:
                raise ValueError("too many directories")
            path.mkdir(mode=0o700)
        self._modes[name] = mode

    def _begin_file(self, path: Path, name: str, mode: int, size: int) -> None:
        if size > self._left:
            raise ValueError(f"{name!r} is too large: {size} bytes, and {self._left} may still come")
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except (FileExistsError, IsADirectoryError) as exc:
            raise ValueError(f"{name!r} comes twice") from exc
        self._left -= size
        self._body, self._padding, self._file_mode = size, -size % BLOCK_BYTES, mode

    def _make_hard_link(self, path: Path, first: str) -> None:
        """Another name of a file that has come already."""
        parent = first.rpartition("/")[0]
        if parent not in self._modes or not _is_file(self._root / first):
            raise ValueError(f"a link to {first!r}, which is no file that has come")
        path.hardlink_to(self._root / first)

    def _note(self, content: bytes) -> None:
        """A long name, or properties, of the entry that follows."""
        kind, self._meta, self._body = self._meta, b"", 0
        if kind == b"L":
            self._said[b"path"] = content.partition(b"\0")[0]
        elif kind == b"K":
            self._said[b"linkpath"] = content.partition(b"\0")[0]
        elif kind == b"x":
            self._said.update(_properties(content))


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def _number(field: bytes) -> int:
    """A number in octal, or in base 256 where it is too large for that."""
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    digits = field.partition(b"\0")[0].strip()
    if not all(b"0" <= digits[i : i + 1] <= b"7" for i in range(len(digits))):
        raise ValueError("a header that is none")
    return int(digits or b"0", 8)


def _name(block: bytes) -> bytes:
    name = block[:100].partition(b"\0")[0]
    if block[257:263] != b"ustar\0":
        return name
    prefix = block[345:500].partition(b"\0")[0]
    return prefix + b"/" + name if prefix else name


def _clean(name: bytes) -> str:
    """A name below the root, ``""`` for the root itself."""
    words = [word for word in name.split(b"/") if word not in (b"", b".")]
    if name.startswith(b"/") or b".." in words or b"\0" in name:
        raise ValueError(f"{name[:100]!r} leaves the directory")
    if len(name) > PATH_BYTES_MAX or any(len(word) > NAME_BYTES_MAX for word in words):
        raise ValueError(f"a name of {len(name)} bytes is too long")
    return os.fsdecode(b"/".join(words))


def _check_link(name: str, target: bytes) -> None:
    """Refuse a link that could leave.

    Steps upwards count from the link's own directory, which is a real one. After a name they are refused: it could be
    that of another link, and then nobody knows from here where they lead.
    """
    words = [word for word in target.split(b"/") if word not in (b"", b".")]
    ups = next((i for i, word in enumerate(words) if word != b".."), len(words))
    if target.startswith(b"/") or ups > name.count("/") or b".." in words[ups:] or not target:
        raise ValueError(f"{name!r} is a link that leaves the directory")
    if len(target) > PATH_BYTES_MAX or any(len(word) > NAME_BYTES_MAX for word in words):
        raise ValueError(f"{name!r} is a link to a name that is too long")


def _properties(content: bytes) -> dict[bytes, bytes]:
    """The records ``LENGTH KEY=VALUE LF`` that can change what an entry is called or how long it is."""
    found: dict[bytes, bytes] = {}
    while content.strip(b"\0"):
        length, _, _ = content.partition(b" ")
        if not length.isdigit() or len(length) > 6 or not len(length) < int(length) <= len(content):
            raise ValueError("properties that are none")
        record, content = content[len(length) + 1 : int(length)], content[int(length) :]
        key, equals, value = record.removesuffix(b"\n").partition(b"=")
        if not equals:
            raise ValueError("properties that are none")
        if key.startswith(b"GNU.sparse"):
            raise ValueError("a file with holes")
        if key in (b"path", b"linkpath"):
            found[key] = value
        elif key == b"size":
            if not value.isdigit() or len(value) > 19:
                raise ValueError("properties that are none")
            found[key] = value
    return found
