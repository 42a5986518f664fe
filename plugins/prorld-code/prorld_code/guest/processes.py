"""One process for one piece of foreign code: forked, walled in, watched until its end or its limit, and then gone.

The parent keeps the ends of its pipes. A process that was walled in can't have children, so its end is the end of all
that it did.
"""

from __future__ import annotations

import os
import select
import signal
import time
from typing import Any, Callable

from prorld_code.guest.walls import Limits, confine, die_with_parent

__all__ = ["REPLY_FD", "REQUEST_FD", "SPARE_FD", "Ended", "Process", "start"]

REPLY_FD = 3
REQUEST_FD = 4
SPARE_FD = 5
NOTE_BYTES = 2048
SETUP_S = 20.0
# Time that a process has waited for a processor is not its own; no more of it is given back than this.
WAITED_S_MAX = 60.0
_PIECE = 1 << 16
_FDS_MAX = 256


class Ended:
    """How a process ended: ``how`` is exit, time or output, and what it said by descriptor."""

    def __init__(self, how: str, said: dict[int, bytes], status: int, cpu_s: float, wall_s: float, rss: int) -> None:
        self.how = how
        self.said = said
        self.status = status
        self.cpu_s = cpu_s
        self.wall_s = wall_s
        self.rss_bytes = rss


class Process:
    """A process that was started, and the reading ends of its pipes with the bytes that each may bring."""

    def __init__(self, pid: int, pipes: dict[int, int], caps: dict[int, int]) -> None:
        self.pid = pid
        self._pipes = pipes  # our end -> its number over there
        self._caps = caps
        self._began = time.monotonic()
        self._waits_for: int | None = None
        self._reaped: tuple[int, Any] | None = None

    def begin(self) -> None:
        """Count its time from now on: putting up the walls is not its own."""
        self._began = time.monotonic()

    def watch(self, wall_s: float, *, waits_for: int | None = None) -> Ended:
        """Read until it has ended; kill it at its limits. What is said on stderr beyond its cap is dropped.

        ``waits_for`` is another process, whose wait for a processor is not this one's time either.
        """
        self._waits_for = waits_for
        said: dict[int, bytearray] = {number: bytearray() for number in self._pipes.values()}
        how = self._read(said, wall_s)
        if how == "exit":
            how = self._wait(wall_s)
        elapsed = time.monotonic() - self._began
        status, usage = self.kill()
        return Ended(
            how,
            {number: bytes(data) for number, data in said.items()},
            status,
            usage.ru_utime + usage.ru_stime,
            elapsed,
            usage.ru_maxrss * 1024,
        )

    def kill(self) -> tuple[int, Any]:
        """End and reap it; its wait status and what it used."""
        if self._reaped is None:
            os.kill(self.pid, signal.SIGKILL)
            _, status, usage = os.wait4(self.pid, 0)
            self._reaped = (status, usage)
            for fd in self._pipes:
                os.close(fd)
        return self._reaped

    def _read(self, said: dict[int, bytearray], wall_s: float) -> str:
        poll = select.poll()
        for fd in self._pipes:
            poll.register(fd, select.POLLIN | select.POLLHUP)
        left = len(self._pipes)
        while left:
            wait_s = self._left_s(wall_s)
            if wait_s <= 0:
                return "time"
            for fd, _ in poll.poll(min(wait_s, 1.0) * 1000):
                piece = os.read(fd, _PIECE)
                if not piece:
                    poll.unregister(fd)
                    left -= 1
                    continue
                number = self._pipes[fd]
                said[number] += piece
                if len(said[number]) > self._caps[number]:
                    if number != 2:
                        return "output"
                    del said[number][: -self._caps[number]]
        return "exit"

    def _wait(self, wall_s: float) -> str:
        """Its pipes are closed, so it is nearly at its end, or only wants to look like it."""
        pause_ms = 1
        while True:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self._reaped = (status, usage)
                for fd in self._pipes:
                    os.close(fd)
                return "exit"
            if self._left_s(wall_s) <= 0:
                return "time"
            select.select([], [], [], pause_ms / 1000)
            pause_ms = min(pause_ms * 2, 20)

    def _left_s(self, wall_s: float) -> float:
        left = self._began + wall_s - time.monotonic()
        if left > 0:
            return left
        other_s = 0.0 if self._waits_for is None else _waited_s(self._waits_for)
        return left + min(WAITED_S_MAX, _waited_s(self.pid) + other_s)


def start(
    body: Callable[[], int],
    *,
    limits: Limits,
    caps: dict[int, int],
    given: dict[int, int],
) -> Process:
    """Fork, wall in, and run ``body``, whose value is the exit code.

    ``caps`` are the descriptors over there that bring something here, ``given`` those that it gets of ours. Raises
    ``OSError`` where it could not be walled in.
    """
    pipes = {number: os.pipe() for number in caps}
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        _be_born(body, limits, {**given, **{number: pipe[1] for number, pipe in pipes.items()}}, tell)
    os.close(tell)
    for _, far in pipes.values():
        os.close(far)
    process = Process(pid, {near: number for number, (near, _) in pipes.items()}, caps)
    try:
        word = _first_word(ready)
    finally:
        os.close(ready)
    if word != b"+":
        process.kill()
        raise OSError("a process could not be walled in: " + word.decode("utf-8", "replace"))
    process.begin()
    return process


def _first_word(ready: int) -> bytes:
    waiting, _, _ = select.select([ready], [], [], SETUP_S)
    return os.read(ready, NOTE_BYTES) if waiting else b"it took too long"


def _be_born(body: Callable[[], int], limits: Limits, fds: dict[int, int], tell: int) -> None:
    code = 97
    try:
        os.setsid()
        die_with_parent()
        tell = _arrange(fds, tell)
        os.chdir("/")
        limits.put_on()
        confine()
        os.write(tell, b"+")
        os.close(tell)
        tell = -1
        code = body()
    except BaseException as exc:
        if tell >= 0:
            os.write(tell, (type(exc).__name__ + ": " + str(exc)).encode("utf-8", "replace")[:NOTE_BYTES])
    finally:
        os._exit(code)


def _arrange(fds: dict[int, int], tell: int) -> int:
    """Put descriptors where they are expected and close all others; where the one that tells is now."""
    top = 64
    moved = {}
    for number, fd in fds.items():
        moved[number] = top
        os.dup2(fd, top)
        top += 1
    os.dup2(tell, top)
    tell = top
    for number, fd in moved.items():
        os.dup2(fd, number)
    open_here = {*fds, tell}
    for fd in range(_FDS_MAX):
        if fd not in open_here:
            try:
                os.close(fd)
            except OSError:
                continue
    return tell


def _waited_s(pid: int) -> float:
    try:
        with open("/proc/" + str(pid) + "/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
