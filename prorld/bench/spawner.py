"""``python -m prorld.bench.spawner UID GID [PATH...]``: starts programs with nothing of the daemon in between.

What sandboxes are measured against: the same command line with the same descriptors, spawned by a small process that
does nothing else and waits for the first byte, or for the end. A line of JSON in, a line of JSON out, one at a time.
Like the warden it is single-threaded and drops to an ordinary user first; it uses a pty for nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from prorld.sandbox.births import CONTROL_FD, DATA_FD, MAX_DATA
from prorld.sandbox.syscalls import Libc, drop_to, expose

__all__ = ["Order", "Outcome"]

WAIT_SECONDS = 30.0
_SAID_BYTES_MAX = 1 << 12


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A program to start. It finds a socket and ``data`` on the numbers that the warden has for them, and on those in
    between a pipe that nobody reads.

    ``until`` says what its start is: the first byte on its socket, after which the socket is closed to end it; or its
    own end.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    until: Literal["byte", "end"]
    cwd: str = "/"
    data: Sequence[bytes] = ()


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How long it took. ``why`` is empty where all went well; ``cpu_ms`` is of the program and what it waited for."""

    start_ms: float = 0.0
    end_ms: float = 0.0
    cpu_ms: float = 0.0
    output: bytes = b""
    why: str = ""


def carry_out(order: Order) -> Outcome:
    """Start it, time it, end it."""
    cpu_before = _cpu_s()
    with contextlib.ExitStack() as stack:
        near, far = socket.socketpair()
        stack.callback(near.close)
        output, far_output = os.pipe()
        stack.callback(os.close, output)
        _put(far.detach(), CONTROL_FD)
        for number in range(CONTROL_FD + 1, DATA_FD):
            unread, far_unread = os.pipe()
            stack.callback(os.close, unread)
            _put(far_unread, number)
        for number, content in enumerate(order.data, DATA_FD):
            _put(_memory_file(content), number)
        numbers = range(CONTROL_FD, DATA_FD + len(order.data))
        began = time.perf_counter()
        try:
            process = subprocess.Popen(  # noqa: S603 - what the bench was told to start
                list(order.argv),
                env=dict(order.env),
                cwd=order.cwd,
                stdin=subprocess.DEVNULL,
                stdout=far_output,
                stderr=far_output,
                pass_fds=list(numbers),
                start_new_session=True,
            )
        finally:
            os.close(far_output)
            for number in numbers:
                _reserve(number)
        stack.callback(_bury, process)
        if order.until == "end":
            said = _all_of(output)
            code = process.wait(WAIT_SECONDS)
            start, end = time.perf_counter() - began, 0.0
            why = "" if code == 0 else f"ended with {code}: {said.decode('utf-8', 'replace')[-300:]}"
        else:
            why = "" if _comes(near) and near.recv(1) else f"said nothing: {_some_of(output)}"
            start = time.perf_counter() - began
            ending = time.perf_counter()
            near.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(WAIT_SECONDS)
            said, end = b"", time.perf_counter() - ending
    return Outcome(start_ms=start * 1e3, end_ms=end * 1e3, cpu_ms=(_cpu_s() - cpu_before) * 1e3, output=said, why=why)


def _comes(near: socket.socket) -> bool:
    return bool(select.select([near], [], [], WAIT_SECONDS)[0])


def _all_of(output: int) -> bytes:
    said = b""
    while select.select([output], [], [], WAIT_SECONDS)[0] and (piece := os.read(output, _SAID_BYTES_MAX)):
        said = (said + piece)[-_SAID_BYTES_MAX:]
    return said


def _some_of(output: int) -> str:
    ready = select.select([output], [], [], 1.0)[0]
    return os.read(output, _SAID_BYTES_MAX).decode("utf-8", "replace").strip() if ready else ""


def _bury(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(WAIT_SECONDS)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _memory_file(content: bytes) -> int:
    held = os.memfd_create("data")
    os.write(held, content)
    os.lseek(held, 0, os.SEEK_SET)
    return held


def _put(descriptor: int, number: int) -> None:
    os.dup2(descriptor, number, inheritable=True)
    os.close(descriptor)


def _reserve(number: int) -> None:
    """Put /dev/null on ``number``: nothing of this process may ever land where a program expects something."""
    null = os.open(os.devnull, os.O_RDWR)
    if null != number:
        os.dup2(null, number, inheritable=False)
        os.close(null)


def serve(lines: Iterable[bytes], answer: Callable[[bytes], object]) -> None:
    """Carry out one order after the other, until there are no more."""
    for line in lines:
        try:
            outcome = carry_out(msgspec.json.decode(line, type=Order))
        except (OSError, subprocess.SubprocessError) as exc:
            outcome = Outcome(why=f"{type(exc).__name__}: {exc}")
        answer(msgspec.json.encode(outcome) + b"\n")


def main(arguments: Sequence[str]) -> None:
    """Become the user that sandboxes have, and serve standard input."""
    uid, gid = int(arguments[0]), int(arguments[1])
    for number in range(CONTROL_FD, DATA_FD + MAX_DATA):
        _reserve(number)
    if os.getuid() == 0 and uid > 0:
        try:
            expose(Libc(), list(arguments[2:]), uid, gid)
        except OSError as exc:
            if exc.errno != errno.EPERM:
                raise
        drop_to(uid, gid)

    def answer(line: bytes) -> None:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()

    serve(sys.stdin.buffer, answer)


if __name__ == "__main__":
    main(sys.argv[1:])
