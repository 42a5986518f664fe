"""The one runtime: makes sandboxes behind a wall of any kind, keeps them, and leaves nothing of them behind."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.errors import SandboxError, boundary
from prorld.kit.cleanup import afterwards
from prorld.kit.lanes import Lane
from prorld.sandbox import reaper
from prorld.sandbox.box import SPARE_PROCESSES, Box
from prorld.sandbox.cgroups import Subtree, end_cgroup
from prorld.sandbox.contract import Sandbox, SandboxInfo, SandboxSpec
from prorld.sandbox.images.contract import Image, Images, PathImages
from prorld.sandbox.link import Child
from prorld.sandbox.seccomp import assemble
from prorld.sandbox.wall import READY, Build, Enclosing, Enclosure, Holder, Request, Wall
from prorld.sandbox.warden_client import Warden
from prorld.sandbox.watchdog import Rounds

__all__ = ["Runtime"]

log: FilteringBoundLogger = structlog.get_logger()

BOOT_SECONDS = 30.0
CLOSE_SECONDS = 10.0
LAST_WORDS_SECONDS = 1.0
ENVIRONMENT_BYTES_MAX = 32 << 10

_RESERVED = ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/tmp/home", "/usr")  # noqa: S108


class Runtime:
    """Sandboxes of one kind. ``warden`` starts their processes, ``runtime_dir`` holds their scratch.

    ``default_image`` is that of tasks that name none; in ``cgroups`` each sandbox gets one of its own.
    """

    def __init__(
        self,
        wall: Wall,
        warden: Warden,
        *,
        runtime_dir: Path,
        boot_id: str,
        images: Images | None = None,
        default_image: str | None = None,
        cgroups: Subtree | None = None,
    ) -> None:
        self._cgroups = cgroups
        self._default_image = default_image
        self._wall = wall
        self._warden = warden
        self._runtime_dir = runtime_dir
        self._boot_id = boot_id
        self._images = images or PathImages()
        self._filter = assemble()
        self._lane = Lane("sandbox files", 4)
        self._watch_lane = Lane("sandbox watch", 2)
        self._rounds = Rounds()
        self._boxes: dict[str, Box] = {}

    @property
    def name(self) -> str:
        """The kind of its wall."""
        return self._wall.name

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
        spec = _checked(msgspec.structs.replace(spec, image=spec.image or self._default_image))
        for path in (spec.workdir, *spec.writable):
            _check_directory(path)
        _check_environment(spec.env)
        self._wall.check(spec)
        if sandbox_id in self._boxes:
            raise SandboxError(f"there is a sandbox {sandbox_id} already", retryable=False)
        box = Box(self._warden, spec, sandbox_id=sandbox_id, job_id=job_id, seccomp=self._filter)
        self._boxes[sandbox_id] = box
        try:
            image = None if spec.image is None else await self._image(spec.image)
            with boundary(SandboxError, "naming the sandbox's directory"):
                place = reaper.place_of(self._runtime_dir, self._boot_id, sandbox_id)

            async def remove() -> None:
                if box.cgroup is not None and not await self._lane.run(end_cgroup, box.cgroup):
                    log.warning("sandbox.left", place=str(box.cgroup))
                if self._wall.uses_disk(image):
                    await self._lane.run(reaper.remove_place, place)
                reaper.forget_process(place)

            async with afterwards(CLOSE_SECONDS, f"removing the files of {sandbox_id}", remove):
                await self._live(box, place, image, task_status)
        finally:
            del self._boxes[sandbox_id]

    async def _image(self, name: str) -> Image:
        if isinstance(self._wall, Enclosing):
            return await self._wall.resolve(name)
        return await self._images.resolve(name, unpacked=self._wall.unpacked)

    async def _live(self, box: Box, place: Path, image: Image | None, task_status: trio.TaskStatus[Sandbox]) -> None:
        """From the first process to the last."""
        failure: SandboxError | None = None
        closing = afterwards(CLOSE_SECONDS, f"closing {box.sandbox_id}", box.end)
        async with closing, trio.open_nursery() as nursery:
            try:
                holder = await self._hold(box, place, image, nursery)
                await box.furnish(nursery)
                mind = partial(box.mind, self._watch_lane, self._rounds)
                nursery.start_soon(mind, name=f"limits of {box.sandbox_id}")
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

    async def _hold(self, box: Box, place: Path, image: Image | None, nursery: trio.Nursery) -> Holder:
        """Start the sandbox's first process and wait until the wall stands."""
        request = Request(
            spec=box.spec,
            sandbox_id=box.sandbox_id,
            place=place,
            image=image,
            uid=self._warden.uid,
            gid=self._warden.gid,
        )
        with boundary(SandboxError, f"preparing {self.name}"):
            build = await self._prepare(request)
        if isinstance(self._wall, Enclosing):
            enclosure: Enclosure = await nursery.start(partial(self._wall.enclose, request))
            box.hold(enclosure.first, build, warden=enclosure.warden)
            return enclosure.first
        cgroup = await self._cgroup(box)
        holder = await self._warden.spawn(
            build.argv, env=build.env, data=build.data, helpers=build.helpers, marker=build.marker, cgroup=cgroup
        )
        box.hold(holder, build)
        with boundary(SandboxError, "putting the sandbox on record"):
            reaper.name_process(place, holder.pid, holder.begun, build.marker)
        limits = box.limits if build.has_namespaces else {}
        with trio.move_on_after(BOOT_SECONDS):
            if await holder.greeting(READY, limits):
                return holder
            raise SandboxError(f"{self.name}: {await _last_words(holder)}")
        raise SandboxError(f"{self.name} did not come up in {BOOT_SECONDS:.0f} s")

    async def _cgroup(self, box: Box) -> Path | None:
        """The cgroup of a sandbox, where there can be one, with its limits."""
        if self._cgroups is None:
            return None
        limits = box.spec.limits
        files = {
            "memory.max": limits.memory_bytes,
            "memory.swap.max": 0,
            "memory.oom.group": 1,
            "pids.max": limits.processes + SPARE_PROCESSES,
        }
        with boundary(SandboxError, "making the sandbox's cgroup"):
            box.cgroup = await self._lane.run(self._cgroups.make, box.sandbox_id, files)
        return box.cgroup

    async def _prepare(self, request: Request) -> Build:
        """Without a thread where nothing is put on disk: changing to one and back would cost more than all the rest."""
        if self._wall.uses_disk(request.image):
            return await self._lane.run(self._make_files, request)
        if not request.place.parent.is_dir():
            await self._lane.run(reaper.make_boot, request.place)
        return self._wall.build(request)

    def _make_files(self, request: Request) -> Build:
        reaper.make_place(self._runtime_dir, self._boot_id, request.sandbox_id)
        return self._wall.build(request)


async def _last_words(holder: Child) -> str:
    said = b""
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError), trio.move_on_after(LAST_WORDS_SECONDS):
        while piece := await holder.tty.receive_some(1 << 12):
            said = (said + piece)[-500:]
    return said.decode("utf-8", "replace").strip() or "ended without a word"


def _checked(spec: SandboxSpec) -> SandboxSpec:
    """A struct takes whatever code gives it; what no sandbox can be made of is said before anything is begun."""
    try:
        return msgspec.convert(msgspec.to_builtins(spec), SandboxSpec)
    except (msgspec.ValidationError, TypeError) as exc:
        raise SandboxError(f"the spec of the sandbox: {exc}", retryable=False) from None


def _check_directory(path: str) -> None:
    reserved = any(path == name or path.startswith(f"{name}/") for name in _RESERVED)
    if reserved or path == "/" or not path.startswith("/") or posixpath.normpath(path) != path or "\0" in path:
        raise SandboxError(
            f"{path!r} can't be a sandbox's working directory, or another that it writes to", retryable=False
        )


def _check_environment(env: Mapping[str, str]) -> None:
    """No program could be started with what is refused here, and the first one would be found out about late."""
    total = 0
    for name, value in env.items():
        try:
            raw = os.fsencode(f"{name}={value}")
        except UnicodeEncodeError:
            raw = b"\0"
        total += len(raw)
        if not name or "=" in name or b"\0" in raw:
            raise SandboxError(f"{name!r} can't be a variable of a sandbox's environment", retryable=False)
    if total > ENVIRONMENT_BYTES_MAX:
        words = f"a sandbox's environment can't be larger than {ENVIRONMENT_BYTES_MAX} bytes, and this has {total}"
        raise SandboxError(words, retryable=False)
