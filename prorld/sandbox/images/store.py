"""The store of images on this host: found by name, digest, reference or path, unpacked once, removed when unused.

``ImageStore`` is what runtimes and the command line use. It never blocks the event loop: files are handled in a lane,
Apptainer works in child processes, and of these only so many unpack at once. What it resolved stays until ``close`` or
the end of the process: nobody removes an image under a live sandbox.
"""

from __future__ import annotations

import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from prorld.errors import SandboxError
from prorld.kit.cleanup import afterwards
from prorld.kit.lanes import Lane
from prorld.kit.process import run_group
from prorld.sandbox.images.apptainer import Apptainer
from prorld.sandbox.images.contract import Image, ImageKind
from prorld.sandbox.images.look import environment_of
from prorld.sandbox.images.modes import key_of
from prorld.sandbox.images.progress import Progress, Silence, tick_of
from prorld.sandbox.images.records import Found, ImageRecord, is_reference
from prorld.sandbox.images.shelf import ROOT, SIF, Shelf, Staging, instant
from prorld.sandbox.images.tree import TreeSize, copy_file, digest_file, digest_tree, furnish, make_harmless

__all__ = ["ImageStore", "delete", "is_sif", "kind_at"]

UNPACKINGS_MAX = 2
LANE_THREADS = 4
# For another process of this host that removes the image, and for one that unpacks it.
HOLD_SECONDS_MAX = 10.0
UNPACKED_ELSEWHERE_SECONDS_MAX = 1800.0
REMOVE_SECONDS_MAX = 120.0
# Whoever asks whether an image is in use holds it for a moment, too.
REMOVE_TRIES = 4

_PAUSE_SECONDS = 0.05
# Behind a line for the kernel that is 32 bytes long.
_SIF_MAGIC, _SIF_MAGIC_AT = b"SIF_MAGIC", 32


class ImageStore:
    """Images in ``directory``. Where this process is root, ``owner`` is the user and group that sandboxes run as."""

    def __init__(self, directory: Path, *, owner: tuple[int, int] | None = None, apptainer: str | None = None) -> None:
        self.directory = directory.absolute()
        self.owner = owner
        self.apptainer = Apptainer(apptainer, owner)
        self.shelf = Shelf(self.directory, owner)
        self.lane = Lane("images", LANE_THREADS)
        self._unpackers = trio.CapacityLimiter(UNPACKINGS_MAX)
        self._turns: dict[str, trio.Lock] = {}
        self._held: dict[str, int] = {}
        self._prepared = False

    def close(self) -> None:
        """Let go of every image that was resolved."""
        for lock in self._held.values():
            os.close(lock)
        self._held.clear()

    async def prepare(self) -> None:
        """Make the directory of the store what it has to be. Raises ``SandboxError``."""
        if self._prepared:
            await trio.lowlevel.checkpoint()
            return
        await self.lane.run(self.shelf.prepare)
        self._prepared = True

    async def resolve(self, name: str, *, unpacked: bool) -> Image:
        """The image that a path, a name, a digest or a reference that was pulled stands for.

        With ``unpacked`` it is a directory, unpacked first where nobody has done that yet. Raises ``SandboxError``:
        ``no_image``, ``image_broken``, ``no_apptainer``, or ``images_dir``, which alone may pass by itself.
        """
        if name.startswith("/"):
            return await self._resolve_path(name, unpacked=unpacked)
        await self.prepare()
        record = await self.find(name)
        return await self._ready(name, record, unpacked=unpacked)

    async def find(self, name: str) -> ImageRecord:
        """The record of a name or digest; the image stays until this store is closed."""
        await self.prepare()
        for _ in range(2):
            digest = await self.lane.run(self.shelf.digest_of, name)
            if digest is None:
                break
            await self.hold(digest)
            record = await self.lane.run(self.shelf.record, digest)
            if record is not None:
                return record
            self._release(digest)
        cure = (
            f"`prorld image pull {name}` brings it here"
            if is_reference(name)
            else "`prorld image list` names what there is"
        )
        raise SandboxError(f"there is no image {name!r} in the store; {cure}", code="no_image", retryable=False)

    async def hold(self, digest: str) -> None:
        """Keep an image from being removed until this store is closed."""
        if digest in self._held:
            await trio.lowlevel.checkpoint()
            return
        deadline = trio.current_time() + HOLD_SECONDS_MAX
        while (lock := await self.lane.run(self.shelf.hold, digest)) is None:
            if trio.current_time() > deadline:
                raise SandboxError(f"the image {digest} is being removed", code="image_busy", retryable=True)
            await trio.sleep(_PAUSE_SECONDS)
        if digest in self._held:  # another task of this process was faster
            os.close(lock)
        else:
            self._held[digest] = lock

    def _release(self, digest: str) -> None:
        lock = self._held.pop(digest, None)
        if lock is not None:
            os.close(lock)

    async def _ready(
        self, name: str, record: ImageRecord, *, unpacked: bool, progress: Progress | None = None
    ) -> Image:
        path = self.shelf.path(record)
        kind = record.kind
        if kind == "sif" and unpacked:
            path, kind = await self.unpack(record, progress or Silence()), "directory"
        elif not await self.lane.run(path.exists):
            raise SandboxError(f"the image {name!r} has lost its files", code="image_broken", retryable=False)
        await self.lane.run(self.shelf.touch, record.digest)
        env = await self.lane.run(environment_of, path) if kind == "directory" else record.env
        return Image(name=name, path=str(path), kind=kind, env=env)

    async def _resolve_path(self, name: str, *, unpacked: bool) -> Image:
        path = Path(name)
        kind = await self.lane.run(kind_at, path)
        if kind is None:
            raise SandboxError(f"there is no image at {name!r}", code="no_image", retryable=False)
        if kind == "directory":
            return Image(name=name, path=name, kind=kind, env=await self.lane.run(environment_of, path))
        if not unpacked:
            return Image(name=name, path=name, kind=kind)
        await self.prepare()
        return await self._ready(name, await self.take_in_sif(path, Silence()), unpacked=True)

    # --- what stands behind a name ------------------------------------------------------------------------------------

    async def take_in_sif(self, path: Path, progress: Progress) -> ImageRecord:
        """The record of a SIF file that lies somewhere else, copied into the store where it is not there yet."""
        key = await self.lane.run(_key_of_file, path)
        # A group of jobs asks for one file at once, and it may be large: one copies it.
        async with self._turns.setdefault(key, trio.Lock()):
            return await self._take_in_sif(path, key, progress)

    async def _take_in_sif(self, path: Path, key: str, progress: Progress) -> ImageRecord:
        known = await self.lane.run(self.shelf.by_key, key)
        if known is not None:
            await self.hold(known)
            record = await self.lane.run(self.shelf.record, known)
            if record is not None:
                return record
        if not await self.lane.run(is_sif, path):
            raise SandboxError(f"{path} is no SIF file", code="image_broken", retryable=False)
        async with self.staged() as staging:
            size = (await self.lane.run(path.stat)).st_size
            progress.step(f"copying {path.name}", total_bytes=size)
            target = staging.image / SIF
            digest = await self.lane.run(copy_file, path, target, tick_of(progress))
            record = ImageRecord(
                digest=f"sha256:{digest}", kind="sif", source=str(path), origin="path", mode="lock", size_bytes=size,
                created_at=instant(),
            )  # fmt: skip
            await self.publish(staging, record)
        await self.lane.run(self.shelf.remember, key, record.digest)
        return record

    async def publish(self, staging: Staging, record: ImageRecord) -> None:
        """Put what was made into the store, and keep it until this store is closed."""
        await self.hold(record.digest)
        if record.kind == "sif":
            await self.lane.run(_seal, staging.image / SIF)
        await self.lane.run(self.shelf.publish, staging, record)

    async def unpack(self, record: ImageRecord, progress: Progress) -> Path:
        """The directory that a SIF file is unpacked to. Whoever comes first unpacks it, all others wait for that."""
        target = self.shelf.unpacked(record.digest)
        if await self.lane.run(target.is_dir):
            return target
        turn = self._turns.setdefault(record.digest, trio.Lock())
        async with turn, self._alone(record.digest):
            if not await self.lane.run(target.is_dir):
                async with self._unpackers:
                    await self._unpack(record, progress)
        return target

    async def _unpack(self, record: ImageRecord, progress: Progress) -> None:
        sif = self.shelf.path(record)
        progress.step("checking the file", total_bytes=record.size_bytes)
        try:
            digest = await self.lane.run(digest_file, sif, tick_of(progress))
        except OSError as exc:
            raise SandboxError(f"{sif} can't be read", code="image_broken", retryable=False) from exc
        if f"sha256:{digest}" != record.digest:
            raise SandboxError(f"{sif} is not what it was when it was stored", code="image_broken", retryable=False)
        async with self.staged() as staging:
            progress.step("unpacking")
            await self.apptainer.unpack(sif, staging.work / "out", staging.work, said=progress.said)
            size = await self.lane.run(self.settle, staging, staging.work / "out", progress)
            await self.lane.run(self.shelf.publish_unpacked, staging, record.digest, size.size_bytes)

    @asynccontextmanager
    async def _alone(self, digest: str) -> AsyncIterator[None]:
        """Be the only process of this host that unpacks this image."""
        deadline = trio.current_time() + UNPACKED_ELSEWHERE_SECONDS_MAX
        while (lock := await self.lane.run(self.shelf.hold_unpacking, digest)) is None:
            if trio.current_time() > deadline:
                raise SandboxError(f"another process unpacks {digest} for ever", code="image_busy", retryable=True)
            await trio.sleep(_PAUSE_SECONDS)
        try:
            yield
        finally:
            os.close(lock)

    def settle(self, staging: Staging, made: Path, progress: Progress) -> TreeSize:
        """Take a root file system out of the hands of whoever made it, and make it harmless and complete. Blocking."""
        root = staging.image / ROOT
        if made != root:
            if self.owner is None and not made.is_symlink():
                made.chmod(0o700)
            made.rename(root)
        tick = tick_of(progress)
        size = make_harmless(root, self.owner, tick)
        furnish(root, self.owner)
        return size

    @asynccontextmanager
    async def staged(self) -> AsyncIterator[Staging]:
        """A place to make an image in; what is left there goes at the end."""
        await self.prepare()
        staging = await self.lane.run(self.shelf.stage)

        async def clear() -> None:
            await delete(staging.place)
            await self.lane.run(staging.let_go)

        async with afterwards(REMOVE_SECONDS_MAX, f"removing {staging.place}", clear):
            try:
                yield staging
            except OSError as exc:
                words = f"{exc.filename or self.directory}: {exc.strerror or exc}"
                raise SandboxError(f"an image could not be made: {words}", code="images_dir") from exc

    # --- what is there ------------------------------------------------------------------------------------------------

    async def list(self) -> list[Found]:
        """Every image, the one used last first."""
        await self.prepare()
        return await self.lane.run(self.shelf.all)

    async def verify(self, record: ImageRecord, progress: Progress) -> bool:
        """Whether an image is what it was when it was stored."""
        path = self.shelf.path(record)
        progress.step("checking", total_bytes=record.size_bytes)
        check = digest_file if record.kind == "sif" else digest_tree
        try:
            return f"sha256:{await self.lane.run(check, path, tick_of(progress))}" == record.digest
        except OSError:
            return False

    async def remove(self, digest: str) -> bool:
        """Remove an image and its names; ``False`` where a process uses it. This store lets go of it first."""
        self._release(digest)
        for _ in range(REMOVE_TRIES):
            trash = await self.lane.run(self.shelf.take_away, digest)
            if trash is not None:
                await delete(trash)
                return True
            await trio.sleep(_PAUSE_SECONDS)
        return False


async def delete(path: Path) -> None:
    """Remove a tree, whatever the modes and however deep: by the system's own programs, which follow no link."""
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C"}
    if os.geteuid() != 0:
        await run_group(["chmod", "-R", "u+rwX", "--", str(path)], env=env)
    done = await run_group(["rm", "-rf", "--one-file-system", "--", str(path)], env=env)
    if done.exit_code != 0:
        words = done.stderr.decode("utf-8", "replace").strip()[:500]
        raise SandboxError(f"{path} could not be removed: {words}", code="images_dir", retryable=True)


def kind_at(path: Path) -> ImageKind | None:
    """What stands at a path that a task named; whatever it may be, this only looks."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return None
    return "directory" if stat.S_ISDIR(mode) else "sif" if stat.S_ISREG(mode) else None


def is_sif(path: Path) -> bool:
    """Whether a file begins as SIF files do."""
    try:
        with path.open("rb") as file:
            file.seek(_SIF_MAGIC_AT)
            return file.read(len(_SIF_MAGIC)) == _SIF_MAGIC
    except OSError:
        return False


def _seal(path: Path) -> None:
    """A SIF file in the store is this process's own, and read by all who may pass its directory."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.geteuid() == 0:
            os.fchown(fd, 0, 0)
        os.fchmod(fd, 0o444)
    finally:
        os.close(fd)


def _key_of_file(path: Path) -> str:
    found = path.stat()
    return key_of("path", str(path.resolve()), str(found.st_ino), str(found.st_size), str(found.st_mtime_ns))
