"""What of batches is kept for somebody, and what may be forgotten.

The jobs of a group are held until its terminal event is acknowledged, whatever its end was. Of a batch that is over
they are released as well once nothing is left of it that was accepted and waits to be acknowledged.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Final

import msgspec

__all__ = [
    "FORGETTABLE",
    "LAST",
    "Acknowledged",
    "BatchesForgotten",
    "EventsForgotten",
    "Owed",
    "ready",
    "release",
    "release_through",
]

# The rows of groups that have their end here, and are no leftovers; those that were carried on lie in another batch.
_SETTLED: Final = "end IS NOT NULL AND end != 'carried'"
LAST: Final = 2**62


class Owed(msgspec.Struct, frozen=True, kw_only=True):
    """A change that is never refused."""

    def disown(self, db: sqlite3.Connection) -> None:
        """What has happened is never taken back."""


class Acknowledged(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer is done with everything up to a number, and with some more groups. ``apply`` gives what is ready."""

    serial: int
    tenant: str
    through: int
    discard: Sequence[str] = ()

    def apply(self, db: sqlite3.Connection) -> int:
        """Write it; what was acknowledged stays acknowledged."""
        db.execute(
            "UPDATE batch_events INDEXED BY batch_groups SET is_discarded = 1 WHERE batch = ? AND is_ready = 1"
            " AND group_id IN (SELECT value FROM json_each(?))",
            (self.serial, msgspec.json.encode(self.discard).decode()),
        )
        (before, is_over) = db.execute(
            "SELECT acknowledged, state != 'running' FROM batches WHERE serial = ?", (self.serial,)
        ).fetchone()
        db.execute(
            "UPDATE batches SET acknowledged = max(acknowledged, ?) WHERE serial = ?", (self.through, self.serial)
        )
        release(db, self.tenant, self.discard)
        left = ready(db, self.serial)
        # Of one that is over nobody will come for the others, once all that was accepted is acknowledged.
        through = self.through if left or not is_over else LAST
        release_through(db, self.serial, self.tenant, after=before, through=through)
        return left

    def disown(self, db: sqlite3.Connection) -> None:
        """It can't be taken back, and need not: whoever acknowledges has it safe."""


class EventsForgotten(Owed, frozen=True, kw_only=True):
    """Of a batch that runs, the acknowledged events that are older than the newest ``keep``, and their groups.

    ``apply`` takes a slice of them and gives how many.
    """

    serial: int
    keep: int
    most: int

    def apply(self, db: sqlite3.Connection) -> int:
        """Forget them."""
        first, last, acknowledged = db.execute(
            "SELECT min(seq), max(seq), (SELECT acknowledged FROM batches WHERE serial = ?1)"
            " FROM batch_events WHERE batch = ?1",
            (self.serial,),
        ).fetchone()
        if first is None:
            return 0
        upto = min(acknowledged, last - self.keep, first + self.most - 1)
        db.execute(
            f"DELETE FROM groups INDEXED BY groups_by_id WHERE batch = ?1 AND {_SETTLED} AND group_id IN"  # noqa: S608 - constants
            " (SELECT group_id FROM batch_events WHERE batch = ?1 AND seq <= ?2)",
            (self.serial, upto),
        )
        return db.execute("DELETE FROM batch_events WHERE batch = ? AND seq <= ?", (self.serial, upto)).rowcount


# None that has leftovers, an accepted group that nobody has acknowledged, or a group that runs on elsewhere.
FORGETTABLE: Final = (
    "state NOT IN ('running', 'forgotten')"
    " AND serial NOT IN (SELECT origin FROM groups WHERE end IS NULL UNION"
    "  SELECT origin FROM groups WHERE end = 'carried' UNION SELECT batch FROM groups WHERE end = 'carried')"
    " AND NOT EXISTS (SELECT 1 FROM batch_events AS one WHERE one.batch = serial AND one.is_ready = 1"
    "  AND one.is_discarded = 0 AND one.seq > acknowledged)"
)


class BatchesForgotten(Owed, frozen=True, kw_only=True):
    """Of ended batches that nobody needs nothing but the id is left, of the oldest first.

    Those that ended before an instant, and others while there are ``count`` too many or ``bytes`` too much. ``apply``
    takes a slice of them and gives of each how much it took.
    """

    before: str
    most: int
    count: int = 0
    bytes: int = 0

    def apply(self, db: sqlite3.Connection) -> list[int]:
        """Forget them."""
        found = db.execute(
            f"SELECT serial, kept_bytes, ended_at FROM batches WHERE {FORGETTABLE}"  # noqa: S608 - constants
            " ORDER BY serial LIMIT ?",
            (self.most,),
        ).fetchall()
        gone: list[int] = []
        for serial, size, ended_at in found:
            is_much = len(gone) < self.count or sum(gone) < self.bytes
            if not (is_much or ended_at < self.before):
                break
            gone.append(size)
            for table in ("batch_events", "groups"):
                db.execute(f"DELETE FROM {table} WHERE batch = ?", (serial,))  # noqa: S608 - constants
            db.execute(
                "UPDATE batches SET state = 'forgotten', spec = NULL, record = NULL, progress = NULL, kept_bytes = 0"
                " WHERE serial = ?",
                (serial,),
            )
        return gone


def ready(db: sqlite3.Connection, serial: int) -> int:
    """Accepted groups that nobody has acknowledged."""
    found: int = db.execute(
        "SELECT count(*) FROM batch_events WHERE batch = ?1 AND is_ready = 1 AND is_discarded = 0"
        " AND seq > (SELECT acknowledged FROM batches WHERE serial = ?1)",
        (serial,),
    ).fetchone()[0]
    return found


def release(db: sqlite3.Connection, tenant: str, group_ids: Sequence[str]) -> None:
    """Their jobs may be forgotten from now on."""
    db.executemany(
        "UPDATE jobs SET held = 0 WHERE group_id = ? AND tenant = ? AND held = 1",
        [(group_id, tenant) for group_id in group_ids],
    )


def release_through(db: sqlite3.Connection, serial: int, tenant: str, *, after: int, through: int) -> None:
    """The same for groups by the numbers of their terminal events."""
    found = db.execute(
        f"SELECT group_id FROM groups INDEXED BY groups_by_id WHERE batch = ?1 AND {_SETTLED} AND group_id IN"  # noqa: S608 - constants
        " (SELECT group_id FROM batch_events WHERE batch = ?1 AND seq > ?2 AND seq <= ?3)",
        (serial, after, through),
    )
    release(db, tenant, [group_id for (group_id,) in found.fetchall()])
