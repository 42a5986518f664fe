"""A file that one command writes, and goes on with when it is given again."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from prorld.cli.exits import UsageError

__all__ = ["own_file"]


@contextmanager
def own_file(name: str) -> Iterator[BinaryIO]:
    """Open or make the file, for this process alone."""
    try:
        descriptor = os.open(Path(name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as exc:
        raise UsageError(f"{name} can't be written: {exc.strerror}") from exc
    with open(descriptor, "r+b") as file:  # noqa: PTH123 - a descriptor
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            raise UsageError(f"{name} is being written by another command") from exc
        yield file
