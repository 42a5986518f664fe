"""Disks that fail, for the journal: before anything reached them, or after all of it did."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any, Literal, NoReturn, TypeVar

import msgspec
import trio

from prorld.testing.inline_lane import InlineLane

T = TypeVar("T")

Fault = Literal["before", "after"]


class FaultyLane(InlineLane):
    """Runs calls on the loop; while ``fault`` says so they fail, having done nothing or everything."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.failed = 0

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        fault = self.fault
        await trio.lowlevel.cancel_shielded_checkpoint()
        if fault == "before":
            self._fail()
        result = await super().run(fn, *args)
        if fault == "after":
            self._fail()
        return result

    def _fail(self) -> NoReturn:
        self.failed += 1
        raise sqlite3.OperationalError("disk I/O error")


class Table(msgspec.Struct, frozen=True):
    """Makes the table of the tests' own lines."""

    def apply(self, db: sqlite3.Connection) -> None:
        db.execute(
            "CREATE TABLE IF NOT EXISTS lines (at INTEGER PRIMARY KEY, owner TEXT, n INTEGER, UNIQUE (owner, n))"
        )

    def disown(self, db: sqlite3.Connection) -> None:
        raise AssertionError("the table is there to stay")


class Line(msgspec.Struct, frozen=True):
    """A line of an owner; one that is there already is not written again."""

    owner: str
    n: int
    text: str = ""

    def apply(self, db: sqlite3.Connection) -> int:
        db.execute("INSERT OR IGNORE INTO lines (owner, n) VALUES (?, ?)", (self.owner, self.n))
        return self.n

    def disown(self, db: sqlite3.Connection) -> None:
        db.execute("DELETE FROM lines WHERE owner = ? AND n = ?", (self.owner, self.n))


def lines(db: sqlite3.Connection) -> list[tuple[str, int]]:
    """All of them, in the order in which they came."""
    return [(owner, n) for owner, n in db.execute("SELECT owner, n FROM lines ORDER BY at")]
