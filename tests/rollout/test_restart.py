"""The next life of a daemon: what was told stays as it was, to the byte, and what had not ended goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import trio
import trio.testing

from prorld.domain.job import JobState
from prorld.domain.outcome import OutcomeKind
from prorld.errors import Conflict, Forgotten, Overloaded
from prorld.handlers.base import RunResult
from prorld.rollout.supervisor import SupervisorLimits
from prorld.testing.fake_backend import FakeBackend
from prorld.testing.handlers import FakeHandler
from prorld.testing.scripted_engine.script import Latency, Script
from prorld.wire.jobs import SubmitJob
from prorld.wire.looks import ReevaluateJob
from tests.rollout.support import Room, room

T = TypeVar("T")


def slow() -> list[FakeBackend]:
    """An engine that takes its time."""
    return [FakeBackend(Script(turns=["42"], latency=Latency(fixed_s=5.0)))]


@asynccontextmanager
async def life(state: Path, **options: Any) -> AsyncIterator[Room]:
    """One life of a daemon, which ends without a drain."""
    async with room(state=state, **{"backends": slow(), **options}) as here:
        yield here


async def seen(here: Room, job_id: str) -> bytes:
    """All that a client can read of an ended job."""
    ask = here.supervisor
    return msgspec.json.encode(
        [
            await ask.get(job_id, "tests"),
            await ask.trajectory(job_id, "tests"),
            await ask.events(job_id, "tests"),
            (await ask.list("tests")).items,
        ]
    ) + msgspec.msgpack.encode(await ask.packed_trajectory(job_id, "tests"))


async def test_an_ended_job_looks_the_same_in_the_next_life(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Record, trajectory in both forms, events and list, to the byte; and the same submit is still the same job."""
    async with life(tmp_path) as here:
        await here.finish("a", {"expected": "42", "reward": 1}, metadata={"k": [1, 2.0, None]})
        before = await seen(here, "a")
    async with life(tmp_path) as there:
        assert await seen(there, "a") == before
        assert (await there.looks.verify("a", "tests")).violations == []
        request = SubmitJob(
            job_id="a", handler="fake", instance={"expected": "42", "reward": 1}, metadata={"k": [1, 2.0, None]}
        )
        record, is_new = await there.supervisor.submit(request, "tests")
        assert (record.state, is_new) == (JobState.DONE, False)
        with pytest.raises(Conflict):
            await there.submit("a", {"expected": "other"})
        assert there.supervisor.counts()["done"] == 1


async def test_second_looks_at_a_job_of_an_earlier_life(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    """Scored again from what was kept, requeued, and never changed by either."""
    async with life(tmp_path) as here:
        await here.finish("a", {"expected": "42"})
        before = await here.supervisor.get("a", "tests")
    async with life(tmp_path) as there:
        begun = await there.looks.reevaluate("a", "tests", ReevaluateJob())
        done = await there.looks.wait_reevaluation("a", "tests", begun.n)
        assert (done.n, done.reward) == (1, before.reward)
        record, is_new = await there.supervisor.requeue("a", "tests", "b")
        assert (record.requeued_from, is_new) == ("a", True)
        assert (await there.supervisor.wait_done("b", "tests")).reward == before.reward
        assert await there.supervisor.get("a", "tests") == before


async def test_what_is_not_plain_is_not_graded_again(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a handler left for its grader and can't be written: said at once, and not only after a restart."""
    run = FakeHandler.run

    async def leaving(self: FakeHandler, job: Any) -> RunResult:
        return msgspec.structs.replace(await run(self, job), data={"secret": object()})

    monkeypatch.setattr(FakeHandler, "run", leaving)
    async with life(tmp_path) as here:
        record = await here.finish("a")
        assert record.outcome is not None
        assert record.outcome.kind is OutcomeKind.OK
        with pytest.raises(Conflict) as caught:
            await here.looks.reevaluate("a", "tests", ReevaluateJob())
        assert caught.value.stable_code == "data_not_kept"


async def test_live_jobs_go_on_where_their_story_was(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    """Same id, time, priority and group; the cut attempt is lost and free; numbers of events go on."""
    async with life(tmp_path) as here:
        await here.submit("a", priority=7, group_id="g", max_attempts=1)
        await trio.sleep(2)
        was = await here.supervisor.get("a", "tests")
        told = list(await here.supervisor.events("a", "tests"))
        assert was.state is JobState.RUNNING
    async with life(tmp_path) as there:
        record = await there.supervisor.wait_done("a", "tests")
        assert (record.created_at, record.group_id) == (was.created_at, "g")
        assert [(a.n, a.outcome.kind, a.outcome.code) for a in record.attempts] == [
            (1, OutcomeKind.LOST, "restart"),
            (2, OutcomeKind.OK, "ok"),
        ]
        assert (await there.stored("a")).spec.priority == 7
        events = list(await there.supervisor.events("a", "tests"))
        assert events[: len(told)] == told
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        (again,) = [event for event in events if event.event == "job.restored"]
        assert again.data == {"interrupted": 1, "boot_id": "test"}


async def test_a_job_that_met_the_end_of_many_lives_is_given_up(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be what ends them; before that it goes on, and afterwards it is told once and stays so."""
    monkeypatch.setattr("prorld.rollout.restore.LIVES_MAX", 2)
    for number in range(2):
        async with life(tmp_path) as here:
            if not number:
                await here.submit("a")
            await trio.sleep(2)
            assert (await here.supervisor.get("a", "tests")).outcome is None
    async with life(tmp_path) as here:
        record = await here.supervisor.wait_done("a", "tests")
        assert record.outcome is not None
        assert (record.outcome.kind, record.outcome.code) == (OutcomeKind.LOST, "too_many_restarts")


async def test_jobs_stand_in_line_as_they_were_accepted(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    """First come, first served, in every life."""
    names = [f"j{number}" for number in range(12)]
    async with life(tmp_path, workers=(4, 0, 4)) as here:
        for name in names:
            await here.submit(name)
    async with life(tmp_path, workers=(1, 1, 1), ahead=1) as there:
        with trio.fail_after(600):
            await there.supervisor.wait_idle()
        ended = sorted((await there.supervisor.list("tests")).items, key=lambda record: record.ended_at or "")
        queued = [(record.timing.queue_init_s, record.job_id) for record in ended]
        assert [name for _, name in sorted(queued)] == names


@pytest.mark.parametrize(
    ("change", "kind", "code"),
    [
        ("handler", OutcomeKind.HANDLER_ERROR, "unknown_handler"),
        ("instance", OutcomeKind.HANDLER_ERROR, "instance_refused"),
        ("policy", OutcomeKind.LLM_ERROR, "unknown_policy"),
        ("cancel", OutcomeKind.CANCELLED, "cancelled"),
    ],
)
async def test_what_can_not_go_on_ends_and_says_why(
    change: str,
    kind: OutcomeKind,
    code: str,
    tmp_path: Path,
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A handler or policy that is gone, one that refuses now, a promised cancel: one end each, and nothing runs."""
    async with life(tmp_path) as here:
        await here.submit("a")
        if change == "cancel":
            # The promise alone is on the disk when the lights go out.
            monkeypatch.setattr("prorld.rollout.supervisor._cancel", lambda entry, reason: None)
            assert (await here.supervisor.cancel("a", "tests", "never mind")).state is not JobState.DONE
    there = Room(
        state=tmp_path, backends=slow(), without_handler=change == "handler", without_policy=change == "policy"
    )
    if change == "instance":

        def refuse(self: FakeHandler, instance: Any, limits: Any) -> None:
            raise ValueError("not any more")

        monkeypatch.setattr(FakeHandler, "accept", refuse)
    async with trio.open_nursery() as nursery:
        await nursery.start(there.run)
        record = await there.supervisor.wait_done("a", "tests")
        nursery.cancel_scope.cancel()
    assert record.outcome is not None
    assert (record.outcome.kind, record.outcome.code, record.reward) == (kind, code, None)
    assert there.backends[0].requests == []


class _Disk:
    """A lane whose calls take as long as a disk does."""

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        with trio.CancelScope(shield=True):
            await trio.sleep(0.005)
        return fn(*args)


async def test_many_submits_share_commits(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    """A hundred at once are not a hundred times to the disk; the same id twice at once is one job."""
    async with life(tmp_path, limits=SupervisorLimits(mailbox_size=1000)) as here:
        writes = 0
        write = here.journal._file.write

        def counted(*args: Any) -> Any:
            nonlocal writes
            writes += 1
            return write(*args)

        here.journal._file.write = counted  # type: ignore[method-assign, assignment]
        here.journal._lane = _Disk()
        found: list[bool] = []

        async def submit(number: int) -> None:
            request = SubmitJob(job_id=f"j{number // 2}", handler="fake", instance={})
            found.append((await here.supervisor.submit(request, "tests"))[1])

        async with trio.open_nursery() as nursery:
            for number in range(200):
                nursery.start_soon(submit, number)
        assert (found.count(True), found.count(False)) == (100, 100)
        assert writes < 20


async def test_a_disk_that_refuses_ends_holds_up_nobody_else(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """The job says what it waits for, nothing is accepted, the daemon's end is bounded, and the job runs again."""
    async with life(tmp_path) as here:
        await here.submit("a")

        def broken(*args: Any) -> Any:
            raise OSError(28, "No space left on device")

        here.journal._file.write = broken  # type: ignore[method-assign, assignment]
        await trio.sleep(20)
        record = await here.supervisor.get("a", "tests")
        assert (record.state, record.waiting_for, record.outcome, record.reward) == (
            JobState.EVALUATING, "journal", None, None,
        )  # fmt: skip
        with pytest.raises(Overloaded) as caught:
            await here.submit("b")
        assert caught.value.stable_code == "journal_failing"
        began = trio.current_time()
    assert trio.current_time() - began < 60
    async with life(tmp_path) as there:
        assert (await there.supervisor.wait_done("a", "tests")).reward == 1.0
        assert (await there.supervisor.list("tests")).items[0].job_id == "a"


async def test_what_is_forgotten_while_it_is_read_stays_forgotten(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Whoever was reading gets it whole; whoever comes later does not."""
    async with life(tmp_path) as here:
        await here.finish("a")
    async with life(tmp_path) as there:
        read = there.reader.stored

        async def slowly(serial: int) -> Any:
            stored = await read(serial)
            await there.forget("a")
            return stored

        there.reader.stored = slowly  # type: ignore[method-assign]
        assert (await there.stored("a")).spec.job_id == "a"
        with pytest.raises(Forgotten):
            await there.supervisor.get("a", "tests")
