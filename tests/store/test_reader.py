"""Reading beside the writer: by index, never a body for a list, and a damaged row costs that row alone."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from prorld.domain.job import JobState
from prorld.domain.outcome import OutcomeKind, Verdict
from prorld.errors import Forgotten, Overloaded
from prorld.store.journal import Change, Journal
from prorld.store.lookups import KEPT_BY_TENANT, page_query
from prorld.store.reader import Reader
from tests.store.made import accepted, ended

WITHIN_S = 30.0


@asynccontextmanager
async def written(directory: Path, changes: Iterable[Change]) -> AsyncIterator[tuple[Journal, Reader]]:
    journal = Journal(directory)
    await journal.open()
    reader = Reader(journal.path)
    with trio.fail_after(WITHIN_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(journal.run)
            await journal.commit(*changes)
            yield journal, reader
            await reader.aclose()
            nursery.cancel_scope.cancel()


def jobs(n: int, **fields: Any) -> list[Change]:
    made: list[Change] = []
    for serial in range(1, n + 1):
        job = accepted(serial, f"j{serial}", **fields)
        made += [job, ended(job)]
    return made


async def test_an_ended_job_is_read_whole(tmp_path: Path) -> None:
    async with written(tmp_path, jobs(3)) as (_, reader):
        known = await reader.known("default", "j2")
        assert known is not None
        assert (known.serial, known.state) == (2, "done")
        assert known.record is not None
        assert known.record.job_id == "j2"
        stored = await reader.stored(2)
        assert stored is not None
        assert stored.spec.job_id == "j2"
        assert (
            stored.trajectory.branches[0].token_ids == ended(accepted(2, "j2")).stored.trajectory.branches[0].token_ids
        )
        assert await reader.stored(9) is None
        assert await reader.known("default", "j9") is None
        assert await reader.known("other", "j2") is None


async def test_a_live_job_is_known_without_a_record(tmp_path: Path) -> None:
    async with written(tmp_path, [accepted(1, "a")]) as (_, reader):
        known = await reader.known("default", "a")
        assert known is not None
        assert (known.state, known.record) == ("live", None)
        assert await reader.stored(1) is None
        assert await reader.page(None) == []
        assert await reader.counts() == {"live": 1, "done": 0, "forgotten": 0}


async def test_who_names_no_tenant_gets_all_that_have_the_id(tmp_path: Path) -> None:
    made = [accepted(n, name, tenant=tenant) for n, (tenant, name) in enumerate(
        [("a", "x"), ("b", "x"), ("b", "y"), ("", "x"), ("c", "y")], start=1)]  # fmt: skip
    async with written(tmp_path, made) as (_, reader):
        assert {tenant: known.serial for tenant, known in (await reader.candidates("x")).items()} == {
            "a": 1, "b": 2, "": 4,
        }  # fmt: skip
        assert list(await reader.candidates("y")) == ["b", "c"]
        assert await reader.candidates("z") == {}


async def test_pages_are_newest_first_and_meet_no_row_twice(tmp_path: Path) -> None:
    dice = random.Random(3)
    made: list[Change] = []
    told = {}
    for serial in range(1, 120):
        place: dict[str, Any] = {
            "tenant": dice.choice("ab"),
            "handler": dice.choice("hk"),
            "group_id": dice.choice(["g", None]),
        }
        job = accepted(serial, f"j{serial}", **place)
        made.append(job)
        if dice.random() < 0.8:
            made.append(ended(job))
            told[serial] = place
    async with written(tmp_path, made) as (_, reader):
        for wanted in ({}, {"tenant": "a"}, {"handler": "h"}, {"tenant": "b", "handler": "k"}, {"group_id": "g"}):
            seen: list[int] = []
            before = None
            tenant = wanted.get("tenant")
            rest: dict[str, Any] = {name: value for name, value in wanted.items() if name != "tenant"}
            while found := await reader.page(tenant, **rest, limit=7, before_serial=before):
                seen += [serial for serial, _ in found]
                before = seen[-1]
            fits = [n for n, place in told.items() if wanted.items() <= place.items()]
            assert seen == sorted(fits, reverse=True)
        assert await reader.page(None, state=JobState.RUNNING) == []


@pytest.mark.parametrize(
    ("wanted", "index"),
    [
        ({}, "jobs_by_state"),
        ({"tenant": "a"}, "jobs_of_tenant"),
        ({"handler": "h"}, "jobs_of_handler"),
        ({"tenant": "a", "handler": "h"}, "jobs_of_both"),
        ({"group_id": "g"}, "jobs_by_group"),
        ({"tenant": "a", "handler": "h", "group_id": "g"}, "jobs_by_group"),
    ],
)
@pytest.mark.parametrize("before", [None, 7])
async def test_a_page_walks_an_index_in_its_order(
    tmp_path: Path, wanted: dict[str, str], index: str, before: int | None
) -> None:
    async with written(tmp_path, jobs(2)) as (_, reader):
        filters: dict[str, Any] = {"tenant": None, "handler": None, "group_id": None} | wanted
        text, values = page_query(**filters, limit=5, before=before)

        def plan(db: sqlite3.Connection) -> list[str]:
            return [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {text}", values)]

        (step,) = await reader.ask(plan)
        assert f"USING INDEX {index} " in step


async def test_sums_look_at_an_index_alone(tmp_path: Path) -> None:
    async with written(tmp_path, [*jobs(3), accepted(7, "z", tenant="t")]) as (_, reader):
        kept = await reader.kept_by_tenant()
        assert list(kept) == ["default"]
        assert kept["default"] > 0

        def plan(db: sqlite3.Connection) -> list[str]:
            return [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {KEPT_BY_TENANT}")]

        assert await reader.ask(plan) == ["SCAN jobs USING COVERING INDEX jobs_of_tenant"]


def corrupt(path: Path, statement: str, *values: Any) -> None:
    db = sqlite3.connect(path)
    with db:
        db.execute(statement, values)
    db.close()


HOSTILE = (
    b"", b"\x00", b"\xc1", b"not zstd", b"\x93" * 100_000, "text", 17, None,
    # A frame that claims a terabyte.
    b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little") + b"\x01\x00\x00",
)  # fmt: skip


@pytest.mark.parametrize("bytes_", HOSTILE, ids=range(len(HOSTILE)))
async def test_a_damaged_row_is_told_of_its_job_alone(tmp_path: Path, bytes_: object) -> None:
    async with written(tmp_path, jobs(3)) as (journal, reader):
        if bytes_ is not None:
            corrupt(journal.path, "UPDATE bodies SET body = ? WHERE serial = 2", bytes_)
            with pytest.raises(Forgotten) as told:
                await reader.stored(2)
            assert told.value.stable_code == "damaged"
        corrupt(journal.path, "UPDATE jobs SET record = ? WHERE serial = 2", bytes_)
        assert await reader.stored(1) is not None
        records = dict(await reader.page(None))
        assert list(records) == [3, 2, 1]
        assert records[1].outcome is not None
        assert records[1].outcome.kind is OutcomeKind.OK
        damaged = records[2]
        assert damaged.outcome is not None
        assert (damaged.job_id, damaged.outcome.kind, damaged.outcome.code) == ("j2", OutcomeKind.LOST, "damaged")
        assert damaged.verdict is Verdict.DROP
        assert damaged.reward is None
        known = await reader.known("default", "j2")
        assert known is not None
        assert known.record == damaged


async def test_what_is_cut_off_within_its_checksum_is_damaged(tmp_path: Path) -> None:
    async with written(tmp_path, jobs(1)) as (journal, reader):
        body = await reader.ask(lambda db: db.execute("SELECT body FROM bodies").fetchone()[0])
        for at in random.Random(5).sample(range(len(body)), 40):
            corrupt(journal.path, "UPDATE bodies SET body = ?", body[:at] + bytes([body[at] ^ 0x41]) + body[at + 1 :])
            with pytest.raises(Forgotten):
                await reader.stored(1)


async def test_nothing_can_be_written_through_a_reader(tmp_path: Path) -> None:
    async with written(tmp_path, jobs(1)) as (_, reader):
        with pytest.raises(Overloaded, match="readonly"):
            await reader.ask(lambda db: db.execute("DELETE FROM jobs"))
        assert await reader.stored(1) is not None


async def test_a_missing_file_is_not_made(tmp_path: Path) -> None:
    reader = Reader(tmp_path / "journal.sqlite")
    with pytest.raises(Overloaded, match="can't be read"):
        await reader.counts()
    assert not await trio.Path(reader.path).exists()


async def test_a_question_that_nobody_waits_for_ends(tmp_path: Path) -> None:
    """Both threads are held by questions without an end; their askers leave; the next question is answered."""
    async with written(tmp_path, jobs(1)) as (_, reader):

        def endless(db: sqlite3.Connection) -> None:
            db.execute(
                "WITH RECURSIVE n (x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT sum(x) FROM n"
            ).fetchall()

        with trio.move_on_after(0.05) as left:
            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(reader.ask, endless)
        assert left.cancelled_caught
        assert await reader.counts() == {"live": 0, "done": 1, "forgotten": 0}
