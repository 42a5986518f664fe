"""The warden: one small single-threaded process that owns every sandbox process of a daemon.

It spawns (``births``; a fork is cheap and safe here), hands the pty master and the control socket of each child
back with SCM_RIGHTS, reaps as a subreaper, kills, and ends everything when its own socket reaches end of file, that is,
when the daemon is gone for whatever reason. Started by root it drops to an ordinary user before it spawns anything.

It knows nothing of images, shells or jobs, and it imports nothing but the standard library and ptyprocess: what it
imports is what each of its forks carries.

Protocol, JSON over one SEQPACKET socketpair, one message a packet, bounded by ``MAX_MESSAGE``:

* ``{"op": "spawn", "id", "argv", "env", "cwd", "data", "helpers", "marker", "enter", "share_network", "furnish",
  "limits", "filter", "apart", "cgroup"}``, answered by ``{"op": "spawned", "id", "pid"}`` with two descriptors, or by
  ``{"op": "refused", "id", "why"}``. With ``enter`` the child starts inside the namespaces of the first process of that
  earlier child; ``data`` are contents that it finds on descriptors, ``cgroup`` is where it moves to before all else.
* ``{"op": "first", "id", "pid", "limits"}`` names the first process in the pid namespace of a child, which has these
  limits from then on, as whatever takes it over has; nothing is answered.
* ``{"op": "kill", "id"}``: everything of that child goes; nothing is answered.
* ``{"op": "ping"}`` is answered by ``{"op": "pong"}``.
* ``{"op": "exit", "id", "status"}`` tells of the end of a child, when nothing of it is left.

Every spawn is answered, in ``BIRTH_SECONDS`` at the latest, and the loop waits for nothing but its selector: a process
that a sandbox can stop must not stop it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import json
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any, NoReturn

from prorld.sandbox.births import (
    BIRTH_SECONDS,
    BadRequestError,
    Birth,
    Contents,
    Wish,
    begin_inside,
    begin_outside,
    decode_wish,
    keep_numbers_free,
)
from prorld.sandbox.families import below, kill_family, own_children, read_stat
from prorld.sandbox.syscalls import Libc, drop_to, expose, lower_limits, raise_descriptors

__all__ = ["MAX_MESSAGE", "main"]

MAX_MESSAGE = 1 << 17
_OWN_FDS_FROM = 64  # the warden's own descriptors stay clear of the numbers that children expect
_END_SECONDS = 1.0

_ANCESTORS_MAX = 8  # between the first process of a sandbox and the child that made it


@dataclass(kw_only=True)
class _Child:
    """A process the warden answers for. ``first`` is a pidfd of the first process in a sandbox's own pid namespace.

    ``status`` is there once it has ended; ``dying`` are pidfds of what must be gone before that is told.
    """

    wish: Wish
    pid: int
    first: int | None = None
    status: int | None = None
    dying: set[int] = field(default_factory=set)


class Warden:
    """The loop of the process: requests in, children out, until the daemon is gone."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._libc = Libc()
        self._contents = Contents()
        self._selector = selectors.DefaultSelector()
        self._births: dict[int, Birth] = {}  # by the descriptor of their report
        self._children: dict[int, _Child] = {}
        self._by_pid: dict[int, _Child] = {}
        self._dying: dict[int, _Child] = {}  # by the descriptors that they wait for

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
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(woken, selectors.EVENT_READ)
        while self._turn(woken, [key.fileobj for key, _ in self._selector.select(self._patience())]):
            pass
        self._end_everything()
        os._exit(0)

    def _turn(self, woken: int, ready: list[Any]) -> bool:
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 4096)
            self._reap()
        for birth in [birth for report, birth in self._births.items() if report in ready]:
            self._attend(birth)
        for gone in [gone for gone in self._dying if gone in ready]:
            self._one_is_gone(gone)
        self._give_up_on_the_late()
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
        if message["op"] == "ping":
            self._tell({"op": "pong"})
            return
        if message["op"] in ("kill", "first"):
            child = self._children.get(message["id"])
            if child is not None and message["op"] == "kill":
                self._kill(child)
            elif child is not None and child.first is None:
                self._name_first(child, int(message["pid"]), message["limits"])
            return
        try:
            self._begin(decode_wish(message))
        except Exception as exc:  # noqa: BLE001 - one request must not end everybody's sandboxes
            self._refuse(message["id"], f"{type(exc).__name__}: {exc}")

    def _name_first(self, child: _Child, pid: int, limits: dict[str, int]) -> None:
        first = _open_descendant(pid, child.pid)
        if first is None:
            return
        try:
            lower_limits(limits, pid=pid)
        except OSError:  # nothing enters what has no first process
            os.close(first)
            return
        child.first = first

    def _begin(self, wish: Wish) -> None:
        if wish.enter is None:
            birth = begin_outside(wish, self._libc, self._contents)
        else:
            home = self._children.get(wish.enter)
            if home is None or home.first is None:
                raise BadRequestError("no such sandbox")
            birth = begin_inside(wish, home.first, self._libc)
        self._births[birth.report] = birth
        self._selector.register(birth.report, selectors.EVENT_READ)

    def _patience(self) -> float | None:
        """How long the loop may sleep: until the next birth is late."""
        if not self._births:
            return None
        return max(0.0, min(birth.deadline for birth in self._births.values()) - time.monotonic())

    def _attend(self, birth: Birth) -> None:
        if birth.hear():
            self._settle(birth)

    def _give_up_on_the_late(self) -> None:
        now = time.monotonic()
        for birth in [birth for birth in self._births.values() if birth.deadline <= now]:
            self._attend(birth)
            if birth.report in self._births:
                birth.why = f"it did not execute in {BIRTH_SECONDS:.0f} s"
                self._settle(birth)

    def _settle(self, birth: Birth) -> None:
        """Answer for a birth that has come to its end, well or not."""
        self._selector.unregister(birth.report)
        del self._births[birth.report]
        try:
            if birth.why:
                birth.kill()
                self._refuse(birth.wish.id, birth.why)
            else:
                self._hand_over(birth)
        finally:
            birth.close()

    def _hand_over(self, birth: Birth) -> None:
        child = _Child(wish=birth.wish, pid=birth.pid)
        number = birth.wish.id
        self._children[number] = self._by_pid[child.pid] = child
        answer = json.dumps({"op": "spawned", "id": number, "pid": child.pid}).encode()
        try:
            socket.send_fds(self._control, [answer], [birth.master, birth.control])
        except OSError as exc:  # too many descriptors of this user are on their way, or the daemon has gone
            self._kill(child)
            self._refuse(number, f"its descriptors could not be sent: {exc}")

    def _refuse(self, number: int, why: str) -> None:
        self._tell({"op": "refused", "id": number, "why": why[:500]})

    def _kill(self, child: _Child) -> None:
        """Kill the first process of its namespace, and with it all in there; or the child and all of its session.

        What was started by one that is inside another's namespace stays, as it does when a shell ends by itself.
        A child with a namespace then ends by itself when the kernel has reaped all in there, and cleans up its mounts.
        """
        if child.status is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if child.wish.enter is not None:
                os.kill(child.pid, signal.SIGKILL)
                return
            if child.first is not None:
                signal.pidfd_send_signal(child.first, signal.SIGKILL)
                return
        for descriptor in kill_family(child.pid, child.wish.marker, among=lambda: self._strays(child.pid)):
            os.close(descriptor)

    def _reap(self) -> None:
        while (pid := _ended()) is not None:
            # Before its number is free for others, and so that its end is not told before its beginning.
            for birth in list(self._births.values()):
                self._attend(birth)
            child = self._by_pid.pop(pid, None)
            if child is not None and child.wish.enter is None:
                self._bury(child)
            _, status = os.waitpid(pid, 0)
            if child is None:
                continue
            child.status = os.waitstatus_to_exitcode(status)
            self._tell_the_end_of(child)

    def _bury(self, child: _Child) -> None:
        """See to it that what an ended child leaves ends, too; its number stays its own until it is reaped."""
        if child.first is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(child.first, signal.SIGKILL)
            child.dying.add(child.first)
        if child.first is None or child.wish.helpers:
            marker = child.wish.marker
            child.dying |= kill_family(child.pid, marker, among=lambda: self._strays(*self._marked(marker)))
        for descriptor in child.dying:
            self._dying[descriptor] = child
            self._selector.register(descriptor, selectors.EVENT_READ)

    def _marked(self, marker: str) -> list[int]:
        """The children that carry a mark. They may outlive for a moment the one that it is of."""
        name, _, value = marker.partition("=")
        return [pid for pid, child in self._by_pid.items() if marker and child.wish.env.get(name) == value]

    def _strays(self, *leaders: int) -> list[int]:
        """What is below the given, and then what has lost its parent and came here, during that look, too."""
        return [*below(leaders), *below(pid for pid in own_children() if pid not in self._by_pid)]

    def _one_is_gone(self, descriptor: int) -> None:
        child = self._dying.pop(descriptor)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        child.dying.discard(descriptor)
        self._tell_the_end_of(child)

    def _tell_the_end_of(self, child: _Child) -> None:
        if child.status is not None and not child.dying:
            del self._children[child.wish.id]
            self._tell({"op": "exit", "id": child.wish.id, "status": child.status})

    def _tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the daemon has gone; the next read of the socket says so
            self._control.send(json.dumps(message).encode())

    def _end_everything(self) -> None:
        end = time.monotonic() + _END_SECONDS
        while time.monotonic() < end:
            for birth in self._births.values():
                birth.kill()
            for child in list(self._children.values()):
                self._kill(child)
            self._reap()
            if not self._children and not _has_children():
                return
            time.sleep(0.005)


def _open_descendant(pid: int, ancestor: int) -> int | None:
    """A pidfd of ``pid`` if it is below ``ancestor``: a number alone may have been given to somebody else."""
    try:
        held = os.pidfd_open(pid)
    except OSError:
        return None
    with contextlib.suppress(OSError, ValueError, IndexError):
        for _ in range(_ANCESTORS_MAX):
            pid = int(read_stat(pid)[1])
            if pid == ancestor:
                return held
    os.close(held)
    return None


def _ended() -> int | None:
    """A child that has ended and is not reaped yet."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if found is None else found.si_pid


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
    keep_numbers_free()
    raise_descriptors()
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
    # A collection writes to all that it looks at, and what is written to has to be copied for each fork.
    gc.freeze()
    control = socket.socket(fileno=moved)
    control.send(json.dumps({"op": "ready", "uid": os.getuid()}).encode())
    Warden(control).run()


if __name__ == "__main__":
    main(sys.argv[1:])
