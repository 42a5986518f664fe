"""The life of one container: made, heard from, kept, and gone with all that ran in it.

Two things end a container, and each suffices. Its first process ends when the socket to it reads end of file, however
this process has gone; and it is killed, waited for and removed here. Docker removes what has ended by itself.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

import trio

from prorld.errors import SandboxError, boundary
from prorld.kit.cleanup import afterwards, shielded
from prorld.kit.process import ProcessResult
from prorld.sandbox import reaper
from prorld.sandbox.docker_inner import LINK
from prorld.sandbox.families import started
from prorld.sandbox.link import Link, receive
from prorld.sandbox.wall import Enclosure, Request
from prorld.sandbox.warden_client import Warden

__all__ = ["FirstProcess", "keep_container"]

START_SECONDS = 60.0
CONNECT_SECONDS = 20.0
LOOK_SECONDS = 2.0  # without a word, before docker is asked whether the container is still there
END_SECONDS = 9.0
DEATH_SECONDS = 2.0
_RECENTLY = "60s"
_EVENT = '{{.Action}} {{index .Actor.Attributes "exitCode"}}'
_KILLED = "die 137"
_ASK_MAX = 10
_ASK_PAUSE_SECONDS = 0.1
_REMOVE_PAUSE_SECONDS = 0.05
_PEER = struct.Struct("iII")  # pid, uid, gid
_GONE = "no such container"


class Cli(Protocol):
    """What is asked of docker here."""

    async def call(self, *arguments: str) -> ProcessResult:
        """Run one command to its end."""
        ...

    async def run(self, *arguments: str) -> str:
        """What a command says."""
        ...


class FirstProcess:
    """The first process of a container, seen from the host: its end is the end of all in there."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.first = pid
        self.failure: SandboxError | None = None
        self.killed = False  # from here
        self._held = os.pidfd_open(pid)
        self._gone = trio.Event()

    @property
    def running(self) -> bool:
        """Whether its end has not been told."""
        return not self._gone.is_set()

    async def seen_to_end(self) -> bool:
        """Whether it ends in time; the kernel ends all others of its namespace before."""
        with trio.move_on_after(DEATH_SECONDS):
            await trio.lowlevel.wait_readable(self._held)
            return True
        return False

    def tell(self, failure: SandboxError | None) -> None:
        """Let everybody know that it has ended, and why."""
        self.failure = failure
        self._gone.set()

    async def wait(self) -> int:
        """Wait until its end has been told; its exit code is docker's."""
        await self._gone.wait()
        return 0

    def kill(self) -> None:
        """End it at once, where it is ours to signal; the end of its socket does it elsewhere."""
        if not self.running:
            return
        self.killed = True
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self._held, signal.SIGKILL)

    async def end(self) -> None:
        """Kill it and wait until it is gone. The caller bounds the wait."""
        self.kill()
        await self.wait()

    def close(self) -> None:
        """Let go of it."""
        trio.lowlevel.notify_closing(self._held)
        os.close(self._held)
        self._gone.set()


async def keep_container(
    cli: Cli, request: Request, argv: list[str], *, name: str, task_status: trio.TaskStatus[Enclosure]
) -> None:
    """Keep a container until cancelled or gone; hands out the warden in it. Raises ``SandboxError``."""
    socket_path = request.place / "link" / Path(LINK).name
    async with afterwards(END_SECONDS, f"removing container {name}", partial(_remove, cli, name)):
        with boundary(SandboxError, f"making the socket of {name}"):
            listener = _listen(socket_path)
        with listener:
            # Cut off half-way, it would leave a container that docker is still about to make.
            with shielded(START_SECONDS, f"making container {name}"):
                await cli.run(*argv)
            near = await _accept(cli, listener, name)
        with suppress(OSError):  # nobody listens there any more, and it goes with its directory
            socket_path.unlink()
        await _keep(partial(_why, cli, name), request, near, task_status)


async def _keep(
    why: Callable[[], Awaitable[SandboxError | None]],
    request: Request,
    near: socket.socket,
    task_status: trio.TaskStatus[Enclosure],
) -> None:
    """From the connection of the first process to its end."""
    with near:
        near.setblocking(False)
        with boundary(SandboxError, "looking for the container's first process"):
            first = FirstProcess(_peer(near))
        sock = trio.socket.from_stdlib_socket(near)
        link = Link(near, sock, numbers_are_ours=False)
        warden = Warden(request.uid, request.gid)

        async def end() -> None:
            sock.close()  # the warden in there reads end of file, should it not be ours to kill
            if first.running:
                first.kill()
                await first.seen_to_end()
            await link.bury()
            first.close()

        async with afterwards(END_SECONDS, "ending a container", end):
            await _hear_ready(sock)
            with boundary(SandboxError, f"putting {request.sandbox_id} on record"):
                reaper.name_process(request.place, first.pid, started(first.pid))
            warden.attach(link)
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(link.watch, first.kill, name="watch of the warden")
                    task_status.started(Enclosure(warden=warden, first=first))
                    await link.listen()
                    warden.attach(None)
                    if not await first.seen_to_end():
                        first.kill()
                        await first.seen_to_end()
                    first.tell(None if first.killed else await why())
                    nursery.cancel_scope.cancel("the container is gone")
            finally:
                warden.attach(None)


def _listen(path: Path) -> socket.socket:
    """A socket for the container's first process alone: nothing else has been started when it connects."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        held = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            listener.bind(f"/proc/self/fd/{held}/{path.name}")  # the path itself may be too long for an address
        finally:
            os.close(held)
        listener.setblocking(False)
        listener.listen(1)
    except BaseException:
        listener.close()
        raise
    return listener


async def _accept(cli: Cli, listener: socket.socket, name: str) -> socket.socket:
    with trio.move_on_after(CONNECT_SECONDS):
        while True:
            with trio.move_on_after(LOOK_SECONDS):
                await trio.lowlevel.wait_readable(listener)
                return listener.accept()[0]
            state = (await cli.call("container", "inspect", "--format", "{{.State.Status}}", name)).stdout.strip()
            if state != b"running":
                raise SandboxError("docker: the container ended before its warden was up", retryable=False)
    words = "the container's warden did not connect; docker has to run on this machine and see the same files"
    raise SandboxError(f"docker: {words}")


def _peer(sock: socket.socket) -> int:
    """The process at the other end, by its number here."""
    pid: int = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[0]
    if pid <= 1:
        raise SandboxError("docker: its containers run where this machine's processes are not seen", retryable=False)
    return pid


async def _hear_ready(sock: trio.socket.SocketType) -> None:
    with trio.move_on_after(CONNECT_SECONDS):
        event, _ = await receive(sock)
        if event is not None and event.op == "ready":
            return
        raise SandboxError(f"docker: {event.why if event is not None else 'the container ended without a word'}")
    raise SandboxError("docker: the container's warden did not come up")


async def _why(cli: Cli, name: str) -> SandboxError | None:
    """Why a container that nobody here has killed has ended. Each call is bounded, and so are they all.

    Docker misses the kernel's notice of a lack of memory where the container goes with it. But its first process can't
    be killed from within, so a kill that nobody asked docker for is the kernel's as well.
    """
    asking = ["--filter", f"container={name}", "--format", _EVENT]
    with suppress(SandboxError):
        for _ in range(_ASK_MAX):
            said = (await cli.run("events", "--since", _RECENTLY, "--until", "0s", *asking)).splitlines()
            events = {line.strip() for line in said}
            if "oom" in events or (_KILLED in events and "kill" not in events):
                words = "the sandbox held more memory than its limit, and the kernel ended it"
                return SandboxError(words, code="sandbox_out_of_memory", retryable=False)
            if any(event.startswith("die") for event in events):
                return None
            await trio.sleep(_ASK_PAUSE_SECONDS)  # docker hears of it from others
    return None


async def _remove(cli: Cli, name: str) -> None:
    """Until docker knows nothing of it. What removes itself meanwhile makes it say otherwise for a moment."""
    while True:
        result = await cli.call("rm", "--force", "--volumes", name)
        said = result.stderr.decode("utf-8", "replace").lower()
        # Of what is not there, some versions say so and some say nothing.
        if result.exit_code == 0 or _GONE in said:
            return
        await trio.sleep(_REMOVE_PAUSE_SECONDS)
