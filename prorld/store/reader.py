"""Reading the journal beside its writer: a few threads, a connection for each, and nothing that they could change.

What is committed is seen at once. A reader never waits for the writer, nor the writer for it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, Final, ParamSpec, TypeVar
from urllib.parse import quote

import trio

from prorld.domain.job import JobState
from prorld.errors import Overloaded
from prorld.kit.lanes import Lane
from prorld.store import lookups, schema
from prorld.store.jobs import Known, StoredJob
from prorld.store.journal import Runner
from prorld.wire.jobs import JobRecord

__all__ = ["Reader"]

T = TypeVar("T")
P = ParamSpec("P")

READERS: Final = 2
# So many steps of SQLite's machine between two looks whether anybody still waits: well under a millisecond.
STEPS_PER_LOOK: Final = 20_000
PAGE_MAX: Final = 1000


class _Call:
    """One question on its way. ``is_left`` is set on the loop when its asker goes away, and read in the thread."""

    __slots__ = ("is_left",)

    def __init__(self) -> None:
        self.is_left = False


class Reader:
    """Questions about what the journal holds. They may be cancelled at any time; their thread ends soon after."""

    def __init__(self, path: Path, threads: int = READERS, *, lane: Runner | None = None) -> None:
        self.path = path
        self._lane = Lane("journal readers", threads) if lane is None else lane
        self._threads = threads
        # Connections that nobody uses. ``append`` and ``pop`` are atomic, and a connection is in one thread at a time.
        self._idle: list[sqlite3.Connection] = []
        self._closed = False

    async def open(self) -> None:
        """Open a connection for each thread, so that nothing but questions is left for later."""
        await self._lane.run(lambda: self._idle.extend(self._connect() for _ in range(self._threads)))

    # --- one job ------------------------------------------------------------------------------------------------------

    async def known(self, tenant: str, job_id: str) -> Known | None:
        """What is known of a tenant's id."""
        return await self.ask(lookups.known, tenant, job_id)

    async def candidates(self, job_id: str) -> dict[str, Known]:
        """For an admin, who names no tenant: what is known of this id, by tenant."""
        return await self.ask(lookups.candidates, job_id)

    async def stored(self, serial: int) -> StoredJob | None:
        """All of an ended job, or ``None`` where there is nothing (any more). ``Forgotten`` where it is damaged."""
        return await self.ask(lookups.stored, serial)

    # --- many ---------------------------------------------------------------------------------------------------------

    async def page(
        self,
        tenant: str | None,
        *,
        state: JobState | None = None,
        handler: str | None = None,
        group_id: str | None = None,
        limit: int = 50,
        before_serial: int | None = None,
    ) -> list[tuple[int, JobRecord]]:
        """Ended jobs with their serial numbers, newest first; of another state than ``done`` there is none here."""
        if state not in (None, JobState.DONE):
            await trio.lowlevel.checkpoint()
            return []
        return await self.ask(lookups.page, tenant, handler, group_id, min(limit, PAGE_MAX), before_serial)

    async def counts(self) -> dict[str, int]:
        """Jobs ``live``, ``done`` and ``forgotten``."""
        return await self.ask(lookups.counts)

    async def kept_by_tenant(self) -> dict[str, int]:
        """Bytes of ended jobs by tenant."""
        return await self.ask(lookups.kept_by_tenant)

    # --- asking -------------------------------------------------------------------------------------------------------

    async def ask(self, query: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """``query(connection, ...)`` in a thread. ``Overloaded`` where the file can't be read now."""
        call = _Call()

        def run() -> T:
            return self._run(call, lambda db: query(db, *args, **kwargs))

        try:
            if isinstance(self._lane, Lane):
                return await self._lane.run(run, abandon_on_cancel=True)
            return await self._lane.run(run)
        except (sqlite3.Error, OSError) as exc:
            raise Overloaded(f"the journal can't be read: {exc}", code="journal_failing") from exc
        finally:
            call.is_left = True

    def _run(self, call: _Call, query: Callable[[sqlite3.Connection], T]) -> T:
        db = self._connection()
        db.set_progress_handler(lambda: call.is_left, STEPS_PER_LOOK)
        try:
            found = query(db)
        except sqlite3.Error:
            # It may be of a file that is not there any more: the next question opens what is there then.
            db.close()
            raise
        except BaseException:
            self._give_back(db)
            raise
        self._give_back(db)
        return found

    def _connection(self) -> sqlite3.Connection:
        try:
            return self._idle.pop()
        except IndexError:
            return self._connect()

    def _connect(self) -> sqlite3.Connection:
        # Never makes the file: a reader that is too early fails, rather than leave an empty one.
        uri = f"file:{quote(str(self.path))}?mode=rw"
        db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
        schema.prepare(db, writes=False)
        return db

    def _give_back(self, db: sqlite3.Connection) -> None:
        self._idle.append(db)
        if self._closed:
            self._close_idle()

    async def aclose(self) -> None:
        """Close what is open; what is in use is closed by its thread when it is done."""
        self._closed = True
        await self._lane.run(self._close_idle)

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()
