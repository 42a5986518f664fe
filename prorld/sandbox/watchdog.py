"""The watchdog over what no limit of a process counts: a sandbox's memory and disk as a whole, and its root."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import trio

from prorld.errors import SandboxError
from prorld.kit.lanes import Lane
from prorld.sandbox.families import started
from prorld.sandbox.leftovers import disk_bytes
from prorld.sandbox.memory import children, glance, held_bytes, unlinked_bytes

__all__ = ["over_disk", "over_memory", "without_helper"]

MEMORY_LOOK_SECONDS = 1.0
HELPER_LOOK_SECONDS = 1.0
DISK_LOOK_SECONDS = 2.0
DISK_REST = 20.0  # a look that takes long is followed by a rest of so many times that long


async def over_memory(
    lane: Lane, roots: Callable[[], list[int]], scratch: Sequence[str], limit: int, *, served: bool
) -> SandboxError:
    """Wait until the processes below ``roots`` and their ``scratch`` hold more than ``limit``; what to say then.

    A root file system that is ``served`` by a process may let a look at it wait.
    """
    held: int | None = 0
    while held is None or held <= limit:
        await trio.sleep(MEMORY_LOOK_SECONDS)
        held = await lane.run(glance, roots(), scratch) if served else glance(roots(), scratch)
        if held is None or held > limit:
            held = await lane.run(held_bytes, roots(), scratch)
    return _too_much("memory", held, limit)


async def over_disk(
    lane: Lane, roots: Callable[[], list[int]], places: Sequence[str], scratch: Sequence[str], limit: int
) -> SandboxError:
    """Wait until the directories hold more than ``limit`` on disk; what to say then.

    What processes below ``roots`` have unlinked and kept open is in no directory, and counted with it.
    """
    held, rest = 0, DISK_LOOK_SECONDS
    while held <= limit:
        await trio.sleep(rest)
        began = trio.current_time()
        held = await lane.run(partial(unlinked_bytes, roots(), scratch, stop_at=limit))
        for place in places:
            held += await lane.run(partial(disk_bytes, place, stop_at=limit))
        rest = max(DISK_LOOK_SECONDS, DISK_REST * (trio.current_time() - began))
    return _too_much("disk", held, limit)


async def without_helper(outermost: int, first: int) -> SandboxError:
    """Wait until something that the runtime has started beside the sandbox has ended; what to say then.

    It served the sandbox's root file system, and nobody but those inside can see that this is gone.
    """
    helpers = {pid: started(pid) for pid in children(outermost) if pid != first}
    while all(started(pid) == begun for pid, begun in helpers.items()):  # noqa: ASYNC110 - strangers tell nobody
        await trio.sleep(HELPER_LOOK_SECONDS)
    return SandboxError("what served the sandbox's root file system has ended", code="sandbox_lost_root")


def _too_much(what: str, held: int, limit: int) -> SandboxError:
    words = f"the sandbox held {held} bytes of {what}, {limit} are its limit"
    return SandboxError(words, code=f"sandbox_out_of_{what}", retryable=False)
