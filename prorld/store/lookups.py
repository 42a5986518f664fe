"""Questions about jobs, each a function of a connection. ``Reader`` asks them in its threads.

A list reads no body. Every list has an index that gives its rows in order, so a page costs what is on it, however many
jobs there are. What is damaged is told of the job that it is of, and disturbs no other.
"""

from __future__ import annotations

import sqlite3
from typing import Any, Final

from prorld.errors import Forgotten
from prorld.store.jobs import StoredJob
from prorld.store.packing import Damaged, unpack_body
from prorld.store.rows import COLUMNS, DAMAGED, JobRow, Known, known
from prorld.wire.jobs import JobRecord

__all__ = ["candidates", "counts", "kept_by_tenant", "known", "page", "page_query", "stored"]

# All tenants that there are, each found by one step in the index of ids; there are few tenants and many jobs.
_TENANTS: Final = (
    "WITH RECURSIVE tenants (tenant) AS (SELECT min(tenant) FROM jobs UNION ALL"
    " SELECT (SELECT min(tenant) FROM jobs WHERE tenant > t.tenant) FROM tenants t WHERE t.tenant IS NOT NULL)"
)

KEPT_BY_TENANT: Final = (
    "SELECT tenant, sum(kept_bytes) FROM jobs INDEXED BY jobs_of_tenant WHERE state = 'done' GROUP BY tenant"
)

# By whether there is a tenant, and a handler.
_INDEX: Final = {
    (False, False): "jobs_by_state",
    (True, False): "jobs_of_tenant",
    (False, True): "jobs_of_handler",
    (True, True): "jobs_of_both",
}


def candidates(db: sqlite3.Connection, job_id: str) -> dict[str, Known]:
    """The same for whoever names no tenant: by tenant, all that have a job of this id."""
    rows = db.execute(
        f"{_TENANTS} SELECT {COLUMNS} FROM jobs WHERE job_id = ? AND tenant IN"  # noqa: S608 - constants
        " (SELECT tenant FROM tenants WHERE tenant IS NOT NULL) ORDER BY serial",
        (job_id,),
    ).fetchall()
    return {row.tenant: row.known() for row in map(JobRow._make, rows)}


def stored(db: sqlite3.Connection, serial: int) -> StoredJob | None:
    """All of an ended job; ``None`` where it lives, is forgotten, or never was. ``Forgotten`` where it is damaged."""
    row = db.execute("SELECT body FROM bodies WHERE serial = ?", (serial,)).fetchone()
    if row is None:
        return None
    try:
        return unpack_body(row[0], StoredJob)
    except Damaged as exc:
        raise Forgotten(f"what the journal holds of this job is damaged: {exc}", code=DAMAGED) from exc


def page(
    db: sqlite3.Connection,
    tenant: str | None,
    handler: str | None,
    group_id: str | None,
    limit: int,
    before: int | None,
) -> list[tuple[int, JobRecord]]:
    """Ended jobs with their serial numbers, newest first, those before a number."""
    text, values = page_query(tenant=tenant, handler=handler, group_id=group_id, limit=limit, before=before)
    return [(row.serial, row.read()) for row in map(JobRow._make, db.execute(text, values))]


def page_query(
    *, tenant: str | None, handler: str | None, group_id: str | None, limit: int, before: int | None
) -> tuple[str, list[Any]]:
    """The statement of a page. It names its index: what SQLite guesses of a table changes as the table grows."""
    wanted = {"tenant": tenant, "handler": handler, "group_id": group_id}
    index = _INDEX[tenant is not None, handler is not None] if group_id is None else "jobs_by_group"
    where: list[str] = ["state = 'done'"]
    values: list[Any] = []
    for column, value in wanted.items():
        if value is not None:
            where.append(f"{column} = ?")
            values.append(value)
    if before is not None:
        where.append("serial < ?")
        values.append(before)
    text = (
        f"SELECT {COLUMNS} FROM jobs INDEXED BY {index} WHERE {' AND '.join(where)}"  # noqa: S608 - constants
        " ORDER BY serial DESC LIMIT ?"
    )
    return text, [*values, limit]


def counts(db: sqlite3.Connection) -> dict[str, int]:
    """Jobs by the state that they have here: ``live``, ``done``, ``forgotten``. Walks an index."""
    none: dict[str, int] = {"live": 0, "done": 0, "forgotten": 0}
    return none | dict(db.execute("SELECT state, count(*) FROM jobs GROUP BY state").fetchall())


def kept_by_tenant(db: sqlite3.Connection) -> dict[str, int]:
    """Bytes that the ended jobs of each tenant take. Walks an index: for the start; then it is counted along."""
    rows = db.execute(KEPT_BY_TENANT)
    return {tenant: size for tenant, size in rows if size}
