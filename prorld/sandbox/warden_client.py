"""The daemon's side of the warden: starts it, asks it for children, hears of their end.

``run_warden`` is an actor and the only owner of the warden process and its socket. When the warden dies, all its
children die with it (the kernel sees to that), every wait and every request fails with ``SandboxError`` at once, and
another warden is started, a bounded number of times. A descriptor that arrives for a request nobody waits for any more
is closed, and what it belonged to is killed.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import sys
from array import array
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import msgspec
import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.errors import ConfigError, SandboxError, boundary
from prorld.kit.cleanup import afterwards
from prorld.sandbox.host import needed_paths
from prorld.sandbox.warden import MAX_MESSAGE

__all__ = ["Child", "Warden", "run_warden"]

log: FilteringBoundLogger = structlog.get_logger()

NOBODY = (65534, 65534)
BOOT_SECONDS = 20.0
END_SECONDS = 3.0
RESTARTS_MAX = 5  # in RESTARTS_SECONDS; a warden that keeps dying is a broken host
RESTARTS_SECONDS = 300.0
_KILL_AGAIN_SECONDS = 0.2
_DESCRIPTORS = 2  # that come with a spawned child

# -I: nothing of the caller's environment or directory decides what a process that may start as root imports.
_BOOT = (
    "import sys; sys.path.extend(sys.argv[1].split(':')); from prorld.sandbox.warden import main; main(sys.argv[2:])"
)


class _Event(msgspec.Struct, frozen=True, kw_only=True):
    """Anything the warden says."""

    op: Literal["ready", "spawned", "refused", "exit"]
    id: int = -1
    pid: int = 0
    why: str = ""
    status: int = 0


class Child:
    """A process that the warden spawned: its pty, its control socket, its end."""

    def __init__(self, link: _Link, number: int, pid: int, master: int, control: socket.socket) -> None:
        control.setblocking(False)
        self.pid = pid
        self.tty = trio.lowlevel.FdStream(master)
        self.control = trio.socket.from_stdlib_socket(control)
        self.exit_code: int | None = None
        self._link = link
        self._number = number
        self._master = master
        self._exited = trio.Event()
        self._closed = False

    @property
    def number(self) -> int:
        """The number the warden knows it by."""
        return self._number

    @property
    def running(self) -> bool:
        """Whether its end has not been heard of."""
        return not self._exited.is_set()

    async def wait(self) -> int:
        """Its exit code, negative for a signal; -9 where the warden died with it."""
        await self._exited.wait()
        return -signal.SIGKILL if self.exit_code is None else self.exit_code

    def interrupt(self, number: signal.Signals) -> None:
        """Signal what is in the foreground on its tty: works from outside of its pid namespace."""
        if self._closed:
            return
        with suppress(OSError):
            group = os.tcgetpgrp(self._master)
            if group > 1:
                os.killpg(group, number)

    def close(self) -> None:
        """Close this side of its pty and its socket, and have it killed with its foreground job. Can be repeated."""
        if self._closed:
            return
        if self.running:
            self.interrupt(signal.SIGKILL)
            self._link.kill_nowait(self._number)
        self._closed = True
        self.tty.close()
        self.control.close()

    async def end(self) -> None:
        """Kill it, and everything of it, and wait until it is gone. The caller bounds the wait.

        Its tty is closed last: the hang-up would end bubblewrap before the kernel has emptied the namespace, and its
        exit would mean nothing.
        """
        try:
            while self.running:
                self._link.kill_nowait(self._number)
                with trio.move_on_after(_KILL_AGAIN_SECONDS):
                    await self._exited.wait()
        finally:
            self.close()

    def ended(self, exit_code: int | None) -> None:
        """Note its end; called by the link alone."""
        self.exit_code = exit_code
        self._exited.set()


class _Request:
    """Somebody who waits for a child."""

    def __init__(self) -> None:
        self.answered = trio.Event()
        self.child: Child | None = None
        self.why = ""


class _Link:
    """The socket to one warden process, and what is known of its children."""

    def __init__(self, raw: socket.socket, sock: trio.socket.SocketType) -> None:
        self._raw = raw
        self._sock = sock
        self._sending = trio.Lock()
        self._requests: dict[int, _Request] = {}
        self._children: dict[int, Child] = {}
        self._numbers = 0
        self._dead = False

    async def spawn(self, wish: dict[str, object]) -> Child:
        """Ask for a child and wait for it."""
        if self._dead:
            await trio.lowlevel.checkpoint_if_cancelled()
            raise SandboxError("the warden is gone")
        self._numbers += 1
        number, request = self._numbers, _Request()
        packet = json.dumps({"op": "spawn", "id": number, **wish}).encode()
        if len(packet) > MAX_MESSAGE:
            raise SandboxError(f"a request of {len(packet)} bytes is too large for the warden", retryable=False)
        with ExitStack() as stack:
            self._requests[number] = request
            stack.callback(self._abandon, number, request)
            await self._send(packet)
            await request.answered.wait()
            if request.child is None:
                # The cancellation that ended the warden may be the caller's own.
                await trio.lowlevel.checkpoint_if_cancelled()
                raise SandboxError(f"the warden refused to start a process: {request.why}")
            stack.pop_all()
            return request.child

    def _abandon(self, number: int, request: _Request) -> None:
        self._requests.pop(number, None)
        if request.child is not None:
            request.child.close()

    async def _send(self, packet: bytes) -> None:
        try:
            async with self._sending:
                await self._sock.send(packet)
        except (OSError, trio.ClosedResourceError) as exc:
            raise SandboxError("the warden is gone") from exc

    def kill_nowait(self, number: int) -> None:
        """Have a child killed; one that is not sent now is sent again by whoever waits for the end."""
        with suppress(OSError):
            self._raw.send(json.dumps({"op": "kill", "id": number}).encode())

    async def listen(self) -> None:
        """Hear the warden out, until it is gone."""
        try:
            while True:
                event, descriptors = await _receive(self._sock)
                if event is None:
                    return
                self._hear(event, descriptors)
        finally:
            self._dead = True
            for request in self._requests.values():
                request.why = "it is gone"
                request.answered.set()
            for child in self._children.values():
                child.ended(None)

    def _hear(self, event: _Event, descriptors: list[int]) -> None:
        if event.op == "exit":
            child = self._children.pop(event.id, None)
            if child is not None:
                child.ended(event.status)
            return
        request = self._requests.pop(event.id, None)
        if event.op == "spawned":
            child = self._adopt(event, descriptors)
            if request is None and child is not None:
                child.close()
            elif request is not None:
                request.child, request.why = child, "no descriptors are left"
        elif request is not None:
            request.why = event.why
        if request is not None:
            request.answered.set()

    def _adopt(self, event: _Event, descriptors: list[int]) -> Child | None:
        if len(descriptors) != _DESCRIPTORS:  # this process has no room for more
            for descriptor in descriptors:
                os.close(descriptor)
            self.kill_nowait(event.id)
            return None
        child = Child(self, event.id, event.pid, descriptors[0], socket.socket(fileno=descriptors[1]))
        self._children[event.id] = child
        return child


class Warden:
    """What the rest of the daemon holds of the warden."""

    def __init__(self, uid: int, gid: int) -> None:
        self.uid = uid
        self.gid = gid
        self.restarts_total = 0
        self._link: _Link | None = None

    async def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str = "/",
        data: Sequence[bytes] = (),
        enter: Child | None = None,
        limits: Mapping[str, int] | None = None,
        seccomp: bytes = b"",
    ) -> Child:
        """Start a process on a pty of its own, with a control socket on descriptor 9. Raises ``SandboxError``.

        ``enter`` starts it inside the namespaces of an earlier child's first process, under ``limits`` and ``seccomp``.
        ``data`` are contents that the process finds on descriptors from 11 on.
        """
        if self._link is None:
            await trio.lowlevel.checkpoint_if_cancelled()
            raise SandboxError("there is no warden")
        return await self._link.spawn(
            {
                "argv": list(argv),
                "env": dict(env),
                "cwd": cwd,
                "data": [base64.b64encode(content).decode() for content in data],
                "enter": None if enter is None else enter.number,
                "limits": dict(limits or {}),
                "filter": base64.b64encode(seccomp).decode(),
            }
        )

    @property
    def is_up(self) -> bool:
        """Whether there is a warden process now."""
        return self._link is not None

    def attach(self, link: _Link | None) -> None:
        """Use another warden process from here on; called by the actor alone."""
        self._link = link


async def run_warden(
    *,
    user: tuple[int, int] | None = None,
    python: str = sys.executable,
    exposed: Sequence[str] = (),
    task_status: trio.TaskStatus[Warden] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Keep a warden running, and hand out what is needed to use it.

    ``user`` is the uid and gid of what runs in sandboxes; where root names nobody else, it is ``nobody``.
    ``exposed`` are directories, besides those of the interpreter, that this user must reach although they lie in a
    directory closed to it. Raises ``SandboxError`` when no warden can be started or wardens keep dying.
    """
    uid, gid = _user(user)
    warden = Warden(uid, gid)
    drop = (str(uid), str(gid)) if os.getuid() == 0 else ("-1", "-1")
    reachable = [*needed_paths(), *exposed]
    deaths: list[float] = []
    status: trio.TaskStatus[Warden] | None = task_status
    while True:
        await _run_one(warden, [python, *_boot_arguments()], [*drop, *reachable], status)
        status = None
        now = trio.current_time()
        deaths = [*(death for death in deaths if death > now - RESTARTS_SECONDS), now]
        log.error("warden.died", deaths=len(deaths))
        if len(deaths) > RESTARTS_MAX:
            raise SandboxError(f"the warden died {len(deaths)} times in {RESTARTS_SECONDS:.0f} s", retryable=False)
        warden.restarts_total += 1


async def _run_one(
    warden: Warden, argv: list[str], arguments: list[str], status: trio.TaskStatus[Warden] | None
) -> None:
    """One warden process, from its start to its death."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near:
        near.setblocking(False)
        with far, boundary(SandboxError, "starting the warden"):
            process = await trio.lowlevel.open_process(
                [*argv, str(far.fileno()), *arguments],
                pass_fds=[far.fileno()],
                start_new_session=True,
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
            )
        sock = trio.socket.from_stdlib_socket(near)
        async with afterwards(END_SECONDS, "ending the warden", partial(_end, process, sock)):
            await _hear_ready(sock)
            link = _Link(near, sock)
            warden.attach(link)
            if status is not None:
                status.started(warden)
            try:
                await link.listen()
            finally:
                warden.attach(None)


async def _hear_ready(sock: trio.socket.SocketType) -> None:
    with trio.move_on_after(BOOT_SECONDS):
        event, _ = await _receive(sock)
        if event is not None and event.op == "ready":
            return
    raise SandboxError("the warden did not come up")


async def _end(process: trio.Process, sock: trio.socket.SocketType) -> None:
    """End of file tells it to end everything; it takes a second at most. The caller shields and bounds the wait."""
    sock.close()
    with trio.move_on_after(END_SECONDS / 2):
        await process.wait()
    if process.returncode is None:
        process.kill()
    await process.wait()


async def _receive(sock: trio.socket.SocketType) -> tuple[_Event | None, list[int]]:
    """The next message and its descriptors; ``None`` when the warden has gone or talks nonsense, which is the same."""
    room = socket.CMSG_SPACE(_DESCRIPTORS * array("i").itemsize)
    try:
        packet, ancillary, _, _ = await sock.recvmsg(MAX_MESSAGE, room, socket.MSG_CMSG_CLOEXEC)
    except OSError:
        return None, []
    descriptors = array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    try:
        return msgspec.json.decode(packet, type=_Event), list(descriptors)
    except msgspec.DecodeError:
        for descriptor in descriptors:
            os.close(descriptor)
        return None, []


def _user(wanted: tuple[int, int] | None) -> tuple[int, int]:
    own = (os.getuid(), os.getgid())
    if own[0] != 0:
        if wanted is not None and wanted != own:
            raise ConfigError(f"only root can run sandboxes as uid {wanted[0]}, gid {wanted[1]}")
        return own
    if wanted is not None and 0 in wanted:
        raise ConfigError("sandboxes never run as root")
    return wanted or NOBODY


def _boot_arguments() -> tuple[str, ...]:
    """The interpreter's arguments: isolated, without site, and with the two directories that hold what is imported."""
    places = {Path(__file__).resolve().parents[2]}
    found = find_spec("ptyprocess")
    if found is not None and found.origin is not None:
        places.add(Path(found.origin).resolve().parents[1])
    return ("-I", "-S", "-c", _BOOT, ":".join(str(place) for place in sorted(places)))
