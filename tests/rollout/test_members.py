"""What batches ask of the room of jobs: many at once or none, ends by name, room, and the word of every end."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from prorld.domain.job import JobSpec, JobState
from prorld.domain.outcome import OutcomeKind
from prorld.errors import Conflict, Forgotten, Impossible, NotFound, Overloaded
from prorld.rollout.supervisor import SupervisorLimits
from prorld.store.jobs import StoredJob
from tests.rollout.support import Room, room


class Noted:
    """Something that is written together with jobs."""

    def apply(self, db: sqlite3.Connection) -> None:
        db.execute("PRAGMA user_version")
        db.execute("CREATE TABLE IF NOT EXISTS noted (n INTEGER)")
        db.execute("INSERT INTO noted VALUES (1)")

    def disown(self, db: sqlite3.Connection) -> None:
        db.execute("DELETE FROM noted")


def members(*names: str, seconds: float = 0.0, **fields: Any) -> list[JobSpec]:
    return [
        JobSpec(
            job_id=name, tenant="tests", handler="fake", instance={"seconds": {"run": seconds}}, group_id="g",
            sample_index=n, **fields,
        )
        for n, name in enumerate(names)
    ]  # fmt: skip


def on_disk(here: Room) -> list[tuple[str, str, int]]:
    """Ids, states, and whether they are held."""
    db = here.journal._file._db
    assert db is not None
    return db.execute("SELECT job_id, state, held FROM jobs ORDER BY serial").fetchall()


def noted(here: Room) -> int:
    db = here.journal._file._db
    assert db is not None
    if not db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'noted'").fetchone()[0]:
        return 0
    found: int = db.execute("SELECT count(*) FROM noted").fetchone()[0]
    return found


async def nothing_of(here: Room, *names: str) -> None:
    for name in names:
        with pytest.raises(NotFound):
            await here.supervisor.get(name, "tests")
    assert noted(here) == 0
    assert here.supervisor.is_idle


async def test_all_of_them_run_and_are_told_of(autojump_clock: trio.testing.MockClock) -> None:
    """One commit with what belongs to them; held; each end is heard when it is on the disk, and no sooner."""
    async with room() as here:
        heard: list[StoredJob] = []
        states: list[str] = []

        def listen(job: StoredJob) -> None:
            heard.append(job)
            states.extend(state for name, state, _ in on_disk(here) if name == job.spec.job_id)

        here.supervisor.listen(listen)
        await here.supervisor.start(members("a", "b"), Noted())
        assert on_disk(here) == [("a", "live", 1), ("b", "live", 1)]
        assert noted(here) == 1
        await here.supervisor.wait_done("a", "tests")
        await here.supervisor.wait_done("b", "tests")
        assert sorted(job.spec.job_id for job in heard) == ["a", "b"]
        assert states == ["done", "done"]
        await here.finish("single")
        assert len(heard) == 3


@pytest.mark.parametrize("taken", ["live", "ended", "forgotten", "elsewhere"])
async def test_one_id_that_is_taken_refuses_all(taken: str, autojump_clock: trio.testing.MockClock) -> None:
    """Whatever the other job does; that of another tenant is no matter."""
    async with room() as here:
        if taken == "elsewhere":
            await here.supervisor.start(members("b"))
            specs: Sequence[JobSpec] = [JobSpec(**{**_fields(spec), "tenant": "other"}) for spec in members("a", "b")]
            await here.supervisor.start(specs, Noted())
            assert noted(here) == 1
            await here.supervisor.wait_idle()
            return
        await (here.submit("b", {"seconds": {"run": 50.0}}) if taken == "live" else here.finish("b"))
        if taken == "forgotten":
            await here.forget("b")
        with pytest.raises(Conflict) as refused:
            await here.supervisor.start(members("a", "b", "c"), Noted())
        assert refused.value.stable_code == "job_exists"
        await here.supervisor.wait_idle()
        await nothing_of(here, "a", "c")
        if taken == "forgotten":
            with pytest.raises(Forgotten):
                await here.supervisor.get("b", "tests")
        await here.supervisor.start(members("a", "c"), Noted())
        await here.supervisor.wait_idle()


def _fields(spec: JobSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in spec.__struct_fields__}


async def test_the_same_id_twice_among_them(autojump_clock: trio.testing.MockClock) -> None:
    async with room() as here:
        with pytest.raises(Conflict):
            await here.supervisor.start(members("a", "a"))
        await nothing_of(here, "a")


async def test_no_room_for_all_is_room_for_none(autojump_clock: trio.testing.MockClock) -> None:
    """And what never has room is refused for good."""
    async with room(limits=SupervisorLimits(jobs_max=3)) as here:
        assert here.supervisor.room() == 3
        await here.submit("x", {"seconds": {"run": 50.0}})
        await here.submit("y", {"seconds": {"run": 50.0}})
        assert here.supervisor.room() == 1
        with pytest.raises(Overloaded):
            await here.supervisor.start(members("a", "b"), Noted())
        with pytest.raises(Impossible) as never:
            await here.supervisor.start(members("a", "b", "c", "d"))
        assert never.value.stable_code == "too_large"
        await here.supervisor.wait_idle()
        await nothing_of(here, "a", "b", "c", "d")
        await here.supervisor.start(members("a", "b"), Noted())
        await here.supervisor.wait_idle()


@pytest.mark.parametrize(
    ("change", "code"),
    [({"handler": "gone"}, "unknown_handler"), ({"policy": "gone"}, "unknown_policy")],
)
async def test_what_can_not_run_is_not_accepted(
    change: dict[str, str], code: str, autojump_clock: trio.testing.MockClock
) -> None:
    """Not even those beside it that could."""
    async with room() as here:
        specs = [*members("a"), JobSpec(**{**_fields(members("b")[0]), **change})]
        with pytest.raises(Impossible) as refused:
            await here.supervisor.start(specs, Noted())
        assert refused.value.stable_code == code
        await nothing_of(here, "a", "b")
        assert here.supervisor.room() == SupervisorLimits().jobs_max


async def test_nothing_more_while_it_drains(autojump_clock: trio.testing.MockClock) -> None:
    async with room() as here:
        await here.supervisor.start(members("a", seconds=20.0))
        here.supervisor.drain()
        assert here.supervisor.room() == 0
        with pytest.raises(Overloaded) as refused:
            await here.supervisor.start(members("b"))
        assert refused.value.stable_code == "draining"
        assert (await here.supervisor.wait_done("a", "tests")).outcome is not None


async def test_a_disk_that_refuses_leaves_nothing(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    """Refused once the disk is known to fail and at the moment that it begins to; afterwards the same ids are free."""
    async with room(state=tmp_path) as here:
        write = here.journal._file.write

        def refuse(*args: Any) -> Any:
            raise OSError(5, "Input/output error")

        here.journal._file.write = refuse  # type: ignore[method-assign, assignment]
        for _ in range(2):
            with pytest.raises(Overloaded) as refused:
                await here.supervisor.start(members("a", "b"), Noted())
            assert refused.value.stable_code == "journal_failing"
        assert here.supervisor.room() == 0
        here.journal._file.write = write  # type: ignore[method-assign]
        await trio.sleep(20)
        await nothing_of(here, "a", "b")
        await here.supervisor.start(members("a", "b"), Noted())
        await here.supervisor.wait_idle()
        assert noted(here) == 1


async def test_a_kill_while_they_are_written(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    """It reached the disk, and nobody heard: all of them run in the next life, once."""
    async with room(state=tmp_path) as here, trio.open_nursery() as nursery:
        arrived = trio.Event()

        class Deaf:
            async def run(self, fn: Any, *args: Any) -> Any:
                fn(*args)
                arrived.set()
                await trio.sleep_forever()

        async def begin() -> None:
            # Nobody may know what became of them.
            with pytest.raises(Overloaded):
                await here.supervisor.start(members("a", "b"))

        here.journal._lane = Deaf()
        nursery.start_soon(begin)
        await arrived.wait()
        nursery.cancel_scope.cancel()
    async with room(state=tmp_path) as there:
        for name in ("a", "b"):
            record = await there.supervisor.wait_done(name, "tests")
            assert record.outcome is not None
            assert record.outcome.kind is OutcomeKind.OK
            assert [attempt.n for attempt in record.attempts] == [1]
        with pytest.raises(Conflict):
            await there.supervisor.start(members("a", "b"))


async def test_ends_by_name(autojump_clock: trio.testing.MockClock) -> None:
    """Those that run end with the reason; what is done, unknown or another tenant's stays as it is."""
    async with room(workers=(200, 200, 200)) as here:
        await here.supervisor.start(members("quick"))
        await here.supervisor.wait_done("quick", "tests")
        names = [f"j{n}" for n in range(120)]
        await here.supervisor.start(members(*names, "stays", seconds=500.0))
        await trio.sleep(5)
        here.supervisor.end("other", ["stays"], "not yours")
        here.supervisor.end("tests", [*names, "quick", "unknown"], "enough of it")
        with trio.fail_after(100):
            for name in names:
                record = await here.supervisor.wait_done(name, "tests")
                assert record.outcome is not None
                assert (record.outcome.kind, "enough of it" in record.outcome.message) == (OutcomeKind.CANCELLED, True)
        quick = await here.supervisor.get("quick", "tests")
        assert quick.outcome is not None
        assert quick.outcome.kind is OutcomeKind.OK
        assert (await here.supervisor.get("stays", "tests")).state is JobState.RUNNING


async def test_an_end_that_was_asked_for_is_kept(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The promise is on the disk, though the job was not gone when the daemon died."""
    async with room(state=tmp_path) as here:
        await here.supervisor.start(members("a", seconds=500.0))
        monkeypatch.setattr("prorld.rollout.supervisor._cancel", lambda entry, reason: None)
        here.supervisor.end("tests", ["a"], "enough")
        await trio.sleep(5)
    async with room(state=tmp_path) as there:
        record = await there.supervisor.wait_done("a", "tests")
        assert record.outcome is not None
        assert record.outcome.kind is OutcomeKind.CANCELLED
