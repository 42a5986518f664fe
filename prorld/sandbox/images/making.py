"""Bringing images into the store: pulled from a registry or a place on this host, or built from a definition."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from prorld.errors import SandboxError
from prorld.sandbox.images.look import environment_said
from prorld.sandbox.images.modes import definition_key, key_of, reference_key
from prorld.sandbox.images.progress import Progress, tick_of
from prorld.sandbox.images.records import ImageRecord, Mode, Origin, check_name, is_name, is_reference, name_for
from prorld.sandbox.images.shelf import ROOT, SIF, Staging, instant
from prorld.sandbox.images.store import ImageStore, is_sif
from prorld.sandbox.images.tree import Tick, TreeSize, copy_file, copy_tree, digest_file, digest_tree, make_harmless

__all__ = ["Made", "build", "keep_directory", "known_by", "pull"]

# The names of a definition in a directory, the first one wins.
DEFINITIONS = ("Apptainer", "Singularity", "Apptainer.def", "Singularity.def")

_ARCHIVES = ("oci-archive", "docker-archive", "oci")
_LEFT_OUT_MAX = 20


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """An image that is in the store now. ``reused``: it was there already. ``left_out`` are files nobody could read."""

    name: str
    record: ImageRecord
    reused: bool
    left_out: tuple[str, ...] = ()
    left_out_count: int = 0


async def pull(
    store: ImageStore,
    source: str,
    *,
    name: str | None,
    mode: Mode,
    expected: str | None = None,
    progress: Progress,
) -> Made:
    """Bring an image here: a reference, a SIF file or a directory. ``expected`` is the digest that it must have.

    What lies on this host is copied and known by its content. A reference is fetched again as ``mode`` says.
    """
    await store.prepare()
    called = check_name(name or name_for(source))
    if is_reference(source):
        made = await _pull_reference(store, source, called, mode, progress)
    else:
        made = await _pull_path(store, _local(source), called, mode, progress)
    if expected is not None and made.record.digest != expected:
        if not made.reused:
            await store.remove(made.record.digest)
        raise SandboxError(
            f"{source} has the digest {made.record.digest}, and {expected} was expected",
            code="image_broken",
            retryable=False,
        )
    # A task may name the reference itself; an address with odd letters has the given name alone.
    is_name_too = is_reference(source) and not source.startswith(_ARCHIVES) and is_name(source)
    for alias in {called, source} if is_name_too else {called}:
        await store.lane.run(store.shelf.call, alias, made.record.digest)
    return made


def _local(source: str) -> Path:
    if not source:
        # The path of nothing is the directory where one is, which nobody has named.
        raise SandboxError("nothing was named to make an image of", code="bad_reference", retryable=False)
    path = Path(source).expanduser()
    scheme, found, _ = source.partition("://")
    if found:
        words = (
            "http:// can't be trusted; use https://" if scheme == "http" else f"unknown kind of reference {scheme}://"
        )
        raise SandboxError(f"{source}: {words}", code="bad_reference", retryable=False)
    return path.absolute()


async def _pull_reference(store: ImageStore, reference: str, name: str, mode: Mode, progress: Progress) -> Made:
    scheme, _, rest = reference.partition(":")
    key = None
    if scheme in _ARCHIVES:
        key = await store.lane.run(_archive_key, scheme, rest, mode, tick_of(progress))
    else:
        key = reference_key(reference, mode, platform.machine())
    if (found := await known_by(store, key)) is not None:
        return Made(name=name, record=found, reused=True)
    store.apptainer.program()
    async with store.staged() as staging:
        output = staging.work / "out.sif"
        progress.step(f"pulling {reference}")
        if scheme in _ARCHIVES:
            source = await store.lane.run(_hand_over, store, staging, scheme, rest, progress)
            await store.apptainer.build(
                source, output, staging.work, cwd=str(staging.place), options=(), said=progress.said
            )
        else:
            await store.apptainer.pull(reference, output, staging.work, said=progress.said)
        record = await _keep_sif(store, staging, output, source=reference, origin="pull", mode=mode, progress=progress)
    # Noted under `versioned` whatever the mode was: that is what this reference stands for since now.
    for noted in {key, reference_key(reference, "versioned", platform.machine())} - {None}:
        await store.lane.run(store.shelf.remember, str(noted), record.digest)
    return Made(name=name, record=record, reused=False)


def _archive_key(scheme: str, rest: str, mode: Mode, tick: Tick) -> str | None:
    """An archive is known by its content, whatever it is called; but not where it shall always be made again."""
    path = Path(rest.partition(":")[0])
    if mode == "scratch" or not path.exists():
        return None
    try:
        digest = digest_tree(path, tick) if path.is_dir() else digest_file(path, tick)
    except OSError as exc:
        raise SandboxError(f"{path} can't be read: {exc.strerror}", code="bad_reference", retryable=False) from exc
    return key_of(scheme, rest.partition(":")[2], digest)


def _hand_over(store: ImageStore, staging: Staging, scheme: str, rest: str, progress: Progress) -> str:
    """Copy an archive to where whoever makes the image can read it; the reference to the copy. Blocking."""
    path, colon, tag = rest.partition(":")
    source, target = Path(path).absolute(), staging.place / "source"
    if not source.exists():
        raise SandboxError(f"there is no {source}", code="no_image", retryable=False)
    if not source.is_dir() and not source.is_file():
        raise SandboxError(f"{source} is no regular file", code="bad_reference", retryable=False)
    if source.is_dir():
        copy_tree(source, target, tick_of(progress))
        make_harmless(target, store.owner, tick_of(progress))
    else:
        copy_file(source, target, tick_of(progress))
        target.chmod(0o644)
    return f"{scheme}:{target}{colon}{tag}"


async def _pull_path(store: ImageStore, path: Path, name: str, mode: Mode, progress: Progress) -> Made:
    if await store.lane.run(path.is_file):
        if not await store.lane.run(is_sif, path):
            words = "neither a SIF file nor a directory; for archives say docker-archive:FILE or oci-archive:FILE"
            raise SandboxError(f"{path} is {words}", code="bad_reference", retryable=False)
        before = {item.record.digest for item in await store.list()}
        record = await store.take_in_sif(path, progress)
        return Made(name=name, record=record, reused=record.digest in before)
    if not await store.lane.run(path.is_dir):
        raise SandboxError(f"there is no image at {path}", code="no_image", retryable=False)
    if await store.lane.run(_holds, path, store.directory):
        words = f"the store {store.directory} is in it, and would be copied into itself"
        raise SandboxError(f"{path} can't be taken in: {words}", code="bad_reference", retryable=False)
    async with store.staged() as staging:
        progress.step(f"copying {path}")
        unread = await store.lane.run(copy_tree, path, staging.image / ROOT, tick_of(progress))
        record, reused = await keep_directory(
            store, staging, staging.image / ROOT, source=str(path), origin="pull", mode=mode, progress=progress
        )
    return Made(
        name=name, record=record, reused=reused, left_out=tuple(unread[:_LEFT_OUT_MAX]), left_out_count=len(unread)
    )


def _holds(place: Path, directory: Path) -> bool:
    return directory.resolve().is_relative_to(place.resolve())


async def build(
    store: ImageStore,
    source: str,
    *,
    name: str | None,
    mode: Mode,
    arguments: Mapping[str, str],
    lock_files: Sequence[str] = (),
    progress: Progress,
) -> Made:
    """Build an image from an Apptainer definition, or from the one in a directory."""
    await store.prepare()
    definition = await store.lane.run(_definition, source)
    in_directory = definition.name in DEFINITIONS
    called = check_name(name or name_for(str(definition.parent if in_directory else definition)))
    progress.step("reading the definition and what it copies")
    key = await store.lane.run(
        partial(
            definition_key,
            definition,
            mode,
            arguments=arguments,
            lock_files=[Path(file) for file in lock_files],
            extra=platform.machine(),
            tick=tick_of(progress),
        )
    )
    if (found := await known_by(store, key)) is not None:
        await store.lane.run(store.shelf.call, called, found.digest)
        return Made(name=called, record=found, reused=True)
    store.apptainer.program()
    options = tuple(word for item in sorted(arguments.items()) for word in ("--build-arg", "=".join(item)))
    async with store.staged() as staging:
        recipe = staging.work / "definition"
        await store.lane.run(shutil.copyfile, definition, recipe)
        progress.step(f"building {called}")
        output = staging.work / "out.sif"
        await store.apptainer.build(
            str(recipe), output, staging.work, cwd=str(definition.parent), options=options, said=progress.said
        )
        record = await _keep_sif(
            store, staging, output, source=str(definition), origin="build", mode=mode, progress=progress
        )
    if key is not None:
        await store.lane.run(store.shelf.remember, key, record.digest)
    await store.lane.run(store.shelf.call, called, record.digest)
    return Made(name=called, record=record, reused=False)


def _definition(source: str) -> Path:
    path = _local(source)
    if path.is_file():
        return path
    found = [path / name for name in DEFINITIONS if (path / name).is_file()] or sorted(path.glob("*.def"))
    if not found:
        words = f"has no definition (one of {', '.join(DEFINITIONS)}, or NAME.def)" if path.is_dir() else "is not there"
        raise SandboxError(f"{path} {words}", code="bad_definition", retryable=False)
    return found[0]


async def known_by(store: ImageStore, key: str | None) -> ImageRecord | None:
    """What was made under this key and is there still; it stays until the store is closed."""
    digest = None if key is None else await store.lane.run(store.shelf.by_key, key)
    if digest is None:
        return None
    await store.hold(digest)
    return await store.lane.run(store.shelf.record, digest)


async def _keep_sif(
    store: ImageStore,
    staging: Staging,
    output: Path,
    *,
    source: str,
    origin: Origin,
    mode: Mode,
    progress: Progress,
) -> ImageRecord:
    """Take over a SIF file that Apptainer has made."""
    target = staging.image / SIF
    env = environment_said(await store.apptainer.inspect(output, staging.work))
    size = await store.lane.run(_take_over, output, target)
    progress.step("taking its digest", total_bytes=size)
    digest = await store.lane.run(digest_file, target, tick_of(progress))
    record = ImageRecord(
        digest=f"sha256:{digest}", kind="sif", source=source, origin=origin, mode=mode, size_bytes=size,
        created_at=instant(), made_with=store.apptainer.program(), env=env,
    )  # fmt: skip
    await store.publish(staging, record)
    return record


def _take_over(output: Path, target: Path) -> int:
    if output.is_symlink() or not is_sif(output):
        raise SandboxError("what Apptainer made is no SIF file", code="image_broken", retryable=False)
    output.rename(target)
    return target.stat().st_size


async def keep_directory(
    store: ImageStore,
    staging: Staging,
    made: Path,
    *,
    source: str,
    origin: Origin,
    mode: Mode,
    progress: Progress,
    packages: tuple[str, ...] = (),
) -> tuple[ImageRecord, bool]:
    """Take a root file system into the store; its record, and whether one of this content was there before."""
    size: TreeSize = await store.lane.run(store.settle, staging, made, progress)
    progress.step("taking its digest", total_bytes=size.size_bytes)
    digest = f"sha256:{await store.lane.run(digest_tree, staging.image / ROOT, tick_of(progress))}"
    await store.hold(digest)
    known = await store.lane.run(store.shelf.record, digest)
    if known is not None:
        return known, True
    record = ImageRecord(
        digest=digest, kind="directory", source=source, origin=origin, mode=mode, size_bytes=size.size_bytes,
        created_at=instant(), packages=packages,
    )  # fmt: skip
    await store.publish(staging, record)
    return record, False
