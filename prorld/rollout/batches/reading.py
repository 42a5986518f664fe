"""Pages of a batch's accepted groups, with what they were asked and answered, read in a reader's thread."""

from __future__ import annotations

import sqlite3
from typing import Any

import msgspec

from prorld.errors import Forgotten
from prorld.rollout.batches.telling import as_group
from prorld.store import batch_lookups as lookups
from prorld.store.jobs import StoredJob
from prorld.store.lookups import known, stored
from prorld.wire.batches import BatchGroup, PackedBatchGroup
from prorld.wire.codec import encode, encode_msgpack
from prorld.wire.trajectory import unpacked

__all__ = ["read_groups"]


def read_groups(
    db: sqlite3.Connection,
    serial: int,
    tenant: str,
    after: int,
    upto: int,
    *,
    limit: int,
    max_bytes: int,
    trajectories: bool,
    instances: bool,
    packed: bool,
) -> tuple[list[Any], bool]:
    """Accepted groups with a higher number, as many as fit and at least one; whether there are more."""
    found = lookups.ready_after(db, serial, after, upto, limit + 1, instances=instances)
    taken: list[BatchGroup] = []
    write = encode_msgpack if packed else encode
    for ready in found[:limit]:
        group = as_group(ready.event)
        fields: dict[str, Any] = {}
        if ready.instance is not None:
            fields["instance"] = msgspec.msgpack.decode(ready.instance)
        if trajectories:
            documents = [_document(db, tenant, job_id) for job_id in group.job_ids]
            fields["trajectories"] = (
                documents if packed else [None if one is None else unpacked(one) for one in documents]
            )
        if fields:
            kind = PackedBatchGroup if packed else BatchGroup
            group = kind(**msgspec.structs.asdict(group) | fields)
        max_bytes -= len(write(group)) + 1
        if taken and max_bytes < 0:
            return taken, True
        taken.append(group)
    return taken, len(found) > len(taken)


def _document(db: sqlite3.Connection, tenant: str, job_id: str | None) -> Any:
    """What a job answered; null where it has no trajectory, or it can't be read any more."""
    at = None if job_id is None else known(db, tenant, job_id)
    try:
        job: StoredJob | None = None if at is None else stored(db, at.serial)
    except Forgotten:
        return None
    return None if job is None else job.trajectory
