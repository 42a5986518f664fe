"""Files of older and newer versions."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import trio

from prorld.errors import ConfigError
from prorld.store import schema
from prorld.store.journal import Journal
from prorld.store.reader import Reader
from tests.store.made import accepted, ended


def made_by(path: Path, version: int) -> None:
    """A file as the prorld of that version made it."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        schema.prepare(db, writes=True)
        for step in range(version):
            db.executescript(f"BEGIN;{schema._STEPS[step]};PRAGMA user_version = {step + 1};COMMIT;")


def asked(path: Path, text: str) -> tuple[object, ...] | None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        found: tuple[object, ...] | None = db.execute(text).fetchone()
        return found


def tables(path: Path) -> list[tuple[str, str]]:
    with closing(sqlite3.connect(path)) as db:
        return db.execute("SELECT name, sql FROM sqlite_master ORDER BY name").fetchall()


@pytest.mark.parametrize("version", range(schema.SCHEMA))
async def test_an_older_file_becomes_one_of_this_version(tmp_path: Path, version: int) -> None:
    """With what is in it; and then it is as one that was made anew."""
    path = tmp_path / "journal.sqlite"
    made_by(path, version)
    if version:
        asked(
            path,
            "INSERT INTO jobs (serial, tenant, job_id, digest, state, created_at, kept_bytes)"
            " VALUES (1, 't', 'old', 'd', 'forgotten', '', 0)",
        )
    journal, reader = Journal(tmp_path), Reader(path)
    await journal.open()
    async with trio.open_nursery() as nursery:
        await nursery.start(journal.run)
        job = accepted(2, "new")
        await journal.commit(job)
        await journal.owe(ended(job))
        known = await reader.known("t", "old")
        assert (known is not None and known.state == "forgotten") == bool(version)
        assert await reader.stored(2) is not None
        await reader.aclose()
        nursery.cancel_scope.cancel()
    fresh = tmp_path / "fresh"
    made_by(fresh, schema.SCHEMA)
    assert tables(path) == tables(fresh)
    assert asked(path, "PRAGMA user_version") == (schema.SCHEMA,)
    assert asked(path, "PRAGMA auto_vacuum") == (2,)
    assert asked(path, "PRAGMA page_size") == (schema.PAGE_BYTES,)


async def test_a_newer_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    made_by(path, schema.SCHEMA)
    asked(path, f"PRAGMA user_version = {schema.SCHEMA + 1}")
    with pytest.raises(ConfigError, match=rf"journal\.sqlite is of schema {schema.SCHEMA + 1}.* the newer prorld"):
        await Journal(tmp_path).open()
    assert asked(path, "PRAGMA user_version") == (schema.SCHEMA + 1,)


def test_a_step_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.sqlite"
    made_by(path, 1)
    before = tables(path)
    monkeypatch.setattr(schema, "_STEPS", (schema._STEPS[0], "CREATE TABLE half (x); INSERT INTO nothing VALUES (1)"))
    monkeypatch.setattr(schema, "SCHEMA", 2)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        schema.prepare(db, writes=True)
        with pytest.raises(sqlite3.OperationalError, match="nothing"):
            schema.upgrade(db, "journal")
    assert tables(path) == before


@pytest.mark.slow
def test_a_process_that_dies_within_a_step_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    made_by(path, 1)
    before = tables(path)
    script = (
        "import os, sqlite3, sys; from prorld.store import schema\n"
        "db = sqlite3.connect(sys.argv[1], isolation_level=None); schema.prepare(db, writes=True)\n"
        "db.create_function('die', 0, lambda: os.kill(os.getpid(), 9))\n"
        "schema._STEPS = (schema._STEPS[0], schema._STEPS[1] + '; SELECT die();')\n"
        "schema.upgrade(db, 'journal')\n"
    )
    died = subprocess.run([sys.executable, "-c", script, str(path)], check=False, timeout=60)
    assert died.returncode == -9
    assert tables(path) == before


def test_no_file_is_made_elsewhere(tmp_path: Path) -> None:
    """What would take a part of a transaction back stays in memory, however large: other disks may be full."""
    with closing(sqlite3.connect(tmp_path / "journal.sqlite", isolation_level=None)) as db:
        schema.prepare(db, writes=True)
        db.execute("CREATE TABLE t (number INTEGER PRIMARY KEY, body BLOB)")
        rows = [(number, bytes(2000)) for number in range(1000)]
        db.executemany("INSERT INTO t VALUES (?, ?)", rows)
        before = _open_files()
        db.execute("BEGIN")
        db.execute("UPDATE t SET body = zeroblob(1999)")
        db.execute("SAVEPOINT part")
        db.execute("UPDATE t SET body = zeroblob(1998)")
        assert _open_files() <= before
        db.execute("ROLLBACK TO part")
        db.execute("COMMIT")
        assert db.execute("SELECT DISTINCT length(body) FROM t").fetchall() == [(1999,)]


def _open_files() -> set[str]:
    """Without the directory that this look itself opens."""
    found = {str(path.resolve()) for path in Path("/proc/self/fd").iterdir()}
    return {name for name in found if not name.startswith("/proc/")}
