"""Bubblewrap: the embedded runtime. Namespaces for everything, no network, nothing of the host that is not named here.

``bubblewrap_argv`` is the wall, as a pure function. ``BubblewrapRuntime`` keeps what stands behind it. The first
process of a sandbox is a bash that does nothing but wait for the end of its control socket; sessions and file transfers
enter the sandbox from the warden, so that none of them can end it.

An image is a directory that the warden's user can read and owns; each sandbox gets an overlay of its own on it.
"""

from __future__ import annotations

import os
import posixpath
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import trio

from prorld.errors import SandboxError, boundary
from prorld.kit.cleanup import afterwards
from prorld.kit.lanes import Lane
from prorld.sandbox import reaper
from prorld.sandbox.births import CONTROL_FD, DATA_FD, INFO_FD
from prorld.sandbox.box import Box
from prorld.sandbox.contract import Sandbox, SandboxInfo, SandboxSpec
from prorld.sandbox.host import HostView, find_bubblewrap, host_view
from prorld.sandbox.link import Child
from prorld.sandbox.seccomp import assemble
from prorld.sandbox.warden_client import Warden

__all__ = ["BubblewrapRuntime", "Overlay", "bubblewrap_argv", "etc_files"]

UID = 1000  # inside; outside it is the warden's user
BOOT_SECONDS = 20.0
CLOSE_SECONDS = 10.0
LAST_WORDS_SECONDS = 1.0
SHM_BYTES = 64 << 20
HOME = "/tmp/home"  # noqa: S108 - of the sandbox

_READY = b"R"
_HOLD = f"printf {_READY.decode()} >&{CONTROL_FD}; while IFS= read -r -u {CONTROL_FD} _; do :; done"
_RESERVED = ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", HOME, "/usr")


class Overlay(msgspec.Struct, frozen=True, kw_only=True):
    """An image and the two directories that one sandbox's changes to it go to."""

    image: str
    upper: str
    work: str


def etc_files() -> tuple[tuple[str, bytes], ...]:
    """The /etc of a sandbox without an image."""
    passwd = (
        f"root:x:0:0:root:/root:/bin/bash\nagent:x:{UID}:{UID}:agent:{HOME}:/bin/bash\n"
        f"nobody:x:65534:65534:nobody:/:/bin/false\n"
    )
    return (
        ("/etc/passwd", passwd.encode()),
        ("/etc/group", f"root:x:0:\nagent:x:{UID}:\nnogroup:x:65534:\n".encode()),
        ("/etc/hosts", b"127.0.0.1 localhost sandbox\n::1 localhost\n"),
        ("/etc/nsswitch.conf", b"passwd: files\ngroup: files\nhosts: files\n"),
    )


def bubblewrap_argv(
    binary: str, spec: SandboxSpec, *, root: HostView | Overlay, filtered: bool, etc: Sequence[str] = ()
) -> list[str]:
    """The command line of a sandbox.

    ``filtered`` says that the first data descriptor holds a seccomp program; the contents of ``etc`` follow it.
    """
    data = iter(range(DATA_FD, DATA_FD + 1 + len(etc)))
    scratch = str(spec.limits.scratch_bytes)
    argv = [binary, "--unshare-all", "--unshare-user", "--disable-userns", "--uid", str(UID), "--gid", str(UID)]
    argv += ["--hostname", "sandbox", "--die-with-parent", "--as-pid-1", "--clearenv", "--info-fd", str(INFO_FD)]
    argv += ["--seccomp", str(next(data))] if filtered else []
    if isinstance(root, Overlay):
        argv += ["--overlay-src", root.image, "--overlay", root.upper, root.work, "/"]
    else:
        argv += _host_root(root)
        for path in etc:
            argv += ["--perms", "0644", "--file", str(next(data)), path]
    argv += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", str(SHM_BYTES), "--tmpfs", "/dev/shm"]  # noqa: S108
    argv += ["--remount-ro", "/dev", "--perms", "1777", "--size", scratch, "--tmpfs", "/tmp", "--dir", HOME]  # noqa: S108
    if isinstance(root, Overlay):
        argv += ["--dir", spec.workdir]
    else:
        argv += ["--size", scratch, "--tmpfs", spec.workdir]
        argv += _interpreter(root)
        argv += ["--remount-ro", "/"]
    return [*argv, "--chdir", "/", "--", "/bin/bash", "--norc", "--noprofile", "-c", _HOLD]


def _host_root(view: HostView) -> list[str]:
    argv: list[str] = []
    for path in view.paths:
        argv += ["--ro-bind", path, path]
    for name, target in view.links:
        argv += ["--symlink", target, name]
    return [*argv, "--dir", "/run", "--symlink", "/tmp", "/var/tmp"]  # noqa: S108


def _interpreter(view: HostView) -> list[str]:
    """After everything that could cover it: an environment may well lie in /tmp."""
    argv: list[str] = []
    for prefix in view.prefixes:
        argv += ["--ro-bind", prefix, prefix]
    for hidden in view.hidden:
        # A file, where it is one: a plugin may be a single module.
        covered = (
            ["--ro-bind", os.devnull, hidden] if hidden.endswith(".py") else ["--tmpfs", hidden, "--remount-ro", hidden]
        )
        argv += covered
    return argv


class BubblewrapRuntime:
    """Sandboxes of the embedded kind. ``warden`` starts their processes, ``runtime_dir`` holds their scratch."""

    name = "bubblewrap"

    def __init__(self, warden: Warden, *, runtime_dir: Path, boot_id: str, hide: Sequence[str] = ()) -> None:
        self._warden = warden
        self._runtime_dir = runtime_dir
        self._boot_id = boot_id
        self._view = host_view(hide)
        self._filter = assemble()
        self._lane = Lane("sandbox files", 4)
        self._memory_lane = Lane("sandbox memory", 2)
        self._boxes: dict[str, Box] = {}

    def list(self) -> tuple[SandboxInfo, ...]:
        """The live sandboxes."""
        return tuple(box.info(self.name) for box in self._boxes.values())

    async def run(
        self,
        spec: SandboxSpec,
        *,
        sandbox_id: str,
        job_id: str,
        task_status: trio.TaskStatus[Sandbox] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Make a sandbox, hand it out, keep it until cancelled, then leave nothing behind. Raises ``SandboxError``."""
        _check_workdir(spec.workdir)
        if sandbox_id in self._boxes:
            raise SandboxError(f"there is a sandbox {sandbox_id} already", retryable=False)
        box = Box(
            self._warden, spec, sandbox_id=sandbox_id, job_id=job_id, env=self._environment(spec), seccomp=self._filter
        )
        self._boxes[sandbox_id] = box
        try:
            with boundary(SandboxError, "making the sandbox's directory"):
                place = await self._lane.run(reaper.make_place, self._runtime_dir, self._boot_id, sandbox_id)

            async def remove() -> None:
                await self._lane.run(reaper.remove_place, place)

            async with afterwards(CLOSE_SECONDS, f"removing the files of {sandbox_id}", remove):
                await self._live(box, place, task_status)
        finally:
            del self._boxes[sandbox_id]

    async def _live(self, box: Box, place: Path, task_status: trio.TaskStatus[Sandbox]) -> None:
        """From the first process to the last."""
        failure: SandboxError | None = None
        closing = afterwards(CLOSE_SECONDS, f"closing {box.sandbox_id}", box.end)
        async with closing, trio.open_nursery() as nursery:
            try:
                holder = await self._hold(box, place)
                await box.furnish(holder, nursery)
                nursery.start_soon(box.mind_memory, self._memory_lane, name=f"memory of {box.sandbox_id}")
                task_status.started(box)
                await holder.wait()
                failure = box.failure or SandboxError(f"sandbox {box.sandbox_id} ended by itself")
            except SandboxError as exc:  # raised below, so that it does not come out as a group
                failure = exc
            finally:
                box.leave()
            nursery.cancel_scope.cancel("the sandbox has ended")
        if failure is not None:
            raise failure

    async def _hold(self, box: Box, place: Path) -> Child:
        """Start the sandbox's first process and wait until the wall stands."""
        root: HostView | Overlay = self._view
        data = [self._filter] if self._filter else []
        etc: list[str] = []
        if box.spec.image is None:
            for path, content in etc_files():
                etc.append(path)
                data.append(content)
        else:
            with boundary(SandboxError, "making the overlay"):
                root = await self._lane.run(_make_overlay, place, box.spec.image, self._warden.uid, self._warden.gid)
        argv = bubblewrap_argv(find_bubblewrap(), box.spec, root=root, filtered=bool(self._filter), etc=etc)
        holder = await self._warden.spawn(argv, env={}, data=data)
        box.hold(holder)
        with boundary(SandboxError, "making the sandbox's directory"):
            reaper.name_process(place, holder.pid)
        with trio.move_on_after(BOOT_SECONDS):
            if await _is_ready(holder):
                return holder
            raise SandboxError(f"bubblewrap: {await _last_words(holder)}")
        raise SandboxError(f"bubblewrap did not come up in {BOOT_SECONDS:.0f} s")

    def _environment(self, spec: SandboxSpec) -> dict[str, str]:
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        if spec.image is None:
            path = f"{sys.prefix}/bin:{path}"
        return {"PATH": path, "HOME": HOME, **spec.env}


async def _is_ready(holder: Child) -> bool:
    try:
        return await holder.control.recv(len(_READY)) == _READY
    except OSError:
        return False


async def _last_words(holder: Child) -> str:
    said = b""
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError), trio.move_on_after(LAST_WORDS_SECONDS):
        while True:
            said = (said + await holder.tty.receive_some(1 << 12))[-500:]
    return said.decode("utf-8", "replace").strip() or "ended without a word"


def _make_overlay(place: Path, image: str, uid: int, gid: int) -> Overlay:
    if not Path(image).is_dir():
        raise SandboxError(f"no such image directory: {image}", retryable=False)
    overlay = Overlay(image=image, upper=str(place / "upper"), work=str(place / "work"))
    for path in (overlay.upper, overlay.work):
        Path(path).mkdir(mode=0o755)
        os.chown(path, uid, gid)
    return overlay


def _check_workdir(path: str) -> None:
    reserved = any(path == name or path.startswith(f"{name}/") for name in _RESERVED)
    if reserved or path == "/" or not path.startswith("/") or posixpath.normpath(path) != path or "\0" in path:
        raise SandboxError(f"{path!r} can't be a sandbox's working directory", retryable=False)
