"""Questions about batches, each a function of a connection.

A list reads no prompts and no trajectories. What a restart needs is read once, at the start.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Final

import msgspec

from prorld.errors import Forgotten
from prorld.store.batch_keeping import FORGETTABLE
from prorld.store.batches import BatchSpec, Ending, GroupRow
from prorld.store.jobs import StoredJob
from prorld.store.lookups import stored
from prorld.wire.batches import BatchEvent, BatchRecord

__all__ = [
    "BatchRow",
    "ReadyGroup",
    "batch_rows",
    "candidates",
    "carried_rows",
    "events_after",
    "forgettable",
    "held_bytes",
    "last_seq",
    "lingering",
    "newest_batch",
    "open_rows",
    "own_digests",
    "page",
    "ready_after",
    "row",
    "running",
    "samples",
    "unacknowledged",
    "unknown_groups",
]

_COLUMNS: Final = (
    "serial, tenant, batch_id, digest, state, created_at, ended_at, spec, record, next_offset, is_last, is_fed,"
    " acknowledged, ran_s, progress, ending, source, carried_in, carried_to, is_expired,"
    " (SELECT other.batch_id FROM batches AS other WHERE other.serial = batches.carried_to),"
    " (SELECT count(*) FROM groups WHERE groups.batch = batches.serial AND groups.end = 'carried')"
)
_GROUP_COLUMNS: Final = "place, is_own, group_id, origin, instance_id, instance, digest, is_started, salt, end"


class BatchRow(msgspec.Struct, frozen=True, kw_only=True):
    """A batch as it lies in the journal. ``spec`` and ``record`` are gone once it is forgotten."""

    serial: int
    tenant: str
    batch_id: str
    digest: str
    state: str
    created_at: str
    ended_at: str | None
    spec: BatchSpec | None
    record: BatchRecord | None
    next_offset: int
    is_last: bool
    is_fed: bool
    acknowledged: int
    ran_s: float
    progress: bytes | None
    ending: Ending | None
    source: int | None
    carried_in: int | None
    carried_to: int | None
    is_expired: bool
    claimant_id: str | None
    leftovers: int


class ReadyGroup(msgspec.Struct, frozen=True, kw_only=True):
    """An accepted group: its event, and what it was asked, where that was wanted."""

    event: BatchEvent
    instance: bytes | None = None


def _row(found: tuple[object, ...]) -> BatchRow:
    fields = dict(zip(BatchRow.__struct_fields__, found, strict=True))
    for name, kind in (("spec", BatchSpec), ("record", BatchRecord), ("ending", Ending)):
        packed = fields[name]
        fields[name] = msgspec.msgpack.decode(packed, type=kind) if isinstance(packed, bytes) else None
    for name in ("is_last", "is_fed", "is_expired"):
        fields[name] = bool(fields[name])
    return BatchRow(**fields)  # type: ignore[arg-type]  # the columns are what the schema says


def row(db: sqlite3.Connection, serial: int) -> BatchRow | None:
    """One batch by its serial number."""
    found = batch_rows(db, "serial = ?", serial)
    return found[0] if found else None


def candidates(db: sqlite3.Connection, batch_id: str, tenant: str | None) -> list[BatchRow]:
    """The batches of this id: of one tenant, or for an admin of all."""
    if tenant is None:
        return batch_rows(db, "batch_id = ?", batch_id)
    return batch_rows(db, "tenant = ? AND batch_id = ?", tenant, batch_id)


def page(db: sqlite3.Connection, tenant: str | None, limit: int, before: int | None) -> list[BatchRow]:
    """Batches that are not forgotten, newest first, those before a serial number."""
    where, values = ["state != 'forgotten'"], list[object]()
    if tenant is not None:
        where.append("tenant = ?")
        values.append(tenant)
    if before is not None:
        where.append("serial < ?")
        values.append(before)
    return batch_rows(db, " AND ".join(where), *values, order="serial DESC LIMIT ?", last=limit)


def batch_rows(
    db: sqlite3.Connection, where: str, *values: object, order: str = "serial", last: int | None = None
) -> list[BatchRow]:
    """Batches by a condition of ours, oldest first."""
    text = f"SELECT {_COLUMNS} FROM batches WHERE {where} ORDER BY {order}"  # noqa: S608 - constants
    return [_row(found) for found in db.execute(text, [*values, *([] if last is None else [last])])]


def running(db: sqlite3.Connection) -> list[BatchRow]:
    """All that have not ended, in the order they were accepted."""
    return batch_rows(db, "state = 'running'")


def lingering(db: sqlite3.Connection) -> list[BatchRow]:
    """Ended batches that have leftovers, oldest first."""
    return batch_rows(
        db,
        "state NOT IN ('running', 'forgotten') AND serial IN (SELECT batch FROM groups WHERE end = 'carried')",
    )


def newest_batch(db: sqlite3.Connection) -> int:
    """The highest serial number ever given."""
    found: int | None = db.execute("SELECT max(serial) FROM batches").fetchone()[0]
    return found or 0


def forgettable(db: sqlite3.Connection) -> tuple[int, int]:
    """How many ended batches there are that nobody needs, and how many bytes they take."""
    count, size = db.execute(
        f"SELECT count(*), coalesce(sum(kept_bytes), 0) FROM batches WHERE {FORGETTABLE}"  # noqa: S608 - constants
    ).fetchone()
    return count, size


def last_seq(db: sqlite3.Connection, serial: int) -> int:
    """The number of a batch's newest event."""
    found: int | None = db.execute("SELECT max(seq) FROM batch_events WHERE batch = ?", (serial,)).fetchone()[0]
    return found or 0


# --- groups -----------------------------------------------------------------------------------------------------------


def _groups(db: sqlite3.Connection, where: str, serial: int) -> list[GroupRow]:
    rows = db.execute(
        f"SELECT {_GROUP_COLUMNS} FROM groups WHERE batch = ? AND {where} ORDER BY is_own, place",  # noqa: S608 - constants
        (serial,),
    )
    return [
        GroupRow(
            place=place, is_own=bool(is_own), group_id=group_id, origin=origin, instance_id=instance_id,
            instance=instance or b"", digest=digest, is_started=bool(is_started), salt=salt, end=end,
        )
        for place, is_own, group_id, origin, instance_id, instance, digest, is_started, salt, end in rows
    ]  # fmt: skip


def all_rows(db: sqlite3.Connection, serial: int) -> list[GroupRow]:
    """Every group of a batch in its order."""
    return _groups(db, "1", serial)


def carried_rows(db: sqlite3.Connection, serial: int) -> list[GroupRow]:
    """The leftovers of a batch in their order."""
    return _groups(db, "end = 'carried'", serial)


def open_rows(db: sqlite3.Connection, serial: int) -> list[GroupRow]:
    """The groups of a batch that have no terminal event."""
    return _groups(db, "end IS NULL", serial)


def own_digests(db: sqlite3.Connection, serial: int, first: int, count: int) -> list[bytes]:
    """What was appended from an offset on, each as a digest."""
    rows = db.execute(
        "SELECT digest FROM groups WHERE batch = ? AND is_own = 1 AND place >= ? AND place < ? ORDER BY place",
        (serial, first, first + count),
    )
    return [found[0] for found in rows]


def unacknowledged(db: sqlite3.Connection, serial: int, acknowledged: int) -> list[BatchEvent]:
    """The events of accepted groups that nobody has acknowledged, in order."""
    rows = db.execute(
        "SELECT event FROM batch_events WHERE batch = ? AND is_ready = 1 AND is_discarded = 0 AND seq > ? ORDER BY seq",
        (serial, acknowledged),
    )
    return [msgspec.msgpack.decode(found[0], type=BatchEvent) for found in rows]


def samples(db: sqlite3.Connection, tenant: str, job_ids: Sequence[str]) -> list[tuple[int, StoredJob | None]]:
    """Those of these jobs that do not live, each by its place; ``None`` where nothing is known of it any more."""
    found: list[tuple[int, StoredJob | None]] = []
    for place, job_id in enumerate(job_ids):
        at = db.execute("SELECT serial, state FROM jobs WHERE tenant = ? AND job_id = ?", (tenant, job_id)).fetchone()
        if at is not None and at[1] == "live":
            continue
        try:
            found.append((place, None if at is None else stored(db, at[0])))
        except Forgotten:
            found.append((place, None))
    return found


# --- what clients read ------------------------------------------------------------------------------------------------


def events_after(db: sqlite3.Connection, serial: int, after: int, upto: int, limit: int) -> list[BatchEvent]:
    """Events of a batch with a higher number."""
    rows = db.execute(
        "SELECT event FROM batch_events WHERE batch = ? AND seq > ? AND seq <= ? ORDER BY seq LIMIT ?",
        (serial, after, upto, limit),
    )
    return [msgspec.msgpack.decode(found[0], type=BatchEvent) for found in rows]


def ready_after(
    db: sqlite3.Connection, serial: int, after: int, upto: int, limit: int, *, instances: bool
) -> list[ReadyGroup]:
    """Accepted groups of a batch with a higher number that were not discarded."""
    rows = db.execute(
        "SELECT event FROM batch_events WHERE batch = ? AND is_ready = 1 AND is_discarded = 0 AND seq > ? AND seq <= ?"
        " ORDER BY seq LIMIT ?",
        (serial, after, upto, limit),
    ).fetchall()
    events = [msgspec.msgpack.decode(found[0], type=BatchEvent) for found in rows]
    return [
        ReadyGroup(event=event, instance=_instance(db, serial, str(event.group_id)) if instances else None)
        for event in events
    ]


def _instance(db: sqlite3.Connection, serial: int, group_id: str) -> bytes | None:
    found = db.execute("SELECT instance FROM groups WHERE group_id = ? AND batch = ?", (group_id, serial)).fetchone()
    return None if found is None else found[0]


def unknown_groups(db: sqlite3.Connection, serial: int, group_ids: Sequence[str]) -> list[str]:
    """Those that are no accepted groups of the batch."""
    wanted = set(group_ids)
    if not wanted:
        return []
    rows = db.execute("SELECT group_id FROM batch_events WHERE batch = ? AND is_ready = 1", (serial,))
    return sorted(wanted - {found[0] for found in rows})


def held_bytes(db: sqlite3.Connection, tenant: str) -> int:
    """Bytes of ended jobs of a tenant that are kept for somebody to acknowledge them."""
    found: int | None = db.execute(
        "SELECT sum(kept_bytes) FROM jobs WHERE tenant = ? AND held = 1", (tenant,)
    ).fetchone()[0]
    return found or 0
