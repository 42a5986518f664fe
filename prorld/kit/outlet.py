"""A stream for lines that never keeps its writers waiting: a thread of its own hands them to a file descriptor.

Whoever reads a log may stop reading without going away. A write into their pipe then waits for as long as they like,
and on the event loop that would stop everything else. Lines wait here instead, up to a bound; what comes beyond it is
lost, and a line in its place says how much that was.
"""

from __future__ import annotations

import io
import os
import select
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Final

import msgspec

__all__ = ["Outlet", "outlet"]

# Some ten thousand lines: minutes of a busy daemon, and nothing beside what its jobs take.
BYTES_MAX: Final = 8 << 20
# What one write takes: as much as a pipe usually holds.
BYTES_PER_WRITE: Final = 64 << 10
# For the last lines, at the end of the process. A reader that stalls does not keep it longer.
CLOSE_S: Final = 2.0


class Outlet(io.TextIOBase):
    """What is written is written later, in its order. ``close`` gives the last of it a moment."""

    def __init__(self, fd: int, *, bytes_max: int = BYTES_MAX) -> None:
        """``fd`` stays open."""
        self._fd = fd
        self._bytes_max = bytes_max
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._lost = 0
        self._is_closing = False
        self._changed = threading.Condition()
        # A daemon: what waits in a write to a stalled reader can't be ended, and must not keep the process.
        self._thread = threading.Thread(target=self._hand_over, name="log", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Lines that were lost and of which nothing was said yet."""
        return self._lost

    def fileno(self) -> int:
        """Where it goes."""
        return self._fd

    def isatty(self) -> bool:
        """Whether that is a terminal."""
        return os.isatty(self._fd)

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, text: str, /) -> int:
        """Take a line, or count it as lost where there is no room. Never waits for whoever reads."""
        line = text.encode("utf-8", "backslashreplace")
        with self._changed:
            if self._is_closing or self._bytes + len(line) > self._bytes_max:
                self._lost += 1
            else:
                self._say_lost()
                self._keep(line)
        return len(text)

    def flush(self) -> None:
        """Nothing to do: each line is on its way."""

    def close(self, within_s: float = CLOSE_S) -> None:
        """Hand over what there is, within so many seconds; later lines are lost."""
        with self._changed:
            if not self._is_closing:
                self._say_lost()
            self._is_closing = True
            self._changed.notify()
        self._thread.join(within_s)

    # --- under the lock -----------------------------------------------------------------------------------------------

    def _keep(self, line: bytes) -> None:
        self._lines.append(line)
        self._bytes += len(line)
        self._changed.notify()

    def _say_lost(self) -> None:
        if self._lost:
            at = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"
            words = {"event": "log.lost", "at": at, "level": "error", "lines": self._lost}
            self._keep(msgspec.json.encode(words) + b"\n")
            self._lost = 0

    def _next(self) -> list[bytes]:
        taken: list[bytes] = []
        size = 0
        while self._lines and (not taken or size + len(self._lines[0]) <= BYTES_PER_WRITE):
            taken.append(self._lines.popleft())
            size += len(taken[-1])
        return taken

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        while True:
            with self._changed:
                while not (self._lines or self._is_closing):
                    self._changed.wait()
                lines = self._next()
            if not lines:
                return
            is_there = self._write(b"".join(lines))
            with self._changed:
                # They take room until they are out.
                self._bytes -= sum(map(len, lines))
                if not is_there:
                    self._lost += len(lines)

    def _write(self, data: bytes) -> bool:
        """Whether it is out. A reader that is gone, or a disk that is full, costs lines and nothing else."""
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:
                # Somebody who shares the descriptor made it so.
                select.select([], [self._fd], [])
            except OSError:
                return False
        return True


@contextmanager
def outlet(fd: int) -> Iterator[Outlet]:
    """An outlet for the length of the block."""
    made = Outlet(fd)
    try:
        yield made
    finally:
        made.close()
