"""The journal: what is committed is there when the file is opened again, nothing is told before, and nobody hangs."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from prorld.errors import ConfigError, Conflict, Overloaded
from prorld.metrics import Metrics
from prorld.store import journal as journal_module
from prorld.store import journal_file
from prorld.store.jobs import JobGrew, Known, live_jobs
from prorld.store.journal import CHANGES_PER_COMMIT, CLOSE_S, STALL_S, TRAILS_PER_COMMIT, Change, Journal
from prorld.testing.inline_lane import InlineLane
from prorld.wire.events import JobEvent
from tests.store.faulty import FaultyLane, Line, Table, lines
from tests.store.made import CREATED, accepted, ended

WITHIN_S = 60.0


@asynccontextmanager
async def running(directory: Path, **options: Any) -> AsyncIterator[Journal]:
    journal = Journal(directory, **options)
    await journal.open()
    with trio.fail_after(WITHIN_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(journal.run)
            await journal.commit(Table())
            yield journal
            nursery.cancel_scope.cancel()


def words(journal: Journal) -> tuple[str | None, str | None]:
    """What it says now of its trouble, and of its space."""
    return journal.trouble, journal.scarce


@pytest.mark.parametrize("lane", [None, InlineLane()], ids=["thread", "inline"])
async def test_what_is_committed_is_there_again(tmp_path: Path, lane: InlineLane | None) -> None:
    async with running(tmp_path, lane=lane) as journal:
        assert await journal.commit(accepted(1, "a"), accepted(2, "b")) == [None, None]
        (known,) = await journal.commit(accepted(3, "a"))
        assert isinstance(known, Known)
        assert known.serial == 1
    again = Journal(tmp_path, lane=lane)
    await again.open()
    assert [job.spec.job_id for job in await again.read(live_jobs)] == ["a", "b"]


async def test_what_a_live_job_grew_by_is_there_again_and_goes_with_its_end(tmp_path: Path) -> None:
    def event(seq: int) -> JobEvent:
        return JobEvent(seq=seq, event="job.turn", at=CREATED)

    grew = JobGrew(serial=1, events=[event(1), event(2)])
    async with running(tmp_path) as journal:
        job = accepted(1, "a", held=True)
        await journal.commit(job)
        await journal.owe(grew)
        await journal.owe(JobGrew(serial=1, events=[event(3)]))
        (live,) = await journal.read(live_jobs)
        assert live.held
        assert [seen.seq for seen in live.events] == [1, 2, 3]
        await journal.owe(ended(job))
        await journal.owe(grew)
        assert await journal.read(lambda db: db.execute("SELECT count(*) FROM job_events").fetchone()) == (0,)
        assert await journal.read(live_jobs) == []


async def test_a_damaged_live_job_is_named_and_its_numbers_go_on(tmp_path: Path) -> None:
    async with running(tmp_path) as journal:
        await journal.commit(accepted(1, "a", group_id="g"), accepted(2, "b"))
        await journal.owe(JobGrew(serial=1, events=[JobEvent(seq=n, event="job.turn", at=CREATED) for n in (1, 2)]))
        for statement in ("UPDATE jobs SET spec = x'c1' WHERE serial = 1", "UPDATE job_events SET events = 'x'"):
            await journal.read(sqlite3.Connection.execute, statement)
        damaged, other = await journal.read(live_jobs)
    assert (damaged.spec.job_id, damaged.spec.group_id, damaged.spec.instance) == ("a", "g", {})
    assert damaged.damage
    assert [(seen.seq, seen.event) for seen in damaged.events] == [(2, "events.gap")]
    assert (other.spec.job_id, other.damage) == ("b", "")


# --- bugs of ours -----------------------------------------------------------------------------------------------------


class Wrong:
    """A change with a bug."""

    def __init__(self, act: Callable[[sqlite3.Connection], Any]) -> None:
        self._act = act

    def apply(self, db: sqlite3.Connection) -> Any:
        db.execute("INSERT INTO lines (owner, n) VALUES ('wrong', 1)")
        return self._act(db)

    def disown(self, db: sqlite3.Connection) -> None:
        raise AssertionError("its owner knows that it was not written")


def _raise(exc: Exception) -> Callable[[sqlite3.Connection], None]:
    def act(db: sqlite3.Connection) -> None:
        raise exc

    return act


BUGS: dict[str, tuple[Callable[[sqlite3.Connection], Any], type[Exception]]] = {
    "assertion": (_raise(AssertionError("no")), AssertionError),
    "type": (lambda db: db.execute("SELECT ?", (object(),)), sqlite3.Error),
    "sql": (lambda db: db.execute("SELECT nonsense"), sqlite3.OperationalError),
    "constraint": (lambda db: db.execute("INSERT INTO lines (owner, n) VALUES ('wrong', 1)"), sqlite3.IntegrityError),
    "too large a number": (lambda db: db.execute("SELECT ?", (1 << 70,)), OverflowError),
    "bindings": (lambda db: db.execute("SELECT ?, ?", (1,)), sqlite3.ProgrammingError),
    "refused": (_raise(Conflict("taken")), Conflict),
}


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize("is_owed", [False, True], ids=["commit", "owe"])
async def test_a_bug_in_a_change_costs_that_wish_alone(tmp_path: Path, bug: str, *, is_owed: bool) -> None:
    """It reaches who asked; what was written with it in one commit is there, of it there is nothing."""
    act, error = BUGS[bug]
    async with running(tmp_path) as journal:
        ask = journal.owe if is_owed else journal.commit
        async with trio.open_nursery() as nursery:
            nursery.start_soon(journal.commit, Line("a", 1))
            nursery.start_soon(_fails, ask, error, Line("wrong", 7), Wrong(act))
            nursery.start_soon(journal.commit, Line("b", 1))
        assert journal.trouble is None
        assert sorted(await journal.read(lines)) == [("a", 1), ("b", 1)]


async def _fails(ask: Callable[..., Any], error: type[Exception], *changes: Change) -> None:
    with pytest.raises(error):
        await ask(*changes)


class Growing:
    """A trail of numbers."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.grown = 0
        self.shown = 0
        self._taken = 0

    def take(self) -> Change | None:
        self._taken = self.grown
        return _Lines([Line(self.owner, n) for n in range(self.shown, self.grown)]) if self.grown > self.shown else None

    def written(self) -> None:
        self.shown = self._taken


class _Lines:
    def __init__(self, changes: list[Line]) -> None:
        self._changes = changes

    def apply(self, db: sqlite3.Connection) -> None:
        for change in self._changes:
            change.apply(db)

    def disown(self, db: sqlite3.Connection) -> None:
        """Nothing."""


class _Bad(Growing):
    def take(self) -> Change | None:
        if self.owner == "take":
            raise ValueError("no")
        return Wrong(_raise(ValueError("no")))

    def written(self) -> None:
        self.shown += 1
        if self.owner == "written":
            raise ValueError("no")


async def test_a_bug_in_a_trail_costs_that_trail_alone(tmp_path: Path) -> None:
    async with running(tmp_path) as journal:
        bad = [_Bad(owner) for owner in ("take", "apply", "written")]
        good = Growing("good")
        good.grown = 3
        for trail in (bad[0], bad[1], good, bad[2]):
            journal.soon(trail)
        while good.shown < 3:  # noqa: ASYNC110 - what is looked at has no event
            await trio.sleep(0.01)
        await journal.commit(Line("a", 1))
        assert [trail.shown for trail in bad] == [0, 1, 1]
        assert await journal.read(lines) == [("good", 0), ("good", 1), ("good", 2), ("a", 1)]


# --- order and bounds -------------------------------------------------------------------------------------------------


async def test_a_commit_takes_so_many_bytes_and_the_order_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever comes later is written later, also where a commit was full."""
    monkeypatch.setattr(journal_file, "BYTES_PER_COMMIT", 10)
    metrics = Metrics()
    async with running(tmp_path, metrics=metrics) as journal:
        async with trio.open_nursery() as nursery:
            for n in range(40):
                nursery.start_soon(journal.owe, Line("a" * 5, n))
                await wait_all_tasks_blocked() if n % 7 == 0 else None
        found = [n for _, n in await journal.read(lines)]
        assert sorted(found) == list(range(40))
        commits = metrics.value("prorld_journal_commit_seconds_count")
        assert commits is not None
        assert commits >= 20
        assert metrics.value("prorld_journal_changes_total") == 41


async def test_neither_wishes_nor_trails_starve_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more of both than one commit takes, both are in each of them, once the trails have waited long enough."""
    monkeypatch.setattr(journal_module, "LAZY_S", 0.0)
    journal = Journal(tmp_path)
    await journal.open()
    await journal.read(Table().apply)
    with trio.fail_after(WITHIN_S):
        async with trio.open_nursery() as actor:
            async with trio.open_nursery() as asking:
                for n in range(CHANGES_PER_COMMIT):
                    trail = Growing(f"t{n}")
                    trail.grown = 1
                    journal.soon(trail)
                for n in range(3 * CHANGES_PER_COMMIT):
                    asking.start_soon(journal.owe, Line("w", n))
                await wait_all_tasks_blocked()
                await actor.start(journal.run)
            first = [owner == "w" for owner, _ in await journal.read(lines)][:CHANGES_PER_COMMIT]
            assert first.count(False) == TRAILS_PER_COMMIT
            assert first.count(True) == CHANGES_PER_COMMIT - TRAILS_PER_COMMIT
            actor.cancel_scope.cancel()


# --- the disk ---------------------------------------------------------------------------------------------------------


async def test_while_the_disk_fails_nothing_is_accepted_and_what_is_owed_is_kept(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lane, metrics = FaultyLane(), Metrics()
    async with running(tmp_path, lane=lane, metrics=metrics) as journal:
        for fault in ("before", "after"):
            lane.fault = fault
            told: list[str] = []

            async def owe(n: int, fault: str = fault, told: list[str] = told) -> None:
                await journal.owe(Line(fault, n))
                told.append(f"{fault}{n}")

            async with trio.open_nursery() as nursery:
                for n in range(3):
                    nursery.start_soon(owe, n)
                    await wait_all_tasks_blocked()
                with pytest.raises(Overloaded) as refused:
                    await journal.commit(Line("refused", 1))
                assert refused.value.stable_code == "journal_failing"
                assert words(journal)[0] is not None
                assert metrics.value("prorld_journal_failing") == 1
                await trio.sleep(20)
                assert told == []
                lane.fault = None
            assert sorted(told) == [f"{fault}{n}" for n in range(3)]
            assert words(journal)[0] is None
            assert metrics.value("prorld_journal_failing") == 0
            await journal.commit(Line("accepted", lane.failed))
        found = await journal.read(lines)
    assert [line for line in found if line[0] in ("before", "after")] == [
        (fault, n) for fault in ("before", "after") for n in range(3)
    ]
    assert len([line for line in found if line[0] == "accepted"]) == 2
    assert not [line for line in found if line[0] == "refused"]


async def test_what_reached_the_disk_and_was_refused_is_taken_back(tmp_path: Path, autojump_clock: MockClock) -> None:
    lane = FaultyLane()
    async with running(tmp_path, lane=lane) as journal:
        lane.fault = "after"
        with pytest.raises(Overloaded):
            await journal.commit(accepted(1, "a"))
        lane.fault = None
        while journal.trouble is not None:  # noqa: ASYNC110 - likewise
            await trio.sleep(1)
        assert await journal.read(live_jobs) == []
        assert await journal.commit(accepted(2, "a")) == [None]


async def test_who_asks_of_a_journal_that_has_ended_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as journal:
        pass
    for ask in (journal.commit, journal.owe):
        with pytest.raises(Overloaded, match="going away"):
            await ask(Line("a", 1))


async def test_what_was_asked_for_before_the_end_is_written(tmp_path: Path) -> None:
    """Also when the writer is told to end in the midst of a commit."""
    journal = Journal(tmp_path)
    await journal.open()
    told: list[int] = []

    async def ask(n: int) -> None:
        await journal.owe(Line("a", n))
        told.append(n)

    with trio.fail_after(WITHIN_S):
        async with trio.open_nursery() as asking, trio.open_nursery() as nursery:
            await nursery.start(journal.run)
            await journal.commit(Table())
            for n in range(2000):
                asking.start_soon(ask, n)
            await trio.sleep(0.005)
            nursery.cancel_scope.cancel()
    assert sorted(told) == list(range(2000))
    again = Journal(tmp_path)
    await again.open()
    assert len(await again.read(lines)) == 2000


async def test_a_journal_that_rests_is_in_no_trouble(tmp_path: Path, autojump_clock: MockClock) -> None:
    """However the end of a commit and the watch over it fall together."""
    for turn in range(20):
        async with running(tmp_path, lane=InlineLane()) as journal:
            await journal.commit(Line("a", turn))
            await trio.sleep(STALL_S * 2)
            assert journal.trouble is None


class _Hanging:
    """A change on a disk that does not answer until it is told to."""

    def __init__(self) -> None:
        self.begun = Event()
        self.answers = Event()

    def apply(self, db: sqlite3.Connection) -> None:
        self.begun.set()
        assert self.answers.wait(WITHIN_S)
        db.execute("INSERT OR IGNORE INTO lines (owner, n) VALUES ('hanging', 1)")

    def disown(self, db: sqlite3.Connection) -> None:
        db.execute("DELETE FROM lines WHERE owner = 'hanging'")


async def test_a_disk_that_does_not_answer_is_trouble_until_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "STALL_S", 0.05)
    async with running(tmp_path) as journal:
        hanging = _Hanging()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_fails, journal.commit, Overloaded, hanging)
            await trio.to_thread.run_sync(hanging.begun.wait)
            nursery.start_soon(_fails, journal.commit, Overloaded, Line("queued", 1))
        assert "has not answered" in str(journal.trouble)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(journal.owe, Line("owed", 1))
            await trio.sleep(0.01)
            hanging.answers.set()
        await journal.commit(Line("later", 1))
        assert await journal.read(lines) == [("owed", 1), ("later", 1)]


async def test_a_disk_that_never_answers_does_not_keep_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "CLOSE_S", 0.05)
    journal = Journal(tmp_path)
    await journal.open()
    hanging = _Hanging()
    try:
        with trio.fail_after(WITHIN_S):
            async with trio.open_nursery() as asking, trio.open_nursery() as nursery:
                await nursery.start(journal.run)
                for change in (hanging, Line("a", 1)):
                    asking.start_soon(_fails, journal.owe, Overloaded, change)
                await trio.to_thread.run_sync(hanging.begun.wait)
                nursery.cancel_scope.cancel()
    finally:
        hanging.answers.set()
    assert STALL_S <= CLOSE_S + 1


async def test_a_disk_that_fails_at_the_end_is_tried_once_more(tmp_path: Path, autojump_clock: MockClock) -> None:
    lane = FaultyLane()
    journal = Journal(tmp_path, lane=lane)
    await journal.open()
    told: list[object] = []

    async def owe(n: int) -> None:
        try:
            told.append(await journal.owe(Line("a", n)))
        except Overloaded:
            told.append("refused")

    async with trio.open_nursery() as asking, trio.open_nursery() as nursery:
        await nursery.start(journal.run)
        lane.fault = "before"
        asking.start_soon(owe, 1)
        await trio.sleep(5)
        failed = lane.failed
        nursery.cancel_scope.cancel()
    assert told == ["refused"]
    assert lane.failed > failed


# --- the file ---------------------------------------------------------------------------------------------------------


async def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite").touch(mode=0o666)
    async with running(tmp_path) as journal:
        await journal.commit(Line("a", 1))
        modes = await journal.read(lambda _: {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()})
    assert modes == {"journal.sqlite": 0o600, "journal.sqlite-wal": 0o600, "journal.sqlite-shm": 0o600}


async def test_a_file_that_is_none_is_refused_with_a_cure(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite").write_bytes(b"this is no database, however long one looks at it" * 100)
    with pytest.raises(ConfigError, match=r"journal\.sqlite can't be used: file is not a database; .* backup"):
        await Journal(tmp_path).open()


async def test_a_damaged_file_is_refused_when_it_is_read(tmp_path: Path) -> None:
    async with running(tmp_path) as journal:
        await journal.commit(*(accepted(n, f"j{n}") for n in range(1, 500)))
    path = tmp_path / "journal.sqlite"
    data = bytearray(path.read_bytes())
    data[16384 * 2 :] = os.urandom(len(data) - 16384 * 2)
    path.write_bytes(bytes(data))
    again = Journal(tmp_path)

    async def start() -> None:
        await again.open()
        await again.read(live_jobs)

    with pytest.raises(ConfigError, match="backup"):
        await start()


async def test_a_file_that_was_replaced_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty file in the place of the journal would forget every job that was accepted."""
    monkeypatch.setattr(journal_file, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(journal_module, "RETRY_S", 0.01)
    async with running(tmp_path) as journal:
        await journal.commit(Line("a", 1))
        path, aside = trio.Path(journal.path), trio.Path(tmp_path) / "aside"
        await path.rename(aside)
        with pytest.raises(Overloaded, match="written"):
            await journal.commit(Line("b", 1))
        await path.touch()
        with pytest.raises(Overloaded):
            await journal.commit(Line("b", 2))
        assert (await path.stat()).st_size == 0
        await path.unlink()
        await aside.rename(path)
        await journal.owe(Line("c", 1))
        assert await journal.read(lines) == [("a", 1), ("c", 1)]


async def test_with_little_space_left_only_what_was_accepted_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_file, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(journal_module, "SCARCE_LOOK_S", 0.01)
    free = [1 << 40]

    class Seen:
        f_frsize = 1
        f_bavail = property(lambda _: free[0])

    monkeypatch.setattr(os, "statvfs", lambda _: Seen())
    async with running(tmp_path, reserve_bytes=1 << 20) as journal:
        free[0] = 1 << 19
        with pytest.raises(Overloaded, match="0 MiB are free") as refused:
            await journal.commit(Line("a", 1))
        assert refused.value.stable_code == "journal_failing"
        assert [said is None for said in words(journal)] == [True, False]
        await journal.owe(Line("b", 1))
        await journal.commit(Line("c", 1), grows=False)
        free[0] = 1 << 40
        while journal.scarce is not None:  # noqa: ASYNC110 - likewise
            await trio.sleep(0.01)
        await journal.commit(Line("d", 1))
        assert await journal.read(lines) == [("b", 1), ("c", 1), ("d", 1)]


async def test_a_serial_number_is_never_given_twice(tmp_path: Path) -> None:
    """Such a bug is told, and does not look like a job that is known."""
    async with running(tmp_path) as journal:
        await journal.commit(accepted(1, "a"))
        with pytest.raises(AssertionError, match="another job"):
            await journal.commit(accepted(1, "b"))
        assert [job.spec.job_id for job in await journal.read(live_jobs)] == ["a"]
