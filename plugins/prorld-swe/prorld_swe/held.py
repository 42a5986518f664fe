"""A directory that is this process's as long as it lives, and that whoever comes later removes when it was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["HeldDirectory"]

LOCK: Final = ".held"
LEFT_MAX: Final = 64


class HeldDirectory:
    """A fresh directory. Its methods block."""

    def __init__(self, within: Path, prefix: str) -> None:
        _remove_left(within, prefix)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=within))
            self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if (self.path / LOCK).exists():
                break
            # Somebody who tidied up had found it before it was locked.
            os.close(self._lock)

    def remove(self) -> None:
        """Give it up, with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_left(within: Path, prefix: str) -> None:
    """Remove those that nobody holds any more; a directory without a lock may be one that is just being made."""
    for place in sorted(within.glob(f"{prefix}*"))[:LEFT_MAX]:
        with suppress(OSError):
            if place.is_symlink() or place.stat().st_uid != os.getuid():
                continue
            lock = os.open(place / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(place, ignore_errors=True)
            finally:
                os.close(lock)
