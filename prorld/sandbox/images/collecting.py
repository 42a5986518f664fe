"""Removing what nobody needs: leftovers, images without a name, old ones, and the least used when there is too much."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec

from prorld.errors import SandboxError
from prorld.sandbox.images.records import Found
from prorld.sandbox.images.store import ImageStore, delete

__all__ = ["Collected", "Removed", "collect", "remove", "unneeded"]


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """What was removed, and what could not be since a process uses it."""

    removed: tuple[Found, ...]
    in_use: tuple[Found, ...]
    freed_bytes: int
    leftovers: int


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    """A name that is gone; ``image`` says whether its image went with it, which other names keep."""

    name: str
    digest: str
    image: bool


async def remove(store: ImageStore, name: str) -> Removed:
    """Remove a name, and its image with the last one; a digest removes the image with all its names."""
    await store.prepare()
    digest = await store.lane.run(store.shelf.digest_of, name)
    if digest is None:
        raise SandboxError(f"there is no image {name!r} in the store", code="no_image", retryable=False)
    names = {other for other, its in (await store.lane.run(store.shelf.names)).items() if its == digest}
    if not name.startswith("sha256:") and names != {name}:
        await store.lane.run(store.shelf.uncall, name)
        return Removed(name=name, digest=digest, image=False)
    if not await store.remove(digest):
        raise SandboxError(f"the image {name!r} is in use", code="image_busy", retryable=True)
    return Removed(name=name, digest=digest, image=True)


def unneeded(
    images: list[Found], now: datetime, *, unused_days: float | None, keep_bytes: int | None
) -> tuple[list[Found], list[Found]]:
    """What may go, and what would go if it were not in use. ``images`` come the one used last first."""
    limit = None if unused_days is None else f"{now - timedelta(days=unused_days):%Y-%m-%dT%H:%M:%SZ}"
    going = [item for item in images if _is_lost(item) or (limit is not None and item.used_at < limit)]
    if keep_bytes is not None:
        total = sum(item.disk_bytes for item in images if item not in going or item.in_use)
        for item in reversed(images):
            if total > keep_bytes and item not in going:
                going.append(item)
                total -= 0 if item.in_use else item.disk_bytes
    return [item for item in going if not item.in_use], [item for item in going if item.in_use]


def _is_lost(item: Found) -> bool:
    """Whether no task can ask for it: SIF files that were named by their paths have no other names."""
    return item.broken or (not item.names and item.record.origin != "path")


async def collect(
    store: ImageStore, *, unused_days: float | None, keep_bytes: int | None, dry_run: bool = False
) -> Collected:
    """Remove leftovers, images without a name, those unused for so long, and the least used over ``keep_bytes``."""
    images = await store.list()
    going, busy = unneeded(images, datetime.now(UTC), unused_days=unused_days, keep_bytes=keep_bytes)
    if dry_run:
        return Collected(
            removed=tuple(going), in_use=tuple(busy), freed_bytes=sum(item.disk_bytes for item in going), leftovers=0
        )
    removed = []
    for item in going:
        if await store.remove(item.record.digest):
            removed.append(item)
        else:
            busy.append(item)
    left = await store.lane.run(store.shelf.leftovers)
    for place in left:
        await delete(place)
    return Collected(
        removed=tuple(removed),
        in_use=tuple(busy),
        freed_bytes=sum(item.disk_bytes for item in removed),
        leftovers=len(left),
    )
