"""The warden: one small single-threaded process that owns every sandbox process of a daemon.

It spawns with ptyprocess (a fork is cheap and safe here), hands the pty master and the control socket of each child
back with SCM_RIGHTS, reaps as a subreaper, kills, and ends everything when its own socket reaches end of file, that is,
when the daemon is gone for whatever reason. Started by root it drops to an ordinary user before it spawns anything.

It knows nothing of images, shells or jobs, and it imports nothing but the standard library and ptyprocess: what it
imports is what each of its forks carries.

Protocol, JSON over one SEQPACKET socketpair, one message a packet, bounded by ``MAX_MESSAGE``:

* ``{"op": "spawn", "id", "argv", "env", "cwd", "data", "enter", "limits", "filter"}``, answered by ``{"op": "spawned",
  "id", "pid"}`` with two descriptors, or by ``{"op": "refused", "id", "why"}``. With ``enter`` the child starts inside
  the namespaces of the first process of that earlier child; ``data`` are contents that it finds on descriptors.
* ``{"op": "kill", "id"}``: everything of that child goes; nothing is answered.
* ``{"op": "exit", "id", "status"}`` tells of the end of a child.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import json
import os
import re
import resource
import selectors
import signal
import socket
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ptyprocess import PtyProcess

from prorld.sandbox.syscalls import LIMITS, Libc, be_the_first_to_go, drop_to, expose, lower_limits, restore_signals

__all__ = ["CONTROL_FD", "DATA_FD", "INFO_FD", "MAX_MESSAGE", "main"]

MAX_MESSAGE = 1 << 17
CONTROL_FD = 9  # the child's end of its control socket
INFO_FD = 10  # where bubblewrap writes the pid of the sandbox's first process
DATA_FD = 11  # the first of the descriptors that hold ``data``
MAX_DATA = 16
_OWN_FDS_FROM = 64  # the warden's own descriptors stay clear of the numbers that children expect
_OWN_FDS = 4096
_END_SECONDS = 1.0

_CHILD_PID = re.compile(rb'"child-pid":\s*(\d+)\s*[,}]')


class _BadRequestError(Exception):
    """A message that this process does not understand."""


@dataclass(kw_only=True)
class _Child:
    """A process the warden answers for. ``first`` is a pidfd of the first process in a sandbox's own pid namespace."""

    id: int
    pid: int
    inside: bool = False
    info: int | None = None
    told: bytes = b""
    first: int | None = None


@dataclass(kw_only=True)
class _Spawn:
    """A decoded request for a child."""

    id: int
    argv: list[str]
    env: dict[str, str]
    cwd: str = "/"
    data: list[bytes] = field(default_factory=list)
    enter: int | None = None
    limits: dict[str, int] = field(default_factory=dict)
    filter: bytes = b""


class Warden:
    """The loop of the process: requests in, children out, until the daemon is gone."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._libc = Libc()
        self._children: dict[int, _Child] = {}
        self._by_pid: dict[int, _Child] = {}

    def run(self) -> NoReturn:
        """Serve until the daemon is gone, then end everything and leave."""
        self._libc.become_subreaper()
        woken, wake = os.pipe()
        for end in (woken, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(woken, selectors.EVENT_READ)
            while self._turn(woken, [key.fileobj for key, _ in selector.select()]):
                pass
        self._end_everything()
        os._exit(0)

    def _turn(self, woken: int, ready: list[Any]) -> bool:
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 4096)
            self._reap()
        if self._control not in ready:
            return True
        try:
            packet = self._control.recv(MAX_MESSAGE + 1)
        except OSError:
            return False
        if packet:
            self._serve(packet)
        return bool(packet)

    def _serve(self, packet: bytes) -> None:
        message = json.loads(packet)
        if message["op"] == "kill":
            child = self._children.get(message["id"])
            if child is not None:
                self._kill(child)
            return
        try:
            self._spawn(_decode_spawn(message))
        except Exception as exc:  # noqa: BLE001 - one request must not end everybody's sandboxes
            self._tell({"op": "refused", "id": message["id"], "why": f"{type(exc).__name__}: {exc}"[:500]})

    def _spawn(self, request: _Spawn) -> None:
        near, far = socket.socketpair()
        with near, far, contextlib.ExitStack() as stack:
            keep = [CONTROL_FD]
            os.dup2(far.fileno(), CONTROL_FD, inheritable=True)
            stack.callback(_reserve, CONTROL_FD)
            if request.enter is not None:
                child, master = self._spawn_inside(request, stack)
            else:
                for number, content in enumerate(request.data, DATA_FD):
                    keep.append(_memory_file(number, content))
                    stack.callback(_reserve, number)
                child, master = self._spawn_outside(request, keep, stack)
            self._children[child.id] = self._by_pid[child.pid] = child
            answer = json.dumps({"op": "spawned", "id": child.id, "pid": child.pid}).encode()
            with contextlib.suppress(OSError):  # the daemon has gone; the next read of the socket says so
                socket.send_fds(self._control, [answer], [master, near.fileno()])

    def _spawn_outside(self, request: _Spawn, keep: list[int], stack: contextlib.ExitStack) -> tuple[_Child, int]:
        info, far_info = os.pipe()
        os.set_blocking(info, False)
        os.dup2(far_info, INFO_FD, inheritable=True)
        os.close(far_info)
        stack.callback(_reserve, INFO_FD)

        def become() -> NoReturn:
            be_the_first_to_go()
            _execute(request)

        try:
            pid, master = _pty_spawn(become, [*keep, INFO_FD], stack)
        except BaseException:
            os.close(info)
            raise
        return _Child(id=request.id, pid=pid, info=info), master

    def _spawn_inside(self, request: _Spawn, stack: contextlib.ExitStack) -> tuple[_Child, int]:
        home = self._children.get(-1 if request.enter is None else request.enter)
        first = None if home is None else self._first_process(home)
        if first is None:
            raise _BadRequestError("no such sandbox")
        told, tell = os.pipe()
        stack.callback(os.close, told)

        def become() -> NoReturn:
            be_the_first_to_go()
            self._enter(first, tell)
            lower_limits(request.limits)
            self._libc.give_up_privileges(request.filter)
            _execute(request)

        try:
            _, master = _pty_spawn(become, [CONTROL_FD, first, tell], stack)
        finally:
            os.close(tell)
        return _Child(id=request.id, pid=int(os.read(told, 32)), inside=True), master

    def _enter(self, first: int, tell: int) -> None:
        """Join the namespaces and go on in a process born there, as leader of a session of its own on the same tty."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # giving the tty up hangs up on its foreground group: on us
        self._libc.join_namespaces(first)
        fcntl.ioctl(0, termios.TIOCNOTTY)
        pid = os.fork()
        if pid:
            os.write(tell, str(pid).encode())
            os._exit(0)
        os.close(first)
        os.close(tell)
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def _first_process(self, child: _Child) -> int | None:
        """A pidfd of the first process in the child's pid namespace, once bubblewrap has named it."""
        if child.first is None and child.info is not None:
            with contextlib.suppress(BlockingIOError):
                child.told = (child.told + os.read(child.info, 4096))[:4096]
            named = _CHILD_PID.search(child.told)
            if named is not None:
                child.first = _open_child(int(named[1]), child.pid)
        return child.first

    def _kill(self, child: _Child) -> None:
        """Kill the first process of its namespace, and with it all in there; or the child and all of its session.

        What was started by one that is inside another's namespace stays, as it does when a shell ends by itself.
        The child itself then ends when the kernel has reaped the whole namespace: its exit means that nothing is left.
        """
        first = self._first_process(child)
        with contextlib.suppress(ProcessLookupError):
            if first is not None:
                signal.pidfd_send_signal(first, signal.SIGKILL)
            elif child.inside:
                os.kill(child.pid, signal.SIGKILL)
            else:
                _kill_session(child.pid)

    def _reap(self) -> None:
        for pid, status in _ended():
            child = self._by_pid.pop(pid, None)
            if child is None:
                continue
            del self._children[child.id]
            for descriptor in (child.info, child.first):
                if descriptor is not None:
                    os.close(descriptor)
            if not child.inside and child.first is None:
                _kill_session(pid)
            self._tell({"op": "exit", "id": child.id, "status": os.waitstatus_to_exitcode(status)})

    def _tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the daemon has gone; the next read of the socket says so
            self._control.send(json.dumps(message).encode())

    def _end_everything(self) -> None:
        end = time.monotonic() + _END_SECONDS
        while time.monotonic() < end:
            for child in list(self._children.values()):
                self._kill(child)
            self._reap()
            if not self._children and not _has_children():
                return
            time.sleep(0.005)


def _pty_spawn(become: Callable[[], NoReturn], keep: list[int], stack: contextlib.ExitStack) -> tuple[int, int]:
    """Spawn on a new pty; its master is closed with ``stack``, when it has been handed over.

    ``become`` executes the program itself. ptyprocess reports what it raises and ends the child; what its own call of
    ``exec`` raises, unless it is an OSError, would come out of here in the child, and there would be two wardens.
    """
    process = PtyProcess.spawn(["/proc/self/exe"], cwd="/", env={}, echo=False, preexec_fn=become, pass_fds=keep)
    process.closed = True  # its own ``close`` sleeps and kills; the master belongs to the daemon
    stack.callback(process.fileobj.close)
    attributes = termios.tcgetattr(process.fd)
    attributes[1] &= ~termios.OPOST
    termios.tcsetattr(process.fd, termios.TCSANOW, attributes)
    return process.pid, process.fd


def _execute(request: _Spawn) -> NoReturn:
    restore_signals()
    os.chdir(request.cwd)
    os.execve(request.argv[0], request.argv, request.env)  # noqa: S606 - no shell is what is wanted


def _decode_spawn(message: dict[str, Any]) -> _Spawn:
    """The request, checked field by field; the daemon is trusted, but a fault in it must show as one."""
    try:
        request = _Spawn(
            id=int(message["id"]),
            argv=[str(word) for word in message["argv"]],
            env={str(name): str(value) for name, value in message["env"].items()},
            cwd=str(message["cwd"]),
            data=[base64.b64decode(text, validate=True) for text in message["data"]],
            enter=None if message["enter"] is None else int(message["enter"]),
            limits={str(name): int(value) for name, value in message["limits"].items()},
            filter=base64.b64decode(message["filter"], validate=True),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise _BadRequestError(f"malformed request: {exc!r}") from exc
    if not request.argv or len(request.data) > MAX_DATA or not request.limits.keys() <= LIMITS.keys():
        raise _BadRequestError("request out of bounds")
    return request


def _open_child(pid: int, parent: int) -> int | None:
    """A pidfd of ``pid`` if it still is a child of ``parent``: a number alone may have been given to somebody else."""
    try:
        held = os.pidfd_open(pid)
        if int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]) == parent:
            return held
    except OSError:
        return None
    os.close(held)
    return None


def _memory_file(number: int, content: bytes) -> int:
    """Put ``content`` on descriptor ``number``, ready to be read from its start."""
    held = os.memfd_create("data")
    try:
        os.write(held, content)
        os.lseek(held, 0, os.SEEK_SET)
        os.dup2(held, number, inheritable=True)
    finally:
        os.close(held)
    return number


def _reserve(number: int) -> None:
    """Put /dev/null on ``number``, so that nothing of the warden's own ever lands there."""
    null = os.open(os.devnull, os.O_RDWR)
    if null != number:
        os.dup2(null, number, inheritable=False)
        os.close(null)


def _kill_session(leader: int) -> None:
    """Kill the processes of a session: FUSE helpers leave their process group, but not their session."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int((process / "stat").read_text().rsplit(")", 1)[1].split()[3]) == leader:
                os.kill(int(process.name), signal.SIGKILL)


def _ended() -> Iterator[tuple[int, int]]:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        yield pid, status


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def main(arguments: list[str]) -> NoReturn:
    """Be the warden: ``DESCRIPTOR UID GID [PATH...]``; UID -1 keeps the user; the paths are made reachable for it."""
    descriptor, uid, gid = (int(word) for word in arguments[:3])
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _OWN_FDS_FROM)
    os.close(descriptor)
    for number in range(CONTROL_FD, DATA_FD + MAX_DATA):
        _reserve(number)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_OWN_FDS if hard < 0 else min(_OWN_FDS, hard), hard))
    libc = Libc()
    # Whatever the daemon keeps to itself: sandboxes see the usual one, and other users pass through what is made here.
    os.umask(0o022)
    if uid >= 0:
        try:
            expose(libc, arguments[3:], uid, gid)
        except OSError as exc:
            if exc.errno != errno.EPERM:
                raise
            sys.stderr.write(f"warden: the interpreter stays out of reach of user {uid}: {exc}\n")
        drop_to(uid, gid)
        libc.stay_dumpable()
    control = socket.socket(fileno=moved)
    control.send(json.dumps({"op": "ready", "uid": os.getuid()}).encode())
    Warden(control).run()


if __name__ == "__main__":
    main(sys.argv[1:])
