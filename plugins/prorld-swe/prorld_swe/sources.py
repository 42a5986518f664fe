"""Source distributions, unpacked on the host: read as archives, within bounds, and nothing of them is ever run.

Links are left out, and so is everything else that is neither a file nor a directory.
"""

from __future__ import annotations

import hashlib
import shutil
import tarfile
import tempfile
import zipfile
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from prorld.handlers import GraderError, Impossible, cached_package
from prorld_swe.held import HeldDirectory
from prorld_swe.paths import is_configuration, is_test
from prorld_swe.task import Sdist

__all__ = ["Tree", "Trees", "require_package", "unpack"]

ENTRIES_MAX: Final = 20_000
BYTES_MAX: Final = 512 << 20
PINNED_MAX: Final = 5_000


class Tree(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution as a directory of this host, and the hashes of what decides and judges in it."""

    place: Path
    pinned: dict[str, str]


def require_package(sdist: Sdist) -> Path:
    """The archive in the cache of packages; ``Impossible`` says how to get it. Reads all of it."""
    path = cached_package(sdist.sha256)
    if path is None:
        raise Impossible(
            f"{sdist.filename} (sha256 {sdist.sha256[:12]}) is not in the cache of packages: "
            f"prorld swe fetch {sdist.package}=={sdist.version}",
            code="no_package",
            details={"path": "instance.sdist"},
        )
    return path


def unpack(archive: Path, target: Path) -> None:
    """The archive's one directory as ``target``. ``GraderError`` where it is not one, or is out of bounds."""
    with tempfile.TemporaryDirectory(dir=target.parent) as place:
        try:
            if archive.name.endswith(".zip"):
                _unpack_zip(archive, Path(place))
            else:
                _unpack_tar(archive, Path(place))
        except (tarfile.TarError, zipfile.BadZipFile, OSError, EOFError, ValueError) as exc:
            raise GraderError(f"{archive.name} can't be unpacked: {exc}", code="bad_package") from exc
        tops = list(Path(place).iterdir())
        if len(tops) != 1 or not tops[0].is_dir():
            raise GraderError(f"{archive.name} holds not one directory but {len(tops)} entries", code="bad_package")
        tops[0].replace(target)


def _unpack_tar(archive: Path, place: Path) -> None:
    with tarfile.open(archive) as tar:
        size = entries = 0
        for member in tar:
            entries, size = entries + 1, size + max(member.size, 0)
            _bounds(entries, size)
            target = _inside(place, member.name)
            if member.isdir():
                target.mkdir(parents=True, exist_ok=True)
            elif member.isfile() and (source := tar.extractfile(member)) is not None:
                # Written here and not by tarfile, whose filters Python 3.11 has from its fourth patch on only.
                target.parent.mkdir(parents=True, exist_ok=True)
                with source, target.open("wb") as file:
                    shutil.copyfileobj(source, file)
                target.chmod(0o755 if member.mode & 0o100 else 0o644)


def _unpack_zip(archive: Path, place: Path) -> None:
    with zipfile.ZipFile(archive) as zipped:
        _bounds(len(zipped.infolist()), sum(info.file_size for info in zipped.infolist()))
        for info in zipped.infolist():
            target = _inside(place, info.filename)
            if info.is_dir():
                target.mkdir(parents=True, exist_ok=True)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            with zipped.open(info) as source, target.open("wb") as file:
                shutil.copyfileobj(source, file)


def _inside(place: Path, name: str) -> Path:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{name} leads out of the archive")
    return place / path


def _bounds(entries: int, size: int) -> None:
    if entries > ENTRIES_MAX or size > BYTES_MAX:
        raise ValueError(f"more than {ENTRIES_MAX} entries or {BYTES_MAX >> 20} MiB")


class Trees:
    """Unpacked distributions of a daemon, each once, below one directory. Its methods block.

    The directory is made when it is needed, and held by a lock that ends with the process: the next one removes what a
    killed one has left.
    """

    KEPT: Final = 64

    def __init__(self, within: Path | None = None) -> None:
        """``within`` is where the directory is made; by default that of temporary files."""
        self._within = Path(tempfile.gettempdir()) if within is None else within
        self._held: HeldDirectory | None = None
        self._trees: dict[str, Tree] = {}

    def close(self) -> None:
        """Remove all of it."""
        self._trees.clear()
        if self._held is not None:
            self._held.remove()
            self._held = None

    def get(self, sdist: Sdist) -> Tree:
        """The distribution as a directory; it is unpacked where it is not there yet."""
        tree = self._trees.get(sdist.sha256)
        if tree is None:
            if self._held is None:
                self._held = HeldDirectory(self._within, "prorld-swe-")
            target = self._held.path / sdist.sha256
            if target.exists():
                shutil.rmtree(target)
            unpack(require_package(sdist), target)
            tree = Tree(place=target, pinned=_pinned(target))
            while len(self._trees) >= self.KEPT:
                gone = self._trees.pop(next(iter(self._trees)))
                shutil.rmtree(gone.place, ignore_errors=True)
            self._trees[sdist.sha256] = tree
        return tree


def _pinned(place: Path) -> dict[str, str]:
    """The hashes of tests and of what configures them."""
    found: dict[str, str] = {}
    for path in sorted(place.rglob("*")):
        name = path.relative_to(place).as_posix()
        if path.is_file() and not path.is_symlink() and (is_test(name) or is_configuration(name)):
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
            if len(found) >= PINNED_MAX:
                break
    return found
