"""Batches in the journal: what is written when one is accepted, grows, settles groups, is acknowledged and ends.

A group has one row, which lies in the batch where the group is now: carrying moves it. What was told of it is in the
events of each batch, and those are never changed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from prorld.domain.batch import BatchRules, BatchState, Leftovers
from prorld.domain.job import AgentLimits, Sampling, StageTimeouts
from prorld.errors import Conflict
from prorld.store.batch_keeping import LAST, Owed, ready, release, release_through
from prorld.wire.batches import BatchEvent, BatchRecord

__all__ = [
    "CARRIED",
    "DROPPED",
    "BatchAccepted",
    "BatchEnded",
    "BatchSpec",
    "Claimed",
    "Ending",
    "EndingNoted",
    "EventsTold",
    "GroupEnded",
    "GroupRow",
    "GroupsAppended",
    "GroupsStarted",
    "LeftoversCondemned",
    "LeftoversDropped",
    "LeftoversMoved",
    "RanFor",
    "Unclaimed",
]

CARRIED: Final = "carried"
DROPPED: Final = "dropped"

_pack = msgspec.msgpack.encode


class BatchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a batch was asked for, complete, without its prompts. ``closes``: it ends when those it has run out."""

    batch_id: str
    tenant: str
    handler: str
    policy: str
    purpose: Literal["train", "eval"]
    rules: BatchRules
    closes: bool
    max_wall_s: float | None = None
    carry_ttl_s: float = 3600.0
    leftovers: Leftovers = "carry"
    carry_from: str | None = None
    pin_version: bool = False
    max_attempts: int = 2
    sampling: Sampling = Sampling()
    agent: AgentLimits = AgentLimits()
    timeouts: StageTimeouts = StageTimeouts()
    priority: int = 0
    capture: list[str] = []
    metadata: dict[str, Any] = {}


class GroupRow(msgspec.Struct, frozen=True, kw_only=True):
    """A group. ``place`` counts those of its kind in its batch; ``origin`` is the batch that it was submitted to.

    ``salt`` is a part of its jobs' ids, where the plain ones were taken.
    """

    place: int
    is_own: bool = True
    group_id: str
    origin: int
    instance_id: str | None = None
    instance: bytes
    digest: bytes
    is_started: bool = False
    salt: str = ""
    end: str | None = None


class BatchAccepted(msgspec.Struct, frozen=True, kw_only=True):
    """A batch is accepted, with its first groups. ``Conflict`` where its id is taken."""

    serial: int
    spec: BatchSpec
    digest: str
    created_at: str
    groups: Sequence[GroupRow] = ()
    is_last: bool = False
    source: int | None = None

    def apply(self, db: sqlite3.Connection) -> None:
        """Write it."""
        spec = self.spec
        done = db.execute(
            "INSERT INTO batches (serial, tenant, batch_id, digest, state, created_at, spec, next_offset, is_last,"
            " source, carried_in) VALUES (?, ?, ?, ?, 'running', ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
            (
                self.serial, spec.tenant, spec.batch_id, self.digest, self.created_at, _pack(spec), len(self.groups),
                self.is_last, self.source, 0 if self.source is None else None,
            ),
        )  # fmt: skip
        if done.rowcount:
            _insert(db, self.serial, self.groups)
            return
        (serial,) = db.execute(
            "SELECT serial FROM batches WHERE tenant = ? AND batch_id = ?", (spec.tenant, spec.batch_id)
        ).fetchone()
        if serial != self.serial:
            raise Conflict(f"batch {spec.batch_id} exists with another body", code="batch_exists")

    def disown(self, db: sqlite3.Connection) -> None:
        """It was refused."""
        db.execute("DELETE FROM batches WHERE serial = ?", (self.serial,))
        db.execute("DELETE FROM groups WHERE batch = ?", (self.serial,))


class Claimed(msgspec.Struct, frozen=True, kw_only=True):
    """A batch gets what another one leaves. Belongs to the ``BatchAccepted`` of the claimant."""

    serial: int
    source: int
    source_id: str

    def apply(self, db: sqlite3.Connection) -> None:
        """Write it; ``Conflict`` where somebody else has it."""
        done = db.execute(
            "UPDATE batches SET carried_to = ?1 WHERE serial = ?2 AND (carried_to IS NULL OR carried_to = ?1)"
            " AND is_expired = 0",
            (self.serial, self.source),
        )
        if not done.rowcount:
            message = f"what batch {self.source_id} leaves is taken by another batch, or cancelled"
            raise Conflict(message, code="carry_taken", details={"batch_id": self.source_id})

    def disown(self, db: sqlite3.Connection) -> None:
        """It was refused."""
        db.execute(
            "UPDATE batches SET carried_to = NULL WHERE serial = ? AND carried_to = ?", (self.source, self.serial)
        )


class Unclaimed(Owed, frozen=True, kw_only=True):
    """The claimant ended before there was anything to get."""

    serial: int
    source: int

    def apply(self, db: sqlite3.Connection) -> None:
        """Write it."""
        db.execute(
            "UPDATE batches SET carried_to = NULL WHERE serial = ? AND carried_to = ?", (self.source, self.serial)
        )
        db.execute("UPDATE batches SET carried_in = 0 WHERE serial = ? AND carried_in IS NULL", (self.serial,))


class LeftoversMoved(Owed, frozen=True, kw_only=True):
    """The leftovers of a batch that has ended are those of its claimant now, in the order they had."""

    source: int
    serial: int

    def apply(self, db: sqlite3.Connection) -> None:
        """Write it. The second time there is nothing left to move."""
        found = db.execute(
            "SELECT is_own, place FROM groups WHERE batch = ? AND end = 'carried' ORDER BY is_own, place",
            (self.source,),
        ).fetchall()
        db.executemany(
            "UPDATE groups SET batch = ?, is_own = 0, place = ?, end = NULL"
            " WHERE batch = ? AND is_own = ? AND place = ?",
            [(self.serial, n, self.source, is_own, place) for n, (is_own, place) in enumerate(found)],
        )
        db.execute(
            "UPDATE batches SET carried_in = ? WHERE serial = ? AND carried_in IS NULL", (len(found), self.serial)
        )


class LeftoversCondemned(Owed, frozen=True, kw_only=True):
    """The leftovers of a batch are to end; nobody can claim them any more, unless somebody has."""

    serial: int

    def apply(self, db: sqlite3.Connection) -> None:
        """Write it."""
        db.execute("UPDATE batches SET is_expired = 1 WHERE serial = ? AND carried_to IS NULL", (self.serial,))


class LeftoversDropped(Owed, frozen=True, kw_only=True):
    """Nobody claimed the leftovers of a batch in time, or somebody cancelled them. Their jobs are gone."""

    serial: int
    tenant: str

    def apply(self, db: sqlite3.Connection) -> None:
        """Write it."""
        ids = [
            row[0]
            for row in db.execute("SELECT group_id FROM groups WHERE batch = ? AND end = 'carried'", (self.serial,))
        ]
        db.execute("UPDATE groups SET end = ? WHERE batch = ? AND end = 'carried'", (DROPPED, self.serial))
        db.execute("UPDATE batches SET is_expired = 1 WHERE serial = ?", (self.serial,))
        # No batch has them, so there is nobody who could acknowledge them.
        release(db, self.tenant, ids)


class GroupsAppended(msgspec.Struct, frozen=True, kw_only=True):
    """More groups of a batch that runs."""

    serial: int
    groups: Sequence[GroupRow]
    next_offset: int
    is_last: bool

    def apply(self, db: sqlite3.Connection) -> None:
        """Write them."""
        _insert(db, self.serial, self.groups)
        db.execute(
            "UPDATE batches SET next_offset = max(next_offset, ?), is_last = max(is_last, ?), is_fed = 1"
            " WHERE serial = ?",
            (self.next_offset, self.is_last, self.serial),
        )

    def disown(self, db: sqlite3.Connection) -> None:
        """They were refused."""
        first = self.next_offset - len(self.groups)
        db.execute("DELETE FROM groups WHERE batch = ? AND is_own = 1 AND place >= ?", (self.serial, first))
        db.execute("UPDATE batches SET next_offset = min(next_offset, ?) WHERE serial = ?", (first, self.serial))
        if self.is_last:
            db.execute("UPDATE batches SET is_last = 0 WHERE serial = ?", (self.serial,))


class GroupsStarted(msgspec.Struct, frozen=True, kw_only=True):
    """These groups have their jobs. Belongs to the commit of those."""

    serial: int
    groups: Sequence[tuple[bool, int, str]]

    def apply(self, db: sqlite3.Connection) -> None:
        """Write it."""
        db.executemany(
            "UPDATE groups SET is_started = 1, salt = ? WHERE batch = ? AND is_own = ? AND place = ?",
            [(salt, self.serial, is_own, place) for is_own, place, salt in self.groups],
        )

    def disown(self, db: sqlite3.Connection) -> None:
        """Their jobs were refused."""
        db.executemany(
            "UPDATE groups SET is_started = 0 WHERE batch = ? AND is_own = ? AND place = ?",
            [(self.serial, is_own, place) for is_own, place, _ in self.groups],
        )


class GroupEnded(msgspec.Struct, frozen=True, kw_only=True):
    """How the row of a group changes with its terminal event. Its jobs are kept until that is acknowledged."""

    is_own: bool
    place: int
    end: str


class EventsTold(Owed, frozen=True, kw_only=True):
    """Events of a batch, and what they change. They are shown when this is on the disk."""

    serial: int
    events: Sequence[BatchEvent]
    ends: Sequence[GroupEnded] = ()
    progress: bytes = b""
    ran_s: float = 0.0

    def apply(self, db: sqlite3.Connection) -> None:
        """Write them."""
        db.executemany(
            "INSERT OR IGNORE INTO batch_events (batch, seq, is_ready, group_id, event) VALUES (?, ?, ?, ?, ?)",
            [
                (
                    self.serial, event.seq, event.event == "group.done",
                    None if event.group_id is msgspec.UNSET else event.group_id, _pack(event),
                )
                for event in self.events
            ],
        )  # fmt: skip
        db.executemany(
            "UPDATE groups SET end = ? WHERE batch = ? AND is_own = ? AND place = ?",
            [(one.end, self.serial, one.is_own, one.place) for one in self.ends],
        )
        db.execute(
            "UPDATE batches SET progress = ?, ran_s = max(ran_s, ?) WHERE serial = ?",
            (self.progress, self.ran_s, self.serial),
        )


class RanFor(Owed, frozen=True, kw_only=True):
    """How long a batch has run, without downtime."""

    serial: int
    ran_s: float

    def apply(self, db: sqlite3.Connection) -> None:
        """Write it."""
        db.execute("UPDATE batches SET ran_s = max(ran_s, ?) WHERE serial = ?", (self.ran_s, self.serial))


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """Why a batch has to end, so that the next life of the daemon ends it, too."""

    how: Literal["cancelled", "failed", "time"]
    reason: str


class EndingNoted(msgspec.Struct, frozen=True, kw_only=True):
    """A batch has to end."""

    serial: int
    ending: Ending

    def apply(self, db: sqlite3.Connection) -> None:
        """Write it; the first reason stays."""
        db.execute(
            "UPDATE batches SET ending = ? WHERE serial = ? AND ending IS NULL", (_pack(self.ending), self.serial)
        )

    def disown(self, db: sqlite3.Connection) -> None:
        """It was refused."""
        db.execute("UPDATE batches SET ending = NULL WHERE serial = ?", (self.serial,))


class BatchEnded(Owed, frozen=True, kw_only=True):
    """A batch is over. Belongs to its last event, and comes after that."""

    serial: int
    tenant: str
    state: BatchState
    record: BatchRecord

    def apply(self, db: sqlite3.Connection) -> None:
        """Write it, and how much of the file it takes from now on."""
        db.execute(
            "UPDATE batches SET state = ?, ended_at = ?, record = ? WHERE serial = ? AND state = 'running'",
            (self.state.value, self.record.ended_at, _pack(self.record), self.serial),
        )
        db.execute(
            "UPDATE batches SET kept_bytes ="
            " (SELECT coalesce(sum(length(event)), 0) FROM batch_events WHERE batch = ?1) +"
            " (SELECT coalesce(sum(length(instance)), 0) FROM groups WHERE batch = ?1) WHERE serial = ?1",
            (self.serial,),
        )
        if not ready(db, self.serial):
            release_through(db, self.serial, self.tenant, after=0, through=LAST)


def _insert(db: sqlite3.Connection, serial: int, groups: Sequence[GroupRow]) -> None:
    db.executemany(
        "INSERT OR REPLACE INTO groups (batch, is_own, place, group_id, origin, instance_id, instance, digest)"
        " VALUES (?, 1, ?, ?, ?, ?, ?, ?)",
        [(serial, one.place, one.group_id, one.origin, one.instance_id, one.instance, one.digest) for one in groups],
    )
