"""The watchdog over what no limit of a process counts: the memory and the disk of a sandbox as a whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import trio

from prorld.kit.lanes import Lane
from prorld.sandbox.memory import glance, held_bytes

__all__ = ["disk_bytes", "over_disk", "over_memory"]

MEMORY_LOOK_SECONDS = 1.0
DISK_LOOK_SECONDS = 2.0
DISK_REST = 20.0  # a look that takes long is followed by a rest of so many times that long
_BLOCK_BYTES = 512


async def over_memory(
    lane: Lane, roots: Callable[[], list[int]], scratch: Sequence[str], limit: int
) -> tuple[int, int]:
    """Wait until the processes below ``roots`` and their ``scratch`` hold more than ``limit``; how much, and that."""
    held: int | None = 0
    while held is None or held <= limit:
        await trio.sleep(MEMORY_LOOK_SECONDS)
        held = glance(roots(), scratch)
        if held is None or held > limit:
            held = await lane.run(held_bytes, roots(), scratch)
    return held, limit


async def over_disk(lane: Lane, places: Sequence[str], limit: int) -> tuple[int, int]:
    """Wait until the directories hold more than ``limit`` on disk; how much they hold, and that limit."""
    held, rest = 0, DISK_LOOK_SECONDS
    while held <= limit:
        await trio.sleep(rest)
        began = trio.current_time()
        held = await lane.run(partial(disk_bytes, places, stop_at=limit))
        rest = max(DISK_LOOK_SECONDS, DISK_REST * (trio.current_time() - began))
    return held, limit


def disk_bytes(places: Sequence[str], *, stop_at: int) -> int:
    """What lies below the directories, as far as this user can see; stops counting once it is over ``stop_at``."""
    total = 0
    todo = list(places)
    while todo and total <= stop_at:
        with suppress(OSError), os.scandir(todo.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_blocks * _BLOCK_BYTES
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(entry.path)
                if total > stop_at:
                    break
    return total
