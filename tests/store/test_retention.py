"""Retention: the oldest goes first, by age, count or bytes, never what is held, and ids stay."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from prorld.store import retention as retention_module
from prorld.store.jobs import Known
from prorld.store.journal import Change, Journal
from prorld.store.reader import Reader
from prorld.store.retention import KEPT, OLDEST, Forgotten, Keep, Retention, kept
from tests.store.made import accepted, ended

NOW = "2026-01-03T00:00:00.000Z"
ALL = Keep(age_s=10 * 86_400, count_max=1000, bytes_max=1 << 40)


@asynccontextmanager
async def room(directory: Path, keep: Keep, changes: list[Change]) -> AsyncIterator[tuple[Journal, Reader, Retention]]:
    journal = Journal(directory)
    await journal.open()
    reader = Reader(journal.path)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(journal.run)
            await journal.commit(*changes)
            yield journal, reader, Retention(journal, reader, keep, wall=lambda: NOW)
            await reader.aclose()
            nursery.cancel_scope.cancel()


def jobs(n: int, *, held: frozenset[int] = frozenset(), tokens: int = 8) -> list[Change]:
    """Jobs that ended in the order of their numbers, one each minute up to a day before now."""
    made: list[Change] = []
    for serial in range(1, n + 1):
        job = accepted(serial, f"j{serial}", held=serial in held)
        at = f"2026-01-02T{serial // 60:02}:{serial % 60:02}:00.000Z"
        made += [job, ended(job, ended_at=at, tokens=tokens)]
    return made


async def left(reader: Reader) -> list[int]:
    return sorted(serial for serial, _ in await reader.page(None, limit=1000))


async def test_while_there_is_room_nothing_is_forgotten(tmp_path: Path) -> None:
    async with room(tmp_path, ALL, jobs(5)) as (_, reader, retention):
        assert await retention.look() == 0
        assert await left(reader) == [1, 2, 3, 4, 5]
        assert 0 < retention.share < 0.01


async def test_by_count(tmp_path: Path) -> None:
    """In several commits, and each is heard of."""
    keep = Keep(age_s=10 * 86_400, count_max=30, bytes_max=1 << 40)
    async with room(tmp_path, keep, jobs(200, held=frozenset({3, 150}))) as (_, reader, retention):
        heard: list[Forgotten] = []
        retention._on_forgotten = heard.extend
        assert await retention.look() == 168
        assert await left(reader) == [3, 150, *range(171, 201)]
        assert [job.serial for job in heard] == [n for n in range(1, 171) if n not in (3, 150)]
        assert retention.share == pytest.approx(198 / 30)
        assert await retention.look() == 0
        assert retention.share == 1.0


async def test_by_bytes(tmp_path: Path) -> None:
    async with room(tmp_path, ALL, jobs(10, tokens=4000)) as (journal, reader, _):
        sizes = await reader.ask(lambda db: [n for (n,) in db.execute("SELECT kept_bytes FROM jobs ORDER BY serial")])
        keep = Keep(age_s=10 * 86_400, count_max=1000, bytes_max=sum(sizes[4:]) + 10)
        assert await Retention(journal, reader, keep, wall=lambda: NOW).look() == 4
        assert await left(reader) == list(range(5, 11))
        assert (await reader.kept_by_tenant())["default"] == sum(sizes[4:])


async def test_by_age(tmp_path: Path) -> None:
    """What ended at 00:10 is a day minus ten minutes old."""
    keep = Keep(age_s=86_400 - 600, count_max=1000, bytes_max=1 << 40)
    async with room(tmp_path, keep, jobs(30, held=frozenset({2}))) as (_, reader, retention):
        assert await retention.look() == 8
        assert await left(reader) == [2, *range(10, 31)]


async def test_an_age_from_before_the_epoch_keeps_all(tmp_path: Path) -> None:
    async with room(tmp_path, Keep(age_s=1e10, count_max=99, bytes_max=1 << 40), jobs(2)) as (_, _, retention):
        assert await retention.look() == 0


async def test_of_what_is_forgotten_the_id_is_left(tmp_path: Path) -> None:
    keep = Keep(age_s=1, count_max=1000, bytes_max=1 << 40)
    async with room(tmp_path, keep, [*jobs(3), accepted(9, "live")]) as (journal, reader, retention):
        assert await retention.look() == 3
        known = await reader.known("default", "j2")
        assert known is not None
        assert (known.state, known.record) == ("forgotten", None)
        assert await reader.stored(2) is None
        (again,) = await journal.commit(accepted(10, "j2"))
        assert isinstance(again, Known)
        assert again.state == "forgotten"
        assert await reader.counts() == {"live": 1, "done": 0, "forgotten": 3}
        rows = await reader.ask(lambda db: db.execute("SELECT count(*) FROM bodies").fetchone())
        assert rows == (0,)


async def test_a_late_end_does_not_bring_a_forgotten_job_back(tmp_path: Path) -> None:
    """An end whose commit had an unknown fate is written again."""
    keep = Keep(age_s=1, count_max=1000, bytes_max=1 << 40)
    made = jobs(1)
    async with room(tmp_path, keep, made) as (journal, reader, retention):
        await retention.look()
        await journal.owe(made[1])
        assert await reader.counts() == {"live": 0, "done": 0, "forgotten": 1}
        assert await reader.ask(lambda db: db.execute("SELECT count(*) FROM bodies").fetchone()) == (0,)


async def test_tombstones_are_bounded_and_the_oldest_go(tmp_path: Path) -> None:
    keep = Keep(age_s=1, count_max=1000, bytes_max=1 << 40, tombstones_max=5)
    async with room(tmp_path, keep, jobs(20)) as (_, reader, retention):
        await retention.look()
        assert (await reader.ask(kept)).tombstones == 5
        assert await reader.known("default", "j15") is None
        assert await reader.known("default", "j16") is not None


async def test_space_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention_module, "FREE_KEPT_BYTES", 100_000)
    keep = Keep(age_s=1, count_max=1000, bytes_max=1 << 40)
    async with room(tmp_path, keep, jobs(100, tokens=8000)) as (journal, _, retention):
        pages = "PRAGMA page_count"
        before = (await journal.read(lambda db: db.execute(pages).fetchone()))[0]
        await retention.look()
        after = (await journal.read(lambda db: db.execute(pages).fetchone()))[0]
        assert after < before / 4
        assert await journal.read(lambda db: db.execute("PRAGMA integrity_check").fetchone()) == ("ok",)


def explained(db: sqlite3.Connection, text: str, values: tuple[int, ...]) -> list[tuple[int, int, int, str]]:
    return db.execute(f"EXPLAIN QUERY PLAN {text}", values).fetchall()


async def test_looking_walks_indexes_alone(tmp_path: Path) -> None:
    async with room(tmp_path, ALL, jobs(3)) as (_, reader, _):
        for text, values in ((KEPT, ()), (OLDEST, (5,))):
            plan = await reader.ask(explained, text, values)
            assert [row[3] for row in plan] in (
                ["SCAN jobs USING COVERING INDEX jobs_to_forget"],
                ["SCAN jobs USING INDEX jobs_to_forget"],
            )


async def test_a_disk_that_fails_is_not_the_end_of_it(tmp_path: Path) -> None:
    """It tries again at its next look."""
    keep = Keep(age_s=1, count_max=1000, bytes_max=1 << 40)
    async with room(tmp_path, keep, jobs(3)) as (journal, reader, retention):
        journal.trouble = "no disk"
        async with trio.open_nursery() as nursery:
            await nursery.start(retention.run)
            await trio.sleep(0.1)
            assert await left(reader) == [1, 2, 3]
            nursery.cancel_scope.cancel()
        journal.trouble = None
        assert await retention.look() == 3
