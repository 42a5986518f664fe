"""The tables of the journal, their version, and how an older file becomes one of this version.

A file of a newer version is refused: to guess what it means could lose what it holds.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Final

from prorld.errors import ConfigError

__all__ = ["SCHEMA", "check", "prepare", "upgrade"]

# A trajectory takes some 20 to 70 kB, so large pages keep it in few pieces.
PAGE_BYTES: Final = 16384
# Who waits longer for the file than this does not share it with a reader but with a second daemon.
BUSY_MS: Final = 5000

# One entry per version: what makes a file of version n one of version n + 1. Never changed, only added to.
_STEPS: Final[Sequence[str]] = (
    """
    CREATE TABLE jobs (
        serial INTEGER PRIMARY KEY,
        tenant TEXT NOT NULL,
        job_id TEXT NOT NULL,
        digest TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('live', 'done', 'forgotten')),
        handler TEXT NOT NULL DEFAULT '',
        group_id TEXT,
        held INTEGER NOT NULL DEFAULT 0,
        request_bytes INTEGER NOT NULL DEFAULT 0,
        kept_bytes INTEGER NOT NULL DEFAULT 0,
        created_at TEXT NOT NULL,
        ended_at TEXT,
        spec BLOB,
        record BLOB,
        UNIQUE (tenant, job_id)
    );
    CREATE INDEX jobs_by_state ON jobs (state, serial);
    CREATE INDEX jobs_by_group ON jobs (group_id, serial) WHERE group_id IS NOT NULL;
    CREATE INDEX jobs_to_forget ON jobs (ended_at) WHERE state = 'done' AND held = 0;
    CREATE TABLE bodies (serial INTEGER PRIMARY KEY, body BLOB NOT NULL);
    CREATE TABLE attempts (
        serial INTEGER NOT NULL, n INTEGER NOT NULL, started_at TEXT NOT NULL, ended BLOB,
        PRIMARY KEY (serial, n)
    ) WITHOUT ROWID;
    CREATE TABLE job_events (
        serial INTEGER NOT NULL, first INTEGER NOT NULL, events BLOB NOT NULL,
        PRIMARY KEY (serial, first)
    ) WITHOUT ROWID;
    """,
    # Lists by tenant and handler in their order, and sums of what is kept, without a look at the rows themselves. How
    # far the events of a row go is beside them, so that no number is given twice where they can't be read any more.
    # An index covers a question only if the columns of its own condition are in it, too.
    """
    ALTER TABLE job_events ADD COLUMN last INTEGER NOT NULL DEFAULT 0;
    DROP INDEX jobs_to_forget;
    CREATE INDEX jobs_to_forget ON jobs (ended_at, serial, kept_bytes, state, held)
        WHERE state = 'done' AND held = 0;
    CREATE INDEX jobs_of_tenant ON jobs (tenant, serial, kept_bytes, state) WHERE state = 'done';
    CREATE INDEX jobs_of_handler ON jobs (handler, serial) WHERE state = 'done';
    CREATE INDEX jobs_of_both ON jobs (tenant, handler, serial) WHERE state = 'done';
    """,
    # A cancel is a promise: a job that has one is not run again after a restart.
    """
    ALTER TABLE jobs ADD COLUMN cancel TEXT;
    """,
    """
    CREATE TABLE batches (
        serial INTEGER PRIMARY KEY,
        tenant TEXT NOT NULL,
        batch_id TEXT NOT NULL,
        digest TEXT NOT NULL,
        state TEXT NOT NULL,
        created_at TEXT NOT NULL,
        ended_at TEXT,
        spec BLOB,
        record BLOB,
        next_offset INTEGER NOT NULL DEFAULT 0,
        is_last INTEGER NOT NULL DEFAULT 0,
        is_fed INTEGER NOT NULL DEFAULT 0,
        acknowledged INTEGER NOT NULL DEFAULT 0,
        ran_s REAL NOT NULL DEFAULT 0,
        progress BLOB,
        ending BLOB,
        source INTEGER,
        carried_in INTEGER,
        carried_to INTEGER,
        is_expired INTEGER NOT NULL DEFAULT 0,
        UNIQUE (tenant, batch_id)
    );
    CREATE INDEX batches_running ON batches (serial) WHERE state = 'running';
    CREATE INDEX batches_by_tenant ON batches (tenant, serial);
    CREATE TABLE groups (
        batch INTEGER NOT NULL,
        is_own INTEGER NOT NULL,
        place INTEGER NOT NULL,
        group_id TEXT NOT NULL,
        origin INTEGER NOT NULL,
        instance_id TEXT,
        instance BLOB,
        digest BLOB NOT NULL,
        is_started INTEGER NOT NULL DEFAULT 0,
        salt TEXT NOT NULL DEFAULT '',
        end TEXT,
        PRIMARY KEY (batch, is_own, place)
    );
    CREATE INDEX groups_open ON groups (batch) WHERE end IS NULL;
    CREATE INDEX groups_left ON groups (batch) WHERE end = 'carried';
    CREATE INDEX groups_by_id ON groups (group_id);
    CREATE TABLE batch_events (
        batch INTEGER NOT NULL,
        seq INTEGER NOT NULL,
        is_ready INTEGER NOT NULL,
        group_id TEXT,
        is_discarded INTEGER NOT NULL DEFAULT 0,
        event BLOB NOT NULL,
        PRIMARY KEY (batch, seq)
    ) WITHOUT ROWID;
    CREATE INDEX batch_groups ON batch_events (batch, seq) WHERE is_ready = 1;
    CREATE INDEX jobs_held ON jobs (tenant, kept_bytes) WHERE held = 1;
    """,
    # How much of the file an ended batch takes, so that the sum of many is no look at all their events.
    """
    ALTER TABLE batches ADD COLUMN kept_bytes INTEGER NOT NULL DEFAULT 0;
    UPDATE batches SET kept_bytes =
        (SELECT coalesce(sum(length(event)), 0) FROM batch_events WHERE batch = serial) +
        (SELECT coalesce(sum(length(instance)), 0) FROM groups WHERE batch = serial)
        WHERE state NOT IN ('running', 'forgotten');
    """,
)
SCHEMA: Final = len(_STEPS)


def prepare(db: sqlite3.Connection, *, writes: bool) -> None:
    """What every connection is set to."""
    db.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
    if not writes:
        db.execute("PRAGMA query_only = ON")
        return
    # The first two take effect in a file that has no table yet; in others they are what they were.
    db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    db.execute("PRAGMA auto_vacuum = INCREMENTAL")
    mode = db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    if mode != "wal":
        raise ConfigError(
            f"the journal needs a write-ahead log, and its file system allows only {mode!r}; put the state directory"
            " on a local disk"
        )
    db.execute("PRAGMA synchronous = FULL")
    # What would undo a part of a transaction is as large as that part: no file is made for it elsewhere, whose disk
    # could be full, and which costs more than the rest of the transaction.
    db.execute("PRAGMA temp_store = MEMORY")


def check(db: sqlite3.Connection, name: str) -> None:
    """That the file is of this version, for whoever only reads it. Raises ``ConfigError``."""
    found: int = db.execute("PRAGMA user_version").fetchone()[0]
    if found != SCHEMA:
        cure = (
            "use the newer prorld" if found > SCHEMA else "start `prorld serve` on it once, which brings it up to date"
        )
        raise ConfigError(f"{name} is of schema {found}, and this prorld reads {SCHEMA}; {cure}")


def upgrade(db: sqlite3.Connection, name: str) -> int:
    """Bring the file to ``SCHEMA``; the version it had. Each step is whole or not at all. Raises ``ConfigError``."""
    found: int = db.execute("PRAGMA user_version").fetchone()[0]
    if found > SCHEMA:
        raise ConfigError(f"{name} is of schema {found}, and this prorld knows {SCHEMA}; start the newer prorld")
    for version in range(found, SCHEMA):
        db.executescript(f"BEGIN IMMEDIATE;{_STEPS[version]};PRAGMA user_version = {version + 1};COMMIT;")
    return found
