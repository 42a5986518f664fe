"""Files and directories that are there whole or not at all, also after the power was cut."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["replace_file", "written_directory", "written_file"]


def replace_file(path: Path, content: bytes) -> None:
    """Put ``content`` in the place of a file, for its owner only. Blocks; one writer at a time. Raises ``OSError``."""
    with written_file(path) as half:
        fd = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(content)


@contextmanager
def written_file(path: Path) -> Iterator[Path]:
    """Yields a place to write to; what is there afterwards takes the place of ``path`` in one move.

    What a killed writer left at that place is gone by then, so a file is for one writer at a time.
    """
    half = path.with_name(f".{path.name}.half")
    half.unlink(missing_ok=True)
    try:
        yield half
        _sync(half)
        half.replace(path)
        _sync(path.parent)
    finally:
        half.unlink(missing_ok=True)


@contextmanager
def written_directory(path: Path) -> Iterator[Path]:
    """Yields an empty directory that becomes ``path`` when all in it is written, in place of what was there.

    Nobody ever sees half of it; for a moment between old and new nobody sees any. What a killed writer left beside it
    is cleared away, so its parent is for one writer at a time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    half, old = path.with_name(f".{path.name}.half"), path.with_name(f".{path.name}.old")
    for left in (*path.parent.glob(".*.half"), *path.parent.glob(".*.old")):
        if left.is_dir():
            shutil.rmtree(left)
    half.mkdir()
    try:
        yield half
        for file in half.rglob("*"):
            _sync(file)
        _sync(half)
        if path.exists():
            path.rename(old)
        half.rename(path)
        _sync(path.parent)
    finally:
        shutil.rmtree(half, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
