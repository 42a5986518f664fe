"""The daemon's side of the warden: starts it, and starts another one when it has died.

``run_warden`` is an actor and the only owner of the warden process and its socket. When the warden dies, what
it leaves is ended by recorded pid and start time, everybody who waits for one of its children hears of it, and another
warden is started, a bounded number of times.
"""

from __future__ import annotations

import base64
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path

import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.errors import ConfigError, SandboxError, boundary
from prorld.kit.cleanup import afterwards
from prorld.sandbox.host import needed_paths
from prorld.sandbox.link import Child, Link, receive

__all__ = ["Warden", "import_places", "run_warden"]

log: FilteringBoundLogger = structlog.get_logger()

NOBODY = (65534, 65534)
BOOT_SECONDS = 20.0
END_SECONDS = 5.0
GRACE_SECONDS = 1.5
RESTARTS_MAX = 5  # in RESTARTS_SECONDS; a warden that keeps dying is a broken host
RESTARTS_SECONDS = 300.0
# Contents and filters: nearly all sandboxes have the same few.
ENCODED_MAX = 32

# -I: nothing of the caller's environment or directory decides what a process that may start as root imports.
_BOOT = (
    "import sys; sys.path.extend(sys.argv[1].split(':')); from prorld.sandbox.warden import main; main(sys.argv[2:])"
)


class Warden:
    """What the rest of the daemon holds of the warden."""

    def __init__(self, uid: int, gid: int) -> None:
        self.uid = uid
        self.gid = gid
        self.restarts_total = 0
        self._link: Link | None = None

    async def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str = "/",
        data: Sequence[bytes] = (),
        helpers: bool = False,
        marker: str = "",
        enter: Child | None = None,
        share_network: bool = False,
        furnish: Mapping[str, object] | None = None,
        limits: Mapping[str, int] | None = None,
        seccomp: bytes = b"",
        apart: bool = False,
        cgroup: Path | None = None,
    ) -> Child:
        """Start a process on a pty of its own, with a control socket on descriptor 9. Raises ``SandboxError``.

        ``enter`` starts it inside the namespaces of an earlier child's first process (its network's only where that has
        one of its own), under ``limits`` and ``seccomp``, after ``furnish`` has been put into place there; ``apart``
        from that process, it can't debug what it has not started. ``data`` are contents that the process finds on
        descriptors from 10 on. ``helpers`` says that it starts others beside it that must end with it, ``marker`` a
        word of its environment that all of them carry. It moves to ``cgroup`` before all else.
        """
        if self._link is None:
            await trio.lowlevel.checkpoint_if_cancelled()
            raise SandboxError("there is no warden")
        return await self._link.spawn(
            {
                "argv": list(argv),
                "env": dict(env),
                "cwd": cwd,
                "data": [_encode(content) for content in data],
                "helpers": helpers,
                "marker": marker,
                "enter": None if enter is None else enter.number,
                "share_network": share_network,
                "furnish": dict(furnish or {}),
                "limits": dict(limits or {}),
                "filter": _encode(seccomp),
                "apart": apart,
                "cgroup": "" if cgroup is None else str(cgroup),
            }
        )

    @property
    def is_up(self) -> bool:
        """Whether there is a warden process now."""
        return self._link is not None

    def attach(self, link: Link | None) -> None:
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
        link = Link(near, sock)
        async with afterwards(END_SECONDS, "ending the warden", partial(_end, process, sock, link)):
            await _hear_ready(sock)
            warden.attach(link)
            if status is not None:
                status.started(warden)
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(link.watch, process.kill, name="watch of the warden")
                    await link.listen()
                    nursery.cancel_scope.cancel("the warden is gone")
            finally:
                warden.attach(None)


async def _hear_ready(sock: trio.socket.SocketType) -> None:
    with trio.move_on_after(BOOT_SECONDS):
        event, _ = await receive(sock)
        if event is not None and event.op == "ready":
            return
    raise SandboxError("the warden did not come up")


async def _end(process: trio.Process, sock: trio.socket.SocketType, link: Link) -> None:
    """End of file tells it to end everything; it takes a second at most. The caller shields and bounds the wait."""
    sock.close()
    with trio.move_on_after(GRACE_SECONDS):
        await process.wait()
    if process.returncode is None:
        process.kill()
    await process.wait()
    await link.bury()


@lru_cache(ENCODED_MAX)
def _encode(content: bytes) -> str:
    return base64.b64encode(content).decode()


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
    return ("-I", "-S", "-c", _BOOT, ":".join(import_places()))


def import_places() -> tuple[str, ...]:
    """The directories that hold what a warden imports beside the standard library."""
    places = {Path(__file__).resolve().parents[2]}
    found = find_spec("ptyprocess")
    if found is not None and found.origin is not None:
        places.add(Path(found.origin).resolve().parents[1])
    return tuple(str(place) for place in sorted(places))
