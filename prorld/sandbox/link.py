"""The socket to one warden process: requests, the children it has, and whether it is well.

A descriptor that arrives for a request nobody waits for any more is closed, and what it belonged to is killed. A warden
that does not answer is killed; when it is gone, however, every wait and every request fails at once.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import struct
from array import array
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Literal

import msgspec
import trio

from prorld.errors import SandboxError
from prorld.kit.lanes import Lane
from prorld.sandbox.families import end_left, has_group, started
from prorld.sandbox.warden import MAX_MESSAGE

__all__ = ["Child", "Event", "Link", "receive"]

SPAWN_SECONDS = 10.0  # much more than a warden that is well ever takes
PING_SECONDS = 5.0
PONG_SECONDS = 10.0
_PINGS = 20  # sent for one answer, over PONG_SECONDS: a daemon that was held up itself still hears it
_KILL_AGAIN_SECONDS = 0.2
BURY_SECONDS = 2.0
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
_NUMBER = struct.Struct("i")
_TIOCGSID = 0x5429  # which session's tty it is; termios has no name for it
_DESCRIPTORS = 2  # that come with a spawned child


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Anything the warden says."""

    op: Literal["ready", "spawned", "refused", "exit", "pong"]
    id: int = -1
    pid: int = 0
    why: str = ""
    status: int = 0


class Child:
    """A process that the warden spawned: its pty, its control socket, its end."""

    def __init__(
        self, link: Link, number: int, pid: int, master: int, control: socket.socket, *, begun: int | None
    ) -> None:
        control.setblocking(False)
        self.pid = pid
        self.begun = begun
        self.marker = ""
        self.first: int | None = None
        self.failure: SandboxError | None = None  # its exit code is all that is known of its end
        self.tty = trio.lowlevel.FdStream(master)
        self.control = trio.socket.from_stdlib_socket(control)
        self.exit_code: int | None = None
        self._link = link
        self._number = number
        self._master = master
        self._exited = trio.Event()
        self._closed = False
        self._silenced = False

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

    async def greeting(self, word: bytes, limits: Mapping[str, int]) -> bool:
        """Wait until its first process says that it is there, and have the warden know which one that is.

        The kernel says who speaks, so nothing else can pass for it. ``limits`` are that process's from then on.
        """
        room = socket.CMSG_SPACE(_CREDENTIALS.size)
        try:
            said, ancillary, _, _ = await self.control.recvmsg(len(word), room)
            self.control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
        except OSError:
            return False
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(content) == _CREDENTIALS.size:
                self.first = _CREDENTIALS.unpack(content)[0]
        if said != word or not self.first:
            return False
        await self._link.name_first(self._number, self.first, limits)
        return True

    def interrupt(self, number: signal.Signals) -> None:
        """Signal what is in the foreground on its tty: works from outside of its pid namespace.

        The tty remembers a foreground whose processes are all gone by a number that may be a stranger's by now.
        """
        if self._closed:
            return
        with suppress(OSError):
            group = os.tcgetpgrp(self._master)
            (session,) = _NUMBER.unpack(fcntl.ioctl(self._master, _TIOCGSID, bytes(_NUMBER.size)))
            if group > 1 and has_group(session, group):
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

    def silence_at_end(self) -> None:
        """End the reading of its socket when it ends: what it has left in the background may hold that open."""
        self._silenced = True
        if not self.running:
            self._silence()

    def ended(self, exit_code: int | None) -> None:
        """Note its end; called by the link alone."""
        self.exit_code = exit_code
        self._exited.set()
        if self._silenced:
            self._silence()

    def _silence(self) -> None:
        with suppress(OSError, trio.ClosedResourceError):
            self.control.shutdown(socket.SHUT_RD)  # what has arrived can still be read


class _Request:
    """Somebody who waits for a child."""

    def __init__(self) -> None:
        self.answered = trio.Event()
        self.child: Child | None = None
        self.why = ""


class Link:
    """The socket to one warden process, and what is known of its children.

    Where ``numbers_are_ours`` is not so, the warden is in a pid namespace of its own: what it calls its children means
    nothing here, and they end with it.
    """

    def __init__(self, raw: socket.socket, sock: trio.socket.SocketType, *, numbers_are_ours: bool = True) -> None:
        self._lane = Lane("warden's leftovers", 1)
        self._raw = raw
        self._numbers_are_ours = numbers_are_ours
        self._sock = sock
        self._sending = trio.Lock()
        self._requests: dict[int, _Request] = {}
        self._children: dict[int, Child] = {}
        self._numbers = 0
        self._dead = False
        self._doubted = trio.Event()
        self._answered = trio.Event()

    async def spawn(self, wish: dict[str, object]) -> Child:
        """Ask for a child and wait for it."""
        if self._dead:
            await trio.lowlevel.checkpoint_if_cancelled()
            raise SandboxError("the warden is gone")
        self._numbers += 1
        number, request = self._numbers, _Request()
        packet = _packed({"op": "spawn", "id": number, **wish})
        if len(packet) > MAX_MESSAGE:
            raise SandboxError(f"a request of {len(packet)} bytes is too large for the warden", retryable=False)
        with ExitStack() as stack:
            self._requests[number] = request
            stack.callback(self._abandon, number, request)
            with trio.move_on_after(SPAWN_SECONDS):
                await self._send(packet)
                await request.answered.wait()
            if not request.answered.is_set():
                self._doubted.set()
                raise SandboxError(f"the warden did not answer in {SPAWN_SECONDS:.0f} s")
            if request.child is None:
                # The cancellation that ended the warden may be the caller's own.
                await trio.lowlevel.checkpoint_if_cancelled()
                raise SandboxError(f"the warden refused to start a process: {request.why}")
            stack.pop_all()
            request.child.marker = str(wish["marker"])
            return request.child

    async def name_first(self, number: int, pid: int, limits: Mapping[str, int]) -> None:
        """Say which process is the first in a child's pid namespace, and what its limits are."""
        await self._send(msgspec.json.encode({"op": "first", "id": number, "pid": pid, "limits": limits}))

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
            self._raw.send(b'{"op": "kill", "id": %d}' % number)

    async def watch(self, kill: Callable[[], None]) -> None:
        """Ask from time to time, and after a request without an answer, whether the warden is well; else kill it."""
        while await self._answers():
            self._doubted = trio.Event()
            with trio.move_on_after(PING_SECONDS):
                await self._doubted.wait()
        kill()

    async def _answers(self) -> bool:
        self._answered = trio.Event()
        for _ in range(_PINGS):
            with suppress(OSError):
                self._raw.send(b'{"op": "ping"}')
            with trio.move_on_after(PONG_SECONDS / _PINGS):
                await self._answered.wait()
                return True
        return False

    async def listen(self) -> None:
        """Hear the warden out, until it is gone."""
        while True:
            event, descriptors = await receive(self._sock)
            if event is None:
                return
            self._hear(event, descriptors)

    async def bury(self) -> None:
        """The warden is gone: end what it has left, then tell everybody who waits. The caller bounds the wait."""
        self._dead = True
        for request in self._requests.values():
            request.why = "it is gone"
            request.answered.set()
        left = [(child.pid, child.begun) for child in self._children.values() if child.begun is not None]
        markers = {child.marker for child in self._children.values()}
        if left:
            await self._lane.run(partial(end_left, left, markers, seconds=BURY_SECONDS))
        for child in self._children.values():
            child.ended(None)

    def _hear(self, event: Event, descriptors: list[int]) -> None:
        if event.op == "pong":
            self._answered.set()
            return
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

    def _adopt(self, event: Event, descriptors: list[int]) -> Child | None:
        if len(descriptors) != _DESCRIPTORS:  # this process has no room for more
            for descriptor in descriptors:
                os.close(descriptor)
            self.kill_nowait(event.id)
            return None
        begun = started(event.pid) if self._numbers_are_ours else None
        child = Child(self, event.id, event.pid, descriptors[0], socket.socket(fileno=descriptors[1]), begun=begun)
        self._children[event.id] = child
        return child


def _packed(message: dict[str, object]) -> bytes:
    try:
        return msgspec.json.encode(message)
    except UnicodeEncodeError:
        # Names of files that are no Unicode pass through the standard library's.
        return json.dumps(message).encode()


async def receive(sock: trio.socket.SocketType) -> tuple[Event | None, list[int]]:
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
        return msgspec.json.decode(packet, type=Event), list(descriptors)
    except msgspec.DecodeError:
        for descriptor in descriptors:
            os.close(descriptor)
        return None, []
