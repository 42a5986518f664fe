"""A source package as files in memory: unpacked within bounds, without links, and nothing of it is run.

Paths are POSIX and relative to the one directory that a source distribution has at its top.
"""

from __future__ import annotations

import hashlib
import tarfile
import tempfile
import zlib
from pathlib import Path, PurePosixPath
from typing import IO

import msgspec

from prorld.handlers import Impossible

__all__ = ["ARCHIVE_BYTES_MAX", "Tree", "file_sha256", "read_sdist", "write_tree"]

ARCHIVE_BYTES_MAX = 64 << 20
TREE_BYTES_MAX = 256 << 20
FILES_MAX = 20_000
PATH_CHARACTERS_MAX = 512
DEPTH_MAX = 32
_PIECE = 1 << 20


class Tree(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a package. ``skipped`` counts what is no file: links, devices."""

    files: dict[str, bytes]
    executable: frozenset[str] = frozenset()
    skipped: int = 0

    def text(self, path: str) -> str | None:
        """A file as text; ``None`` where it is not there or no UTF-8."""
        data = self.files.get(path)
        if data is None:
            return None
        try:
            return data.decode()
        except UnicodeDecodeError:
            return None

    def replaced(self, files: dict[str, bytes]) -> Tree:
        """The same tree with other content in some of its files."""
        return msgspec.structs.replace(self, files={**self.files, **files})


def file_sha256(path: Path) -> str:
    """The hash of a file. Blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_sdist(path: Path) -> Tree:
    """The files of a ``.tar.gz``. Raises ``Impossible`` where it can't be read, or is over a bound. Blocks.

    It is decompressed as a whole first, so that no header of a member can name a size that memory has to follow.
    """
    if not path.name.endswith((".tar.gz", ".tgz")):
        raise Impossible(f"{path.name} is no source distribution (.tar.gz)")
    if path.stat().st_size > ARCHIVE_BYTES_MAX:
        raise Impossible(f"{path.name} is over {ARCHIVE_BYTES_MAX >> 20} MiB")
    with tempfile.TemporaryFile() as plain:
        try:
            _decompress(path, plain)
            plain.seek(0)
            return _read_members(path.name, plain)
        except (tarfile.TarError, zlib.error, EOFError, UnicodeError, OverflowError, ValueError) as exc:
            raise Impossible(f"{path.name} can't be read: {exc}") from exc


def _decompress(path: Path, plain: IO[bytes]) -> None:
    unzip = zlib.decompressobj(wbits=31)
    written = 0
    with path.open("rb") as packed:
        while not unzip.eof:
            piece = unzip.unconsumed_tail or packed.read(_PIECE)
            if not piece:
                raise EOFError("it ends too early")
            out = unzip.decompress(piece, _PIECE)
            written += len(out)
            if written > TREE_BYTES_MAX:
                raise Impossible(f"{path.name} unpacks to more than {TREE_BYTES_MAX >> 20} MiB")
            plain.write(out)


def _read_members(name: str, plain: IO[bytes]) -> Tree:
    files: dict[str, bytes] = {}
    executable: set[str] = set()
    skipped = entries = total = 0
    with tarfile.open(fileobj=plain, mode="r:") as archive:
        for member in archive:
            entries += 1
            if entries > FILES_MAX:
                raise Impossible(f"{name} has more than {FILES_MAX} entries")
            inner = _inner_path(name, member.name)
            # A repository within would be read as one; what is no file has no place here.
            if not member.isreg() or inner is None or ".git" in inner.split("/"):
                skipped += not member.isdir()
                continue
            content = archive.extractfile(member)
            assert content is not None
            data = content.read(TREE_BYTES_MAX + 1)
            # A sparse member may claim what the archive does not hold.
            total += len(data)
            if total > TREE_BYTES_MAX:
                raise Impossible(f"{name} unpacks to more than {TREE_BYTES_MAX >> 20} MiB")
            files[inner] = data
            if member.mode & 0o100:
                executable.add(inner)
    _no_file_below_a_file(name, files)
    if not files:
        raise Impossible(f"{name} has no files")
    return Tree(files=files, executable=frozenset(executable & files.keys()), skipped=skipped)


def _inner_path(name: str, member: str) -> str | None:
    """A path below the directory at the top; ``None`` for that directory, and what stands beside it."""
    path = PurePosixPath(member)
    parts = path.parts
    bad = path.is_absolute() or ".." in parts or any(ord(character) < 32 for character in member) or "\\" in member
    if bad or len(parts) > DEPTH_MAX or len(member) > PATH_CHARACTERS_MAX:
        raise Impossible(f"{name} has an entry that is refused: {member[:120]!r}")
    return "/".join(parts[1:]) or None


def _no_file_below_a_file(name: str, files: dict[str, bytes]) -> None:
    for path in files:
        for above in PurePosixPath(path).parents:
            if str(above) in files:
                raise Impossible(f"{name} has {above} as a file and as a directory")


def write_tree(tree: Tree, target: Path) -> None:
    """Write it into a directory that is made here. Blocks."""
    target.mkdir(parents=True)
    made = {target}
    for name, data in tree.files.items():
        path = target / name
        if path.parent not in made:
            path.parent.mkdir(parents=True, exist_ok=True)
            made.add(path.parent)
        path.write_bytes(data)
        path.chmod(0o755 if name in tree.executable else 0o644)
