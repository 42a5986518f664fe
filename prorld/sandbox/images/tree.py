"""Trees of files that nobody vouches for: made harmless, copied, furnished, measured, digested.

An image may hold anything: links that lead out of it, devices, setuid programs, directories closed to their owner.
Nothing here follows a link out of the tree it was given, opens a device, or trusts a mode. Everything is plain and
blocking; ``tick`` is called often, and what it raises ends the work.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from prorld.errors import SandboxError

__all__ = [
    "Tick",
    "TreeSize",
    "copy_file",
    "copy_tree",
    "digest_file",
    "digest_tree",
    "furnish",
    "make_harmless",
    "measure",
]

# Called with the number of bytes done since the last call.
Tick = Callable[[int], None]

DEPTH_MAX = 200
ENTRIES_MAX = 5_000_000

_CHUNK_BYTES = 1 << 20
_PERMISSIONS = 0o777
_OVERLAY_MARKS = ("user.overlay.", "trusted.overlay.")
# What runtimes mount things on, and the files that they replace; an image without them is none for Apptainer.
_MOUNT_POINTS = ("proc", "sys", "dev", "run", "home", "root", "tmp", "var", "etc", "work", "mnt", "opt")
_ETC_FILES = {
    "passwd": b"root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "group": b"root:x:0:\nnogroup:x:65534:\n",
    "hosts": b"127.0.0.1 localhost\n::1 localhost\n",
    "resolv.conf": b"",
    "localtime": b"",
}


class TreeSize(msgspec.Struct, frozen=True, kw_only=True):
    """What a tree holds."""

    entries: int
    size_bytes: int


def make_harmless(root: Path, owner: tuple[int, int] | None, tick: Tick) -> TreeSize:
    """Take from a tree what could harm its host, and give it to ``owner``, readable.

    Devices, sockets and pipes are removed; setuid, setgid and capabilities with them; directories become passable and
    files readable for their owner. The tree must stand where nobody else can change it.
    """
    entries = size = 0
    _fix_directory(root, owner)
    for _, directories, files, fd in _walk(root):
        _forget_overlays(fd)
        for name in directories:
            _fix(name, fd, owner)
        for name in files:
            size += _fix(name, fd, owner)
        entries += len(directories) + len(files)
        if entries > ENTRIES_MAX:
            raise _broken(f"more than {ENTRIES_MAX} files in one image")
        tick(0)
    return TreeSize(entries=entries, size_bytes=size)


def measure(root: Path, tick: Tick) -> TreeSize:
    """How much a tree holds."""
    entries = size = 0
    for _, directories, files, fd in _walk(root):
        entries += len(directories) + len(files)
        for name in files:
            size += os.stat(name, dir_fd=fd, follow_symlinks=False).st_size
        tick(0)
    return TreeSize(entries=entries, size_bytes=size)


def copy_tree(source: Path, target: Path, tick: Tick) -> list[str]:
    """Copy a tree without devices and the like; hard links stay together. The paths that could not be read come back.

    ``target`` must not exist; who owns what, and which modes are left, is for ``make_harmless``.
    """
    unread: list[str] = []
    twins: dict[tuple[int, int], Path] = {}
    target.mkdir(mode=0o700)
    for here, directories, files, fd in _walk(source, unread):
        into = target / here.relative_to(source)
        for name in directories:
            found = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISLNK(found.st_mode):
                (into / name).symlink_to(os.readlink(name, dir_fd=fd))
            else:
                (into / name).mkdir(mode=0o700)
                (into / name).chmod(stat.S_IMODE(found.st_mode) & _PERMISSIONS | 0o700)
        unread += [str(here / name) for name in files if not _copy_file(name, fd, into / name, twins, tick)]
    return unread


def copy_file(source: Path, target: Path, tick: Tick) -> str:
    """Copy one file, and say its SHA-256; it is on the disk when this returns."""
    digest = hashlib.sha256()
    with _open_regular(source) as file, target.open("xb") as copy:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            copy.write(chunk)
            tick(len(chunk))
        copy.flush()
        os.fsync(copy.fileno())
    shutil.copymode(source, target)
    return digest.hexdigest()


def _open_regular(path: Path) -> BinaryIO:
    """Open a file that somebody named. A pipe would keep a thread for ever, and a device has no end."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return file


def digest_file(path: Path, tick: Tick) -> str:
    """The SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with _open_regular(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            tick(len(chunk))
    return digest.hexdigest()


def digest_tree(root: Path, tick: Tick) -> str:
    """The SHA-256 of a tree: names, kinds, permissions, link targets and contents; neither owners nor times."""
    digest = hashlib.sha256()
    for here, directories, files, fd in _walk(root):
        digest.update(b"D" + os.fsencode(here.relative_to(root)) + b"\0")
        for name in sorted(directories + files):
            found = os.stat(name, dir_fd=fd, follow_symlinks=False)
            mode = stat.S_IMODE(found.st_mode) & _PERMISSIONS
            if stat.S_ISLNK(found.st_mode):
                said = b"L" + os.fsencode(os.readlink(name, dir_fd=fd))
            elif stat.S_ISREG(found.st_mode):
                said = b"F%o %d " % (mode, found.st_size) + _digest_of(name, fd, tick)
            else:
                said = b"%o" % stat.S_IFMT(found.st_mode) + b" %o" % mode
            digest.update(os.fsencode(name) + b"\0" + said + b"\0")
    return digest.hexdigest()


def furnish(root: Path, owner: tuple[int, int] | None) -> None:
    """Make the mount points and the files of /etc that runtimes count on, where a harmless tree lacks them."""
    with _opened(root) as fd:
        for name in _MOUNT_POINTS:
            _make_directory(name, fd, owner)
        for name in ("tmp", "var"):
            with _opened_below(name, fd) as inner:
                if inner is not None and name == "var":
                    _make_directory("tmp", inner, owner)
                    with _opened_below("tmp", inner) as temporary:
                        _let_all_write(temporary)
                elif inner is not None:
                    _let_all_write(inner)
        with _opened_below("etc", fd) as etc:
            for name, content in _ETC_FILES.items() if etc is not None else ():
                _make_file(name, etc, content, owner)


def _let_all_write(fd: int | None) -> None:
    if fd is not None:
        os.fchmod(fd, 0o1777)


def _make_directory(name: str, fd: int, owner: tuple[int, int] | None) -> None:
    try:
        os.mkdir(name, 0o755, dir_fd=fd)
    except FileExistsError:
        return
    if owner is not None:
        os.chown(name, *owner, dir_fd=fd, follow_symlinks=False)
    _open_up(name, fd, 0o755)


def _make_file(name: str, fd: int | None, content: bytes, owner: tuple[int, int] | None) -> None:
    try:
        made = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=fd)
    except FileExistsError:
        return
    with os.fdopen(made, "wb") as file:
        file.write(content)
        os.fchmod(file.fileno(), 0o644)
        if owner is not None:
            os.fchown(file.fileno(), *owner)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _opened_below(name: str, fd: int) -> Iterator[int | None]:
    """A real directory of this name; ``None`` where a link or a file has it."""
    try:
        inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    except (FileNotFoundError, NotADirectoryError):
        yield None
        return
    except OSError as exc:
        if exc.errno != errno.ELOOP:
            raise
        yield None
        return
    try:
        yield inner
    finally:
        os.close(inner)


def _walk(root: Path, unread: list[str] | None = None) -> Iterator[tuple[Path, list[str], list[str], int]]:
    """Every directory of a tree with a descriptor of it, in a fixed order; links to directories are entries."""

    def refuse(exc: OSError) -> None:
        if unread is None:
            raise exc
        unread.append(str(exc.filename))

    depth = len(root.parts)
    for path, directories, files, fd in os.fwalk(root, onerror=refuse, follow_symlinks=False):
        here = Path(path)
        if len(here.parts) - depth > DEPTH_MAX:
            raise _broken(f"directories more than {DEPTH_MAX} deep")
        directories.sort()
        files.sort()
        yield here, directories, files, fd


def _fix(name: str, fd: int, owner: tuple[int, int] | None) -> int:
    """Make one entry harmless; its size."""
    found = os.stat(name, dir_fd=fd, follow_symlinks=False)
    kind = stat.S_IFMT(found.st_mode)
    if kind not in {stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK}:
        os.unlink(name, dir_fd=fd)
        return 0
    if owner is not None and (found.st_uid, found.st_gid) != owner:
        # This takes capabilities of files with it.
        os.chown(name, *owner, dir_fd=fd, follow_symlinks=False)
    if kind == stat.S_IFLNK:
        return 0
    wanted = _harmless(found.st_mode)
    if owner is not None or wanted != stat.S_IMODE(found.st_mode):
        _open_up(name, fd, wanted)
    return found.st_size if kind == stat.S_IFREG else 0


def _fix_directory(path: Path, owner: tuple[int, int] | None) -> None:
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise _broken("the root of the image is no directory")
    if owner is not None:
        os.chown(path, *owner, follow_symlinks=False)
    path.chmod(0o755)


def _forget_overlays(fd: int) -> None:
    """Marks that would make an overlay hide or redirect what lies below a directory."""
    for name in os.listxattr(fd):
        if name.startswith(_OVERLAY_MARKS):
            os.removexattr(fd, name)


def _harmless(mode: int) -> int:
    """Permissions with which an owner can read it and nobody else becomes the owner."""
    if stat.S_ISDIR(mode):
        return stat.S_IMODE(mode) & (_PERMISSIONS | stat.S_ISVTX) | 0o700
    return stat.S_IMODE(mode) & _PERMISSIONS | 0o400


def _open_up(name: str, fd: int, mode: int) -> None:
    # Links were told apart before, and nobody else can put one here meanwhile.
    os.chmod(name, mode, dir_fd=fd)


def _copy_file(name: str, fd: int, target: Path, twins: dict[tuple[int, int], Path], tick: Tick) -> bool:
    """Copy what is no directory; whether it could be read. Devices and the like are passed over."""
    found = os.stat(name, dir_fd=fd, follow_symlinks=False)
    if stat.S_ISLNK(found.st_mode):
        target.symlink_to(os.readlink(name, dir_fd=fd))
        return True
    if not stat.S_ISREG(found.st_mode):
        return True
    twin = twins.get((found.st_dev, found.st_ino))
    if twin is not None:
        target.hardlink_to(twin)
        return True
    try:
        opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
    except PermissionError:
        return False
    with os.fdopen(opened, "rb") as source, target.open("xb") as copy:
        while chunk := source.read(_CHUNK_BYTES):
            copy.write(chunk)
            tick(len(chunk))
        os.fchmod(copy.fileno(), stat.S_IMODE(found.st_mode) & _PERMISSIONS)
    os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))
    if found.st_nlink > 1:
        twins[found.st_dev, found.st_ino] = target
    return True


def _digest_of(name: str, fd: int, tick: Tick) -> bytes:
    digest = hashlib.sha256()
    opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
    with os.fdopen(opened, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            tick(len(chunk))
    return digest.digest()


def _broken(words: str) -> SandboxError:
    return SandboxError(f"this is no usable image: {words}", code="image_broken", retryable=False)
