"""The journal: one SQLite file, one writer thread, and commits that many share.

It owns the order in which changes reach the file, and what happens when the disk does not take them. It knows no
jobs: a ``Change`` knows its own tables. While one commit is on its way to the disk the next changes gather, so the
number of commits follows the disk and not the load.

What is committed survives a power cut. Nothing is told to anybody before that: ``commit`` returns after it, and a
``Trail`` is shown up to what was written. While the disk fails or does not answer, ``commit`` refuses, and what has
happened already (``owe``) is kept in its order and tried again.
"""

from __future__ import annotations

import math
import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.errors import Overloaded, RequestError
from prorld.kit.lanes import Lane
from prorld.metrics import Metrics
from prorld.store.journal_file import DISK_ERRORS, Change, JournalFile, Wanted

__all__ = ["JOURNAL_FILE", "RESERVE_BYTES", "Change", "Journal", "Runner", "Trail"]

T = TypeVar("T")
P = ParamSpec("P")

log: FilteringBoundLogger = structlog.get_logger("prorld.store")

JOURNAL_FILE: Final = "journal.sqlite"
# One transaction: enough to share a commit, few enough that whoever comes next waits some milliseconds for it.
CHANGES_PER_COMMIT: Final = 256
# Of those, what somebody waits for leaves to what nobody waits for, so that neither keeps the other away.
TRAILS_PER_COMMIT: Final = 64
# What nobody waits for waits this long for company: a short job then leaves nothing but its end, and a long one a row
# for many events.
LAZY_S: Final = 0.1
# After the first failure, and at most.
RETRY_S: Final = 0.5
RETRY_S_MAX: Final = 8.0
# A disk that has not taken a commit within this is no disk to promise anything on.
STALL_S: Final = 10.0
# At the end: for the last commits. What the disk does not take in this time was never told to anybody.
CLOSE_S: Final = 10.0
# How often a lack of space is looked at again while nobody writes.
SCARCE_LOOK_S: Final = 2.0
# Free space below which nothing is accepted any more: room for the ends of some thousand accepted jobs.
RESERVE_BYTES: Final = 256 << 20


class Trail(Protocol):
    """Something that grows, and is written when there is time."""

    def take(self) -> Change | None:
        """What is not written yet, all of it; ``None`` when there is nothing. Called on the loop, before a commit.

        Until ``written`` it may be called again, for the disk has not taken what it gave before.
        """
        ...

    def written(self) -> None:
        """What was taken is on the disk. Called on the loop; may neither block nor raise."""
        ...


class Runner(Protocol):
    """Where blocking calls run: a ``Lane`` of one thread, or for tests that own the clock the loop itself."""

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        """Call it, one call at a time."""
        ...


class _Wish:
    """Changes that belong together: all of them are written, in one transaction, or none."""

    __slots__ = ("changes", "done", "error", "grows", "is_owed", "results")

    def __init__(self, changes: Sequence[Change], *, is_owed: bool, grows: bool) -> None:
        self.changes = changes
        self.is_owed = is_owed
        self.grows = grows
        self.done = trio.Event()
        self.results: list[Any] = []
        self.error: Exception | None = None

    def ends(self, found: list[Any] | Exception) -> None:
        """Tell whoever waits; what was told before stays."""
        if self.done.is_set():
            return
        if isinstance(found, Exception):
            self.error = found
        else:
            self.results = found
        self.done.set()


class Journal:
    """The journal of one state directory. ``open`` before anything else; ``run`` is the actor.

    ``trouble`` says why the file can't be written now, ``scarce`` why nothing more is accepted into it; ``None`` while
    all is well.
    """

    def __init__(
        self,
        directory: Path,
        *,
        lane: Runner | None = None,
        metrics: Metrics | None = None,
        reserve_bytes: int = RESERVE_BYTES,
    ) -> None:
        self.path = directory / JOURNAL_FILE
        self.trouble: str | None = None
        self._file = JournalFile(self.path, reserve_bytes=reserve_bytes)
        self._lane = Lane("journal", 1) if lane is None else lane
        self._metrics = metrics
        self._wishes: deque[_Wish] = deque()
        self._trails: dict[Trail, None] = {}
        self._inflight: list[_Wish] = []
        self._disowned: list[Change] = []
        # Something is to be written; somebody waits for it; a commit has begun; it has ended; the end is near.
        self._wake, self._urgent = trio.Event(), trio.Event()
        self._began, self._ended = trio.Event(), trio.Event()
        self._closing = trio.Event()
        self._closed = False
        self._retry_s = RETRY_S
        # When the trails are looked at next; until then the commits of others leave them alone.
        self._lazy_at = -math.inf

    @property
    def scarce(self) -> str | None:
        """Why nothing more is accepted, though what was accepted can be written."""
        return self._file.scarce

    # --- the file -----------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Open or make the file, and bring it to this version. Raises ``ConfigError``."""
        await self._call(self._file.open)

    async def read(
        self, query: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """``query(connection, ...)``, for what is read once, at the start. Raises ``ConfigError``."""
        return await self._call(lambda: self._file.read(query, *args, **kwargs))

    async def _call(self, fn: Callable[[], T]) -> T:
        if isinstance(self._lane, Lane):
            # A thread that hangs on a dead disk is left behind at the end; before, the scope around lets none go.
            return await self._lane.run(fn, abandon_on_cancel=True)
        return await self._lane.run(fn)

    # --- asking -------------------------------------------------------------------------------------------------------

    async def commit(self, *changes: Change, grows: bool = True) -> list[Any]:
        """Write all of them or none, and return when they are on the disk. ``Overloaded`` when the disk refuses.

        ``grows=False`` is for what makes room, or is needed to end what was accepted: it is written into the reserve,
        too. Cancelled, they may be written all the same.
        """
        if self.trouble is not None or self._closing.is_set():
            await trio.lowlevel.checkpoint()
            self.must_take()
        return await self._ask(_Wish(changes, is_owed=False, grows=grows))

    def must_take(self) -> None:
        """``Overloaded`` where ``commit`` would be refused now."""
        if self.trouble is not None or self._closing.is_set():
            raise self._refusal()

    async def owe(self, *changes: Change) -> list[Any]:
        """The same for what has happened and must be told: tried again, in its order, until the disk takes it.

        ``Overloaded`` only where the daemon ends before.
        """
        return await self._ask(_Wish(changes, is_owed=True, grows=False))

    def soon(self, trail: Trail) -> None:
        """Write what the trail has grown by, before long. Never blocks."""
        if trail not in self._trails:
            if not self._trails:
                self._lazy_at = trio.current_time() + LAZY_S
            self._trails[trail] = None
            self._wake.set()

    async def _ask(self, wish: _Wish) -> list[Any]:
        if self._closed:
            await trio.lowlevel.checkpoint()
            raise self._refusal()
        self._wishes.append(wish)
        self._wake.set()
        self._urgent.set()
        await wish.done.wait()
        if wish.error is not None:
            raise wish.error
        return wish.results

    def _refusal(self) -> Overloaded:
        words = self.trouble or "the daemon is going away"
        return Overloaded(
            f"nothing can be accepted: {words}", retry_after_s=max(1.0, self._retry_s), code="journal_failing"
        )

    # --- writing ------------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write until cancelled; what was asked for until then is written first, within ``CLOSE_S``."""
        scope = trio.CancelScope(shield=True)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, name="journal watch")
                nursery.start_soon(self._write_all, scope, name="journal writer")
                task_status.started()
                try:
                    await trio.sleep_forever()
                finally:
                    self._closing.set()
                    self._wake.set()
                    self._urgent.set()
                    scope.deadline = trio.current_time() + CLOSE_S
        finally:
            self._closed = True
            for wish in (*self._inflight, *self._wishes):
                wish.ends(self._refusal())

    async def _write_all(self, scope: trio.CancelScope) -> None:
        with scope:
            while not self._closing.is_set():
                await self._wait_for_work()
                if not await self._round():
                    with trio.move_on_after(self._retry_s):
                        await self._closing.wait()
                    self._retry_s = min(self._retry_s * 2, RETRY_S_MAX)
            # The last ones. A disk that fails once more fails.
            while (self._wishes or self._trails or self._disowned) and await self._round():
                pass
            try:
                await self._call(self._file.close)
            except DISK_ERRORS as exc:
                # All that was told is in the log beside the file, and the next start reads it there.
                log.warning("journal.failing", error=f"the journal can't be closed: {exc}", path=str(self.path))

    async def _wait_for_work(self) -> None:
        with trio.move_on_after(math.inf if self.scarce is None else SCARCE_LOOK_S):
            await self._wake.wait()
        if not self._wishes:
            with trio.move_on_at(self._lazy_at if self._trails else -math.inf):
                await self._urgent.wait()

    async def _round(self) -> bool:
        """One commit, and the word to everybody whose change is in it; whether the disk took it."""
        self._wake, self._urgent = trio.Event(), trio.Event()
        wishes = self._next_wishes()
        trails = self._next_trails(CHANGES_PER_COMMIT - sum(len(wish.changes) for wish in wishes))
        disowned = list(self._disowned)
        if self._wishes or self._trails:
            self._wake.set()
        if self._wishes or (self._trails and trails):
            self._urgent.set()
        if not (wishes or trails or disowned or self.scarce):
            return True
        lazy = [change for _, change in trails]
        wanted = [Wanted(wish.changes, wish.grows) for wish in wishes]
        began, self._inflight = trio.current_time(), wishes
        self._began.set()
        try:
            written = await self._call(lambda: self._file.write(disowned, lazy, wanted))
        except DISK_ERRORS as exc:
            self._failed(exc, wishes, trails)
            return False
        finally:
            self._ended.set()
            self._began, self._ended = trio.Event(), trio.Event()
        del self._disowned[: len(disowned)]
        self._wrote(wishes, written.results)
        self._broken(written.broken)
        for trail, _ in trails:
            self._shown(trail)
        if self._metrics is not None:
            changes = len(trails) + sum(len(wish.changes) for wish in wishes[: len(written.results)])
            self._metrics.journal_committed(changes, seconds=trio.current_time() - began)
        self._measure()
        return True

    def _next_wishes(self) -> list[_Wish]:
        """In their order, as many as leave the trails their share."""
        room = CHANGES_PER_COMMIT - (min(len(self._trails), TRAILS_PER_COMMIT) if self._is_time() else 0)
        wishes: list[_Wish] = []
        while self._wishes and room > 0:
            wishes.append(self._wishes.popleft())
            room -= len(wishes[-1].changes)
        return wishes

    def _is_time(self) -> bool:
        """Whether the trails have waited long enough."""
        return trio.current_time() >= self._lazy_at or self._closing.is_set()

    def _next_trails(self, room: int) -> list[tuple[Trail, Change]]:
        trails: list[tuple[Trail, Change]] = []
        if not self._is_time():
            return trails
        for trail in list(self._trails)[: max(1, room)]:
            del self._trails[trail]
            try:
                taken = trail.take()
            except Exception as exc:
                log.exception("journal.crashed", exc_info=exc)
                continue
            if taken is not None:
                trails.append((trail, taken))
        return trails

    def _wrote(self, wishes: list[_Wish], results: Sequence[list[Any] | Exception]) -> None:
        """It is on the disk."""
        for wish in reversed(wishes[len(results) :]):
            # Those before it were large enough for one commit.
            if not wish.done.is_set():
                self._wishes.appendleft(wish)
        self._inflight = []
        if self.trouble is not None:
            log.info("journal.recovered", trouble=self.trouble)
            self.trouble, self._retry_s = None, RETRY_S
        self._broken([found for found in results if isinstance(found, Exception)])
        for wish, found in zip(wishes, results, strict=False):
            wish.ends(found)
        if self._wishes or self._disowned:
            self._wake.set()
            self._urgent.set()

    def _failed(self, exc: BaseException, wishes: list[_Wish], trails: list[tuple[Trail, Change]]) -> None:
        """It is not, or nobody knows."""
        self._in_trouble(f"the journal can't be written: {exc}")
        self._inflight = []
        for wish in reversed(wishes):
            if not wish.done.is_set():
                self._wishes.appendleft(wish)
        for trail, _ in trails:
            self._trails[trail] = None
        self._wake.set()

    # --- when the disk fails ------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """A commit that does not end is trouble, too."""
        while True:
            # Both at once: by the time that it runs again, another commit may be the one that has begun.
            began, ended = self._began, self._ended
            await began.wait()
            with trio.move_on_after(STALL_S):
                await ended.wait()
            if not ended.is_set():
                self._in_trouble(f"the journal's disk has not answered for {STALL_S:g} s")
                await ended.wait()

    def _in_trouble(self, words: str) -> None:
        """Refuse whoever waits to be accepted. What is on its way to the disk may arrive there: it is disowned."""
        if self.trouble is None:
            log.error("journal.failing", error=words, path=str(self.path))
        self.trouble = words
        for wish in self._inflight:
            if not (wish.is_owed or wish.done.is_set()):
                self._disowned.extend(wish.changes)
                wish.ends(self._refusal())
        for wish in self._wishes:
            if not wish.is_owed:
                wish.ends(self._refusal())
        self._wishes = deque(wish for wish in self._wishes if wish.is_owed)
        self._measure()

    # --- telling ------------------------------------------------------------------------------------------------------

    def _shown(self, trail: Trail) -> None:
        try:
            trail.written()
        except Exception as exc:
            log.exception("journal.crashed", exc_info=exc)

    def _broken(self, errors: Sequence[Exception]) -> None:
        """Bugs of ours in what was to be written. Each cost itself alone; whoever waits is told as well."""
        for error in errors:
            if not isinstance(error, RequestError):
                log.error("journal.crashed", exc_info=error)

    def _measure(self) -> None:
        if self._metrics is not None:
            waiting = len(self._wishes) + len(self._trails)
            self._metrics.journal_seen(waiting=waiting, failing=self.trouble is not None or self.scarce is not None)
