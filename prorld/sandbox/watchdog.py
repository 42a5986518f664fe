"""The watchdog over what no limit of a process counts: a sandbox's memory and disk as a whole, and its root."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import trio

from prorld.errors import SandboxError
from prorld.kit.lanes import Lane
from prorld.sandbox.families import started
from prorld.sandbox.leftovers import disk_bytes
from prorld.sandbox.memory import Gauge, children, held_bytes, unlinked_bytes

__all__ = ["Post", "Rounds", "over_disk", "over_memory", "over_served_memory", "without_helper"]

MEMORY_LOOK_SECONDS = 1.0
LOOKS_AT_ONCE = 16  # before others get their turn
HELPER_LOOK_SECONDS = 1.0
DISK_LOOK_SECONDS = 2.0
DISK_REST = 20.0  # a look that takes long is followed by a rest of so many times that long


class Post:
    """One sandbox that ``Rounds`` come past. ``look`` is quick; what it says is compared with ``limit``."""

    def __init__(self, look: Callable[[], int | None], limit: int) -> None:
        self._look = look
        self._limit = limit
        self._trouble: Exception | None = None
        self._bell = trio.Event()

    def pass_by(self) -> None:
        """Look, and wake who waits if that looks like too much. What goes wrong is this sandbox's, and no other's."""
        try:
            held = self._look()
        except Exception as exc:  # noqa: BLE001 - raised by the one who waits
            self._trouble, held = exc, None
        if held is None or held > self._limit:
            self._bell.set()

    async def doubted(self) -> None:
        """Wait for a look that is to be followed by a closer one; those during the last closer one are past."""
        self._bell = trio.Event()
        await self._bell.wait()
        if self._trouble is not None:
            raise self._trouble


class Rounds:
    """A look at every sandbox, about once a second.

    Their keepers take turns to go, each until its own sandbox ends: a timer for each would cost more than all looks.
    """

    def __init__(self) -> None:
        self._posts: dict[Post, None] = {}
        self._turn = trio.Lock()
        self._due = 0.0

    @contextmanager
    def posted(self, post: Post) -> Iterator[None]:
        """Come past this one as long as the block lasts, and somebody goes."""
        self._posts[post] = None
        try:
            yield
        finally:
            del self._posts[post]

    async def go(self) -> None:
        """Go until cancelled, as soon as nobody else does."""
        async with self._turn:
            while True:
                await trio.sleep_until(self._due)
                self._due = trio.current_time() + MEMORY_LOOK_SECONDS
                for count, post in enumerate([*self._posts], 1):
                    if post in self._posts:
                        post.pass_by()
                    if not count % LOOKS_AT_ONCE:
                        await trio.lowlevel.checkpoint()


async def over_memory(
    lane: Lane, rounds: Rounds, look: Callable[[], int | None], exact: Callable[[], Callable[[], int]], limit: int
) -> SandboxError:
    """Wait until a sandbox holds more than ``limit``; what to say then. What ``exact`` gives is slow, for the lane."""
    held, post = 0, Post(look, limit)
    with rounds.posted(post):
        while held <= limit:
            await post.doubted()
            held = await lane.run(exact())
    return _too_much("memory", held, limit)


async def over_served_memory(
    lane: Lane, roots: Callable[[], list[int]], scratch: Sequence[str], limit: int
) -> SandboxError:
    """The same where a process serves the sandbox's root file system: any look at it may have to wait for that."""
    held: int | None = 0
    while held is None or held <= limit:
        await trio.sleep(MEMORY_LOOK_SECONDS)
        held = await lane.run(Gauge(scratch).look, roots())
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
