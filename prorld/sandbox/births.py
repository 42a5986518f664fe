"""How a child of the warden comes to be: a fork on a new pty, and a report of when it has become its program.

From the moment that a child is in a sandbox's pid namespace until it has executed, the programs of that sandbox can
stop it, and nothing can forbid that. So nobody ever waits for a child: it reports over a pipe that closes when it
executes, and a birth that does not come to its end by its deadline is ended by whoever looks after it.

Runs in the warden alone: standard library and ptyprocess.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
import re
import resource
import signal
import socket
import termios
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NoReturn

from ptyprocess import PtyProcess

from prorld.sandbox.syscalls import LIMITS, Libc, be_the_first_to_go, lower_limits, restore_signals

__all__ = [
    "BIRTH_SECONDS",
    "CONTROL_FD",
    "DATA_FD",
    "BadRequestError",
    "Birth",
    "Contents",
    "Wish",
    "begin_inside",
    "begin_outside",
    "decode_wish",
    "keep_numbers_free",
]

CONTROL_FD = 9  # the child's end of its control socket
DATA_FD = 10  # the first of the descriptors that hold ``data``
MAX_DATA = 16
# Contents that are remembered: those of all sandboxes are few. More than one child can have.
CONTENTS_MAX = 64
BIRTH_SECONDS = 2.0
_SO_PASSRIGHTS = 83
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_REPORT_BYTES_MAX = 1 << 12

_BORN = re.compile(rb"^pid (\d+)\n", re.MULTILINE)
_FAILED = re.compile(rb"^why (.*)\n", re.MULTILINE)


class BadRequestError(Exception):
    """A message that the warden does not understand."""


@dataclass(kw_only=True)
class Furniture:
    """What is put into a sandbox from within, with privileges that nothing in it ever has."""

    tmpfs: list[tuple[str, str]] = field(default_factory=list)  # where, and the mount options
    directories: list[str] = field(default_factory=list)
    read_only: list[str] = field(default_factory=list)
    seal: bool = False  # no more namespaces of users in there


@dataclass(kw_only=True)
class Wish:
    """A decoded request for a child."""

    id: int
    argv: list[str]
    env: dict[str, str]
    cwd: str = "/"
    data: list[bytes] = field(default_factory=list)
    helpers: bool = False
    marker: str = ""
    enter: int | None = None
    share_network: bool = False
    furnish: Furniture = field(default_factory=Furniture)
    limits: dict[str, int] = field(default_factory=dict)
    filter: bytes = b""
    apart: bool = False
    cgroup: str = ""


class Birth:
    """A child on its way to its program. It owns its descriptors until ``close``."""

    def __init__(self, wish: Wish, *, pid: int, report: int, master: int, control: int) -> None:
        self.wish = wish
        self.report = report
        self.master = master
        self.control = control
        self.pid = -1
        self.why = ""
        self.deadline = time.monotonic() + BIRTH_SECONDS
        self._said = b""
        self._held: list[int] = []
        self._hold(pid)
        if wish.enter is None:
            self.pid = pid

    def hear(self) -> bool:
        """Take what has been reported, without waiting; true when no more will come."""
        try:
            piece = os.read(self.report, _REPORT_BYTES_MAX)
        except BlockingIOError:
            return False
        self._said = (self._said + piece)[:_REPORT_BYTES_MAX]
        born = _BORN.search(self._said)
        if self.pid < 0 and born is not None:
            self.pid = int(born[1])
            self._hold(self.pid)
        failed = _FAILED.search(self._said)
        if failed is not None:
            self.why = failed[1].decode("utf-8", "replace")
        elif not piece and self.pid < 0:
            self.why = "it ended before it had begun"
        return not piece

    def kill(self) -> None:
        """End what there is of it, stopped or not."""
        for held in self._held:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(held, signal.SIGKILL)

    def close(self) -> None:
        """Close what it still owns."""
        for descriptor in (self.report, self.master, self.control, *self._held):
            os.close(descriptor)

    def _hold(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._held.append(os.pidfd_open(pid))


class Contents:
    """What children find on descriptors: each content once, in memory that can't be written to any more."""

    def __init__(self) -> None:
        self._held: dict[bytes, int] = {}

    def hold(self, content: bytes) -> int:
        """A descriptor of the content, for a child to open once more: a place in it would be everybody's."""
        held = self._held.pop(content, None)
        if held is None:
            held = _memory_file(content)
            if len(self._held) >= CONTENTS_MAX:
                os.close(self._held.pop(next(iter(self._held))))
        self._held[content] = held
        return held


def begin_outside(wish: Wish, libc: Libc, contents: Contents) -> Birth:
    """Begin a child beside the warden, under its limits and its filter where it has any.

    ``data`` are contents that it finds on descriptors.
    """
    held = [contents.hold(content) for content in wish.data]

    def become(_: int) -> NoReturn:
        for number, descriptor in enumerate(held, DATA_FD):
            _open_again(descriptor, number)
        be_the_first_to_go()
        _join(wish.cgroup)
        restore_signals()
        os.chdir(wish.cwd)
        if wish.limits:
            lower_limits(wish.limits)
        if wish.filter:
            libc.give_up_privileges(wish.filter)
        _execute(wish)

    return _begin(wish, become, held)


def begin_inside(wish: Wish, first: int, libc: Libc) -> Birth:
    """Begin a child in the namespaces of the process that the pidfd ``first`` stands for.

    All that can be done from outside of its pid namespace is done there, where nothing of the sandbox can reach.
    """

    def become(report: int) -> NoReturn:
        be_the_first_to_go()
        _join(wish.cgroup)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # giving the tty up hangs up on its foreground group: on us
        libc.join_namespaces(first, network=not wish.share_network)
        fcntl.ioctl(0, termios.TIOCNOTTY)
        _furnish(wish.furnish, libc)
        libc.give_up_privileges(wish.filter, apart=wish.apart)
        restore_signals()
        os.chdir(wish.cwd)
        pid = os.fork()
        if pid:
            os.write(report, b"pid %d\n" % pid)
            os._exit(0)
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        lower_limits(wish.limits)
        os.close(first)
        _execute(wish)

    return _begin(wish, become, [first])


def _join(cgroup: str) -> None:
    """Before anything that could start another process: what a member starts is one from its beginning."""
    if cgroup:
        Path(cgroup, "cgroup.procs").write_text("0")


def _furnish(furniture: Furniture, libc: Libc) -> None:
    """Everything here happens before the first program of the sandbox's user; what lies there is the image's."""
    if furniture.seal:
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
    for where, options in furniture.tmpfs:
        Path(where).mkdir(mode=0o755, parents=True, exist_ok=True)
        libc.mount_tmpfs(where, options)
    for where in furniture.directories:
        Path(where).mkdir(mode=0o755, parents=True, exist_ok=True)
    for where in furniture.read_only:
        libc.remount_read_only(where)


def _begin(wish: Wish, become: Callable[[int], NoReturn], keep: list[int]) -> Birth:
    with contextlib.ExitStack() as stack:
        near, far = socket.socketpair()
        stack.enter_context(near)
        # The kernel then says which process the first bytes come from: that is how a sandbox's first process is known.
        near.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        with contextlib.suppress(OSError):  # kernels of 6.16 and later; there no descriptor of a sandbox gets out
            near.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
        _put(far.detach(), CONTROL_FD, stack)
        report, tell = os.pipe()
        stack.callback(os.close, tell)
        with contextlib.ExitStack() as failing:
            failing.callback(os.close, report)
            os.set_blocking(report, False)
            pid, master = _pty_spawn(lambda: _be_born(become, tell, [CONTROL_FD, *keep]), [CONTROL_FD, *keep, tell])
            failing.pop_all()
        return Birth(wish, pid=pid, report=report, master=master, control=near.detach())


def _be_born(become: Callable[[int], NoReturn], tell: int, keep: list[int]) -> NoReturn:
    """What a forked child does; it never returns into the copy of the warden that it is.

    ptyprocess waits until a pipe of its own is closed. That happens here and not when the child executes: until it
    joins a sandbox nobody can stop it, so that wait is short.
    """
    try:
        _close_all_but([*keep, tell])
        become(tell)
    except BaseException as exc:  # noqa: ASYNC103, BLE001 - it is told, and this process ends
        why = " ".join(f"{type(exc).__name__}: {exc}".split())[:500]
        os.write(tell, f"why {why}\n".encode("utf-8", "replace"))
    finally:
        os._exit(1)


def _pty_spawn(run: Callable[[], NoReturn], keep: list[int]) -> tuple[int, int]:
    process = PtyProcess.spawn(["/proc/self/exe"], cwd="/", env={}, echo=False, preexec_fn=run, pass_fds=keep)
    process.closed = True  # its own ``close`` sleeps and kills
    with contextlib.closing(process.fileobj):
        try:
            attributes = termios.tcgetattr(process.fd)
            attributes[1] &= ~termios.OPOST
            termios.tcsetattr(process.fd, termios.TCSANOW, attributes)
            return process.pid, os.dup(process.fd)
        except BaseException:
            os.kill(process.pid, signal.SIGKILL)
            raise


def _execute(wish: Wish) -> NoReturn:
    os.execve(wish.argv[0], wish.argv, wish.env)  # noqa: S606 - no shell is what is wanted


def _close_all_but(keep: Iterable[int]) -> None:
    after = 3
    for number in sorted(keep):
        os.closerange(after, number)
        after = number + 1
    os.closerange(after, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def decode_wish(message: dict[str, Any]) -> Wish:
    """The request, checked field by field; the daemon is trusted, but a fault in it must show as one."""
    try:
        wish = Wish(
            id=int(message["id"]),
            argv=[str(word) for word in message["argv"]],
            env={str(name): str(value) for name, value in message["env"].items()},
            cwd=str(message["cwd"]),
            data=[_decode(text) for text in message["data"]],
            helpers=bool(message["helpers"]),
            marker=str(message["marker"]),
            enter=None if message["enter"] is None else int(message["enter"]),
            share_network=bool(message["share_network"]),
            furnish=_decode_furniture(message["furnish"]),
            limits={str(name): int(value) for name, value in message["limits"].items()},
            filter=_decode(message["filter"]),
            apart=bool(message["apart"]),
            cgroup=str(message["cgroup"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise BadRequestError(f"malformed request: {exc!r}") from exc
    if not wish.argv or len(wish.data) > MAX_DATA or not wish.limits.keys() <= LIMITS.keys():
        raise BadRequestError("request out of bounds")
    return wish


@lru_cache(CONTENTS_MAX)
def _decode(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _decode_furniture(message: dict[str, Any]) -> Furniture:
    return Furniture(
        tmpfs=[(str(where), str(options)) for where, options in message.get("tmpfs", [])],
        directories=[str(where) for where in message.get("directories", [])],
        read_only=[str(where) for where in message.get("read_only", [])],
        seal=bool(message.get("seal", False)),
    )


def keep_numbers_free() -> None:
    """Keep the warden's own descriptors off the numbers that children expect."""
    for number in range(CONTROL_FD, DATA_FD + MAX_DATA):
        _reserve(number)


def _put(descriptor: int, number: int, stack: contextlib.ExitStack) -> None:
    """Move a descriptor to the number where a child expects it, until ``stack`` is left."""
    try:
        os.dup2(descriptor, number, inheritable=True)
    finally:
        os.close(descriptor)
    stack.callback(_reserve, number)


def _memory_file(content: bytes) -> int:
    held = os.memfd_create("data", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(held, content)
        fcntl.fcntl(held, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(held)
        raise
    return held


def _open_again(descriptor: int, number: int) -> None:
    """Open what a descriptor stands for once more, from its start, for reading, as ``number``."""
    opened = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
    if opened == number:
        os.set_inheritable(number, True)
    else:
        os.dup2(opened, number, inheritable=True)
        os.close(opened)


def _reserve(number: int) -> None:
    """Put /dev/null on ``number``, so that nothing else ever lands there."""
    os.dup2(_null(), number, inheritable=False)


@cache
def _null() -> int:
    null = os.open(os.devnull, os.O_RDWR)
    try:
        return fcntl.fcntl(null, fcntl.F_DUPFD_CLOEXEC, DATA_FD + MAX_DATA)
    finally:
        os.close(null)
