"""Trees that nobody vouches for, however deep: how much they hold on disk, and their removal. Plain and blocking.

A program can make directories within one another far beyond the longest path that the kernel takes, and beyond the
descriptors and the depth of calls that a walk from the top would need. Nothing here depends on how deep a tree is.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path

__all__ = ["disk_bytes", "remove_tree"]

ANCHORS_MAX = 64
PENDING_MAX = 1 << 18
_PATH_CHARS_MAX = 900  # of four bytes each at most, with a name at the end: shorter than any kernel's limit
_BLOCK_BYTES = 512
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(place: Path) -> None:
    """Remove a directory with all in it, whatever the modes; raises ``OSError`` for what can't be removed, at the end.

    Nobody else may change it meanwhile. Directories are moved up to the top before they are emptied, one by one.
    """
    failure: OSError | None = None
    mark, numbers = secrets.token_hex(8), count()
    top = os.open(place, _DIRECTORY)
    try:
        todo = _without_files(top)
        while todo:
            name = todo.pop()
            try:
                fd = os.open(name, _DIRECTORY, dir_fd=top)
                try:
                    for child in _without_files(fd):
                        moved = f"{mark}{next(numbers)}"
                        with suppress(OSError):  # what stays keeps its directory, which is then told
                            os.rename(child, moved, src_dir_fd=fd, dst_dir_fd=top)
                            todo.append(moved)
                finally:
                    os.close(fd)
                os.rmdir(name, dir_fd=top)
            except OSError as exc:
                failure = failure or exc
    finally:
        os.close(top)
    if failure is not None:
        raise failure
    place.rmdir()


def _without_files(fd: int) -> list[str]:
    """Unlink what is no directory; the names of the others, which are open to their owner from here on."""
    directories: list[str] = []
    with os.scandir(fd) as entries:
        for entry in entries:
            with suppress(OSError):  # as above
                if entry.is_dir(follow_symlinks=False):
                    os.chmod(entry.name, 0o700, dir_fd=fd)  # who moves a directory must be able to write to it, too
                    directories.append(entry.name)
                else:
                    os.unlink(entry.name, dir_fd=fd)
    return directories


def disk_bytes(place: str, *, stop_at: int) -> int:
    """What lies below a directory; stops counting once it is over ``stop_at``.

    A tree that takes more than is set aside for looking through it is said to be over.
    """
    total = 0
    with ExitStack() as stack:
        anchors: list[int] = []
        stack.callback(_close_all, anchors)
        with suppress(OSError):
            anchors.append(os.open(place, _DIRECTORY))
        # How many anchors a directory lies below, its parent's path from the last of them, its name.
        todo: list[tuple[int, str, str]] = [(1, "", ".")] if anchors else []
        while todo and total <= stop_at:
            above, parent, name = todo.pop()
            while len(anchors) > above:
                os.close(anchors.pop())
            path = f"{parent}/{name}" if parent else name
            with suppress(OSError), _opened(path, anchors[-1]) as fd:
                if len(path) > _PATH_CHARS_MAX:
                    anchors.append(os.dup(fd))
                    path = ""
                held, below = _level(fd)
                total += held
                todo += [(len(anchors), path, child) for child in below]
            if len(anchors) > ANCHORS_MAX or len(todo) > PENDING_MAX:
                return stop_at + 1
    return total


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _level(fd: int) -> tuple[int, list[str]]:
    """What the entries of one directory take, and the names of the directories among them."""
    total = 0
    directories: list[str] = []
    with os.scandir(fd) as entries:
        for entry in entries:
            with suppress(OSError):
                total += entry.stat(follow_symlinks=False).st_blocks * _BLOCK_BYTES
                if entry.is_dir(follow_symlinks=False) and len(directories) <= PENDING_MAX:
                    directories.append(entry.name)
    return total, directories


@contextmanager
def _opened(path: str | Path, above: int | None) -> Iterator[int]:
    """A directory, opened; one that is closed to its own owner is open to it for that moment."""
    try:
        fd = os.open(path, _DIRECTORY, dir_fd=above)
    except PermissionError:
        fd = _open_closed(path, above)
    try:
        yield fd
    finally:
        os.close(fd)


def _open_closed(path: str | Path, above: int | None) -> int:
    held = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    try:
        itself = f"/proc/self/fd/{held}"
        mode = stat.S_IMODE(os.fstat(held).st_mode)
        os.chmod(itself, mode | 0o700)  # noqa: PTH101 - by descriptor
        try:
            return os.open(itself, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        finally:
            os.chmod(itself, mode)  # noqa: PTH101
    finally:
        os.close(held)
