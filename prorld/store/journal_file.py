"""The journal's file, as its writer thread sees it: opening it, one transaction at a time, whether it is still there.

All of this blocks. After an error of the disk the connection is thrown away, since what the file holds is known only
when it is opened anew; and what is opened then must be the same file: an empty one in its place would forget all that
was accepted.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, Protocol, TypeVar
from urllib.parse import quote

from prorld.errors import ConfigError, Overloaded, RequestError
from prorld.store import schema

__all__ = ["BYTES_PER_COMMIT", "DISK_ERRORS", "Change", "JournalFile", "Wanted", "Written"]

T = TypeVar("T")
P = ParamSpec("P")

# What a transaction may bind before the rest waits for the next one: some 0.1 s of a disk that is not fast.
BYTES_PER_COMMIT: Final = 16 << 20
# The write-ahead log is cut back to this when it is empty again.
WAL_KEPT_BYTES: Final = 64 << 20
LOOK_EVERY_S: Final = 1.0
DISK_ERRORS: Final = (sqlite3.Error, OSError, MemoryError)

# Primary codes of SQLite that speak of the statement and not of the disk: a bug of ours, or a value that does not fit.
_OF_THE_CHANGE: Final = frozenset({
    sqlite3.SQLITE_ERROR, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_MISUSE, sqlite3.SQLITE_RANGE,
})  # fmt: skip


class Change(Protocol):
    """One thing that is written. It may be applied twice, when it is not known whether the first time succeeded."""

    def apply(self, db: sqlite3.Connection) -> Any:
        """Write it, inside a transaction, in the writer thread. What it returns is handed to whoever waits.

        An error that is not the disk's undoes what was asked for together with it, reaches whoever asked, and
        disturbs no other.
        """
        ...

    def disown(self, db: sqlite3.Connection) -> None:
        """Take it back: its owner was told that it failed, and it may have reached the disk all the same."""
        ...


class Wanted(NamedTuple):
    """Changes that are written together or not at all. Those that ``grow`` are refused while space is scarce."""

    changes: Sequence[Change]
    grows: bool


class Written(NamedTuple):
    """A transaction that is on the disk.

    ``results`` are of the first ones of what was wanted, as many as fitted: what their changes returned, or why they
    were not written. ``broken`` are errors of what nobody waits for.
    """

    results: list[list[Any] | Exception]
    broken: list[Exception]


class _Counting(sqlite3.Connection):
    """Knows how many bytes were bound."""

    bound = 0

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        """As its parent."""
        self._count(parameters)
        return super().execute(sql, parameters)

    def executemany(self, sql: str, parameters: Iterable[Any], /) -> sqlite3.Cursor:
        """As its parent."""
        rows = list(parameters)
        for row in rows:
            self._count(row)
        return super().executemany(sql, rows)

    def _count(self, parameters: Any) -> None:
        values = parameters.values() if isinstance(parameters, Mapping) else parameters
        for value in values:
            if isinstance(value, (bytes, str)):
                self.bound += len(value)


class JournalFile:
    """One file, and the connection that writes it."""

    def __init__(self, path: Path, *, reserve_bytes: int) -> None:
        self.path = path
        self._reserve = reserve_bytes
        self._db: _Counting | None = None
        self._identity: tuple[int, int] | None = None
        self._looked = -LOOK_EVERY_S
        # Read on the loop between two calls.
        self.scarce: str | None = None

    def open(self) -> None:
        """Open or make it, and bring it to this version. Raises ``ConfigError``."""
        try:
            # Before the first connection only: closing any descriptor of the file drops all of SQLite's locks on it.
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
            # The files beside it get the same rights from SQLite.
            self.path.chmod(0o600)
            self._identity = self._found()
            self._db = self._connect()
            self._look()
        except DISK_ERRORS as exc:
            raise ConfigError(f"{self.path} can't be used: {exc}; {_cure(exc)}") from exc

    def read(self, query: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """``query(connection, ...)``, for what is read once, at the start. Raises ``ConfigError``."""
        assert self._db is not None, "read before open"
        try:
            return query(self._db, *args, **kwargs)
        except DISK_ERRORS as exc:
            raise ConfigError(f"{self.path} can't be read: {exc}; {_cure(exc)}") from exc

    def write(self, disowned: Sequence[Change], lazy: Sequence[Change], wanted: Sequence[Wanted]) -> Written:
        """One transaction. One of ``DISK_ERRORS`` where it is not known whether it is on the disk."""
        self._look()
        db = self._again() if self._db is None else self._db
        try:
            db.execute("BEGIN IMMEDIATE")
            written = self._apply(db, disowned, lazy, wanted)
            db.execute("COMMIT")
        except BaseException:
            self._db = None
            with suppress(sqlite3.Error):
                db.close()
            raise
        return written

    def _apply(
        self, db: _Counting, disowned: Sequence[Change], lazy: Sequence[Change], wanted: Sequence[Wanted]
    ) -> Written:
        db.bound = 0
        alone = [_whole(db, [change.disown]) for change in disowned] + [_whole(db, [change.apply]) for change in lazy]
        results: list[list[Any] | Exception] = []
        for wish in wanted:
            if self.scarce is not None and wish.grows:
                results.append(Overloaded(self.scarce, code="journal_failing", retry_after_s=LOOK_EVERY_S))
            else:
                results.append(_whole(db, [change.apply for change in wish.changes]))
            if db.bound >= BYTES_PER_COMMIT:
                break
        return Written(results, [found for found in alone if isinstance(found, Exception)])

    def close(self) -> None:
        """Let go of it."""
        if self._db is not None:
            self._db.close()
            self._db = None

    # --- the file itself ----------------------------------------------------------------------------------------------

    def _connect(self) -> _Counting:
        # Never makes the file: what was accepted is in the one that there was.
        uri = f"file:{quote(str(self.path))}?mode=rw"
        db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, factory=_Counting)
        try:
            schema.prepare(db, writes=True)
            db.execute(f"PRAGMA journal_size_limit = {WAL_KEPT_BYTES}")
            schema.upgrade(db, str(self.path))
        except BaseException:
            db.close()
            raise
        return db

    def _again(self) -> _Counting:
        try:
            self._db = self._connect()
        except ConfigError as exc:
            raise OSError(exc.message) from exc
        return self._db

    def _look(self) -> None:
        """Whether it is still the file that was opened, and whether what was accepted will find room. Now and then."""
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY_S:
            return
        if self._found() != self._identity:
            self.close()
            raise FileNotFoundError(f"{self.path} was moved or replaced while it was in use")
        seen = os.statvfs(self.path.parent)
        free = seen.f_bavail * seen.f_frsize
        self.scarce = None
        if free < self._reserve:
            self.scarce = (
                f"nothing can be accepted: {free >> 20} MiB are free in {self.path.parent}, and the last"
                f" {self._reserve >> 20} are for the results of what was accepted"
            )
        self._looked = now

    def _found(self) -> tuple[int, int]:
        found = self.path.stat()
        return found.st_dev, found.st_ino


def _whole(db: sqlite3.Connection, steps: Sequence[Callable[[sqlite3.Connection], Any]]) -> list[Any] | Exception:
    """What belongs together, or why none of it was written."""
    db.execute("SAVEPOINT wish")
    try:
        results: list[Any] | Exception = [step(db) for step in steps]
    except Exception as exc:
        if _is_of_the_disk(exc) or not db.in_transaction:
            raise
        db.execute("ROLLBACK TO wish")
        results = exc
    db.execute("RELEASE wish")
    return results


def _is_of_the_disk(exc: Exception) -> bool:
    if isinstance(exc, RequestError) or not isinstance(exc, DISK_ERRORS):
        return False
    if isinstance(exc, (sqlite3.ProgrammingError, sqlite3.InterfaceError)):
        return False
    code: int | None = getattr(exc, "sqlite_errorcode", None)
    return code is None or code & 0xFF not in _OF_THE_CHANGE


def _cure(exc: BaseException) -> str:
    if isinstance(exc, sqlite3.DatabaseError) and not isinstance(exc, sqlite3.OperationalError):
        return "it is damaged: put a backup in its place, or move it and its -wal and -shm away and lose what it holds"
    return "free some space, or repair the disk or the rights of its directory"
