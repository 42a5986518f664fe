"""What ``prorld image`` does, and how it shows it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Awaitable, Callable
from contextlib import closing
from functools import partial
from typing import Any, TypeVar

import msgspec

from prorld.cli.configuration import load_for_sandboxes
from prorld.cli.exits import Exit
from prorld.cli.image_progress import StepLines, sized
from prorld.cli.output import clean, count, note, say, say_json, table
from prorld.cli.running import interruptible, run_trio
from prorld.errors import SandboxError
from prorld.ops.walls import image_store
from prorld.sandbox.images.collecting import Collected, Removed, collect, remove
from prorld.sandbox.images.look import Contents, look
from prorld.sandbox.images.making import Made, build, pull
from prorld.sandbox.images.records import Found
from prorld.sandbox.images.rootfs import DEFAULT, IPYTHON, make_rootfs
from prorld.sandbox.images.store import ImageStore

__all__ = ["build_image", "collect_garbage", "inspect", "list_images", "make_image", "pull_image", "remove_images"]

T = TypeVar("T")

_SHORT_DIGEST = len("sha256:") + 12


class Inspected(msgspec.Struct, frozen=True, kw_only=True):
    """An image with what is in it; ``contents`` is ``None`` where nobody could look, and ``trouble`` says why."""

    image: Found
    path: str
    contents: Contents | None
    trouble: str | None
    intact: bool | None


def pull_image(args: argparse.Namespace) -> int:
    """``prorld image pull``."""

    async def work(store: ImageStore, progress: StepLines) -> Made:
        return await pull(
            store, args.source, name=args.name, mode=args.mode, expected=args.digest, progress=progress
        )  # fmt: skip

    return _say_made(_with_store(args, work), args)


def build_image(args: argparse.Namespace) -> int:
    """``prorld image build``."""

    async def work(store: ImageStore, progress: StepLines) -> Made:
        return await build(
            store, args.source, name=args.name, mode=args.mode, arguments=dict(args.arg), lock_files=args.lock_file,
            progress=progress,
        )  # fmt: skip

    return _say_made(_with_store(args, work), args)


def make_image(args: argparse.Namespace) -> int:
    """``prorld image rootfs``."""
    packages = [*args.packages, *(IPYTHON if args.ipython else ())]
    if args.ipython and not args.packages:
        packages += DEFAULT

    async def work(store: ImageStore, progress: StepLines) -> Made:
        return await make_rootfs(store, args.name, packages, mode=args.mode, progress=progress)

    return _say_made(_with_store(args, work), args)


def list_images(args: argparse.Namespace) -> int:
    """``prorld image list``."""

    async def work(store: ImageStore, _: StepLines) -> list[Found]:
        return await store.list()

    found = _with_store(args, work)
    if args.json:
        say_json(found)
    elif not found:
        say("no images; `prorld image rootfs NAME` makes a small one")
    else:
        headers = ("NAME", "DIGEST", "KIND", "SIZE", "USED", "STATE")
        rows = [(", ".join(item.names) or "-", *_cells(item)) for item in found]
        say(*table(headers, rows, right=frozenset({"SIZE"})))
    return Exit.OK


def inspect(args: argparse.Namespace) -> int:
    """``prorld image inspect``."""

    async def work(store: ImageStore, progress: StepLines) -> Inspected:
        record = await store.find(args.image)
        contents, trouble, path = None, None, store.shelf.path(record)
        intact = await store.verify(record, progress) if args.verify else None
        try:
            root = path if record.kind == "directory" else await store.unpack(record, progress)
            contents = await store.lane.run(look, root)
        except (SandboxError, OSError) as exc:
            trouble = exc.message if isinstance(exc, SandboxError) else str(exc.strerror)
        # What this command itself holds is no use of the image.
        store.close()
        image = await store.lane.run(store.shelf.found, record.digest)
        if image is None:
            raise SandboxError(f"the image {args.image!r} was removed meanwhile", code="no_image", retryable=False)
        return Inspected(image=image, path=str(path), contents=contents, trouble=trouble, intact=intact)

    shown = _with_store(args, work)
    if args.json:
        say_json(shown)
    else:
        say(*_lines(shown))
    return Exit.FAILED if shown.intact is False else Exit.OK


def remove_images(args: argparse.Namespace) -> int:
    """``prorld image rm``: all that can be removed are, and then the first that could not is told."""

    async def work(store: ImageStore, _: StepLines) -> tuple[list[Removed], SandboxError | None]:
        removed: list[Removed] = []
        failure: SandboxError | None = None
        for name in args.images:
            try:
                removed.append(await remove(store, name))
            except SandboxError as exc:
                failure = failure or exc
        return removed, failure

    removed, failure = _with_store(args, work)
    if args.json:
        say_json(removed)
    else:
        for item in removed:
            say(f"{clean(item.name)}: " + ("removed" if item.image else "this name is gone; the image has others"))
    if failure is not None:
        raise failure
    return Exit.OK


def collect_garbage(args: argparse.Namespace) -> int:
    """``prorld image gc``."""

    async def work(store: ImageStore, _: StepLines) -> Collected:
        return await collect(store, unused_days=args.unused_days, keep_bytes=args.keep, dry_run=args.dry_run)

    done = _with_store(args, work)
    if args.json:
        say_json(done)
        return Exit.OK
    rows = [(", ".join(item.names) or "-", *_cells(item)) for item in (*done.removed, *done.in_use)]
    if rows:
        say(*table(("NAME", "DIGEST", "KIND", "SIZE", "USED", "STATE"), rows, right=frozenset({"SIZE"})))
    verb = "would be removed" if args.dry_run else "removed"
    left = f", and {count(done.leftovers, 'leftover')}" if done.leftovers else ""
    say(f"{count(len(done.removed), 'image')} {verb}, {sized(done.freed_bytes)}{left}")
    if done.in_use:
        say(f"{count(len(done.in_use), 'image')} kept, being in use")
    return Exit.OK


def _with_store(args: argparse.Namespace, work: Callable[[ImageStore, StepLines], Awaitable[T]]) -> T:
    """Open the store that the options name, do the work, and let go of everything; Ctrl-C ends it cleanly."""
    loaded = load_for_sandboxes(args, **{"sandbox.images_dir": args.images_dir})
    with closing(image_store(loaded)) as store, closing(StepLines(sys.stderr)) as progress:
        return run_trio(partial(interruptible, partial(work, store, progress)))


def _say_made(made: Made, args: argparse.Namespace) -> int:
    if args.json:
        say_json(made)
        return Exit.OK
    record = made.record
    how = "was there already" if made.reused else "is there now"
    say(f"{clean(made.name)} {how}: {record.kind}, {sized(record.size_bytes)}, {record.digest}")
    if made.left_out_count:
        some = clean(", ".join(made.left_out[:3])) + (" ..." if made.left_out_count > 3 else "")
        note(f"left out, since nobody may read it: {count(made.left_out_count, 'file')}: {some}")
    return Exit.OK


def _cells(item: Found) -> tuple[str, ...]:
    states = [word for word, is_so in (("broken", item.broken), ("in use", item.in_use)) if is_so]
    if item.record.kind == "sif" and item.unpacked:
        states.append("unpacked")
    record = item.record
    return record.digest[:_SHORT_DIGEST], record.kind, sized(item.disk_bytes), item.used_at, ", ".join(states)


def _lines(shown: Inspected) -> list[str]:
    item, record = shown.image, shown.image.record
    pairs: list[tuple[str, Any]] = [
        ("names", ", ".join(item.names)), ("digest", record.digest), ("kind", record.kind), ("path", shown.path),
        ("size", f"{sized(record.size_bytes)}, {sized(item.disk_bytes)} on the disk"), ("source", record.source),
        ("made by", f"{record.origin}, mode {record.mode}"), ("created", record.created_at), ("used", item.used_at),
        ("in use", "yes" if item.in_use else "no"),
    ]  # fmt: skip
    if shown.intact is not None:
        pairs.append(("content", "as it was stored" if shown.intact else "NOT what was stored"))
    contents = shown.contents
    if contents is None:
        pairs.append(("contents", f"unknown: {shown.trouble}"))
    else:
        pairs += [
            ("system", contents.system),
            ("libc", contents.libc),
            ("misses", ", ".join(contents.misses) or "nothing"),
        ]
        pairs += [("has", f"{name} ({path})") for name, path in contents.programs.items()]
    env = record.env if contents is None else contents.env
    pairs += [("env", f"{name}={value}") for name, value in env.items()]
    return [f"{name:<9}{clean(str(value))}".rstrip() for name, value in pairs]
