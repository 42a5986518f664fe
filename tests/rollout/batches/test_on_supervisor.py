"""Batches over the real supervisor: the same laws as over fake jobs, and nothing left behind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from prorld.domain.job import JobState
from prorld.errors import Conflict
from prorld.rollout.batches.breakers import Breakers
from prorld.rollout.batches.make import make_batches
from prorld.rollout.batches.service import Batches
from prorld.rollout.batches.settings import BatchSettings
from prorld.wire.batches import AckBatch, BatchRecord, SubmitBatch
from tests.rollout.support import Room, room

RULE = {"rule": "all"}


@asynccontextmanager
async def batches(
    *, without_handler: bool = False, without_policy: bool = False, **options: Any
) -> AsyncIterator[tuple[Room, Batches]]:
    """Batches in a room that runs, and of which a part may be gone since its last life."""
    async with room(without_handler=without_handler, without_policy=without_policy, **options) as here:
        made = make_batches(
            here.world, here.supervisor, here.registry, here.book, here.reader, settings=BatchSettings(),
            breakers=Breakers(),
        )  # fmt: skip
        async with trio.open_nursery() as nursery:
            await made.floor.restore()
            await nursery.start(made.floor.run)
            yield here, made
            nursery.cancel_scope.cancel()


async def submit(made: Batches, instances: list[dict[str, Any]], **body: Any) -> BatchRecord:
    asked = {"batch_id": "b", "handler": "fake", "samples_per_group": 2, "instances": instances, "informative": RULE}
    record, _ = await made.submit(msgspec.convert(asked | body, SubmitBatch), "tests", digest="d")
    return record


async def over(made: Batches, batch_id: str = "b") -> BatchRecord:
    with trio.fail_after(10_000):
        while (record := await made.get(batch_id, "tests")).state == "running":
            await made.wait_news(batch_id, "tests", after=record.last_seq)
    return record


async def test_groups_run_and_their_jobs_are_held_until_acknowledged(autojump_clock) -> None:
    async with batches() as (here, made):
        await submit(made, [{"prompt": f"q{n}"} for n in range(3)], target_groups=3)
        record = await over(made)
        assert (record.state, record.groups.informative, record.before_filter.reward_mean) == ("complete", 3, 1.0)
        jobs = await here.supervisor.list("tests", group_id="b:1")
        assert [job.job_id for job in jobs.items] == ["b:1:1", "b:1:0"]
        assert all(job.state is JobState.DONE for job in jobs.items)
        query = "SELECT count(*) FROM jobs WHERE held = 1"
        assert await here.reader.ask(lambda db: db.execute(query).fetchone()[0]) == 6
        await made.acknowledge("b", "tests", AckBatch(through=record.last_seq))
        assert await here.reader.ask(lambda db: db.execute(query).fetchone()[0]) == 0
        with pytest.raises(Conflict) as refused:
            await here.supervisor.requeue("b:1:0", "tests", None)
        assert refused.value.stable_code == "group_ended"


async def test_redundant_work_is_gone_when_the_batch_is_over(autojump_clock) -> None:
    """Engine calls aborted, sandboxes gone, though one of the groups would have run for hours."""
    async with batches(workers=(8, 8, 8)) as (here, made):
        slow = {"prompt": "slow", "sandbox": True, "seconds": {"run": 9000.0}}
        began = trio.current_time()
        await submit(made, [slow, {"prompt": "quick"}], target_groups=1, leftovers="cancel")
        record = await over(made)
        assert trio.current_time() - began < 60
        assert (record.state, record.groups.cancelled, record.waste.jobs) == ("complete", 1, 2)
        assert not here.runtime.list()
        assert here.supervisor.is_idle


async def test_a_life_that_ends_in_the_middle_goes_on(autojump_clock, tmp_path: Path) -> None:
    """Groups in the acknowledged order, none twice; a sample that had ended is not run again."""
    body = [{"prompt": f"q{n}", "seconds": {"run": float(10 * n)}} for n in range(5)]
    async with batches(state=tmp_path) as (_, made):
        await submit(made, body, target_groups=4, max_running_groups=2)
        with trio.fail_after(1000):
            await made.wait_news("b", "tests", after=0, groups=True)
        before = list(await made.events("b", "tests", after=0, limit=100))
    async with batches(state=tmp_path) as (_, made):
        record = await over(made)
        events = list(await made.events("b", "tests", after=0, limit=100))
        assert events[: len(before)] == before
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        ends = [str(event.group_id) for event in events if event.event.startswith("group.")]
        assert sorted(ends) == [f"b:{n}" for n in range(5)]
        assert (record.state, record.groups.informative, record.groups.carried) == ("complete", 4, 1)
        page = await made.groups("b", "tests", after=0, limit=10, trajectories=True)
        assert [group.group_id for group in page.items] == [
            event.group_id for event in events if event.event == "group.done"
        ]
        assert all(isinstance(group.trajectories, list) and None not in group.trajectories for group in page.items)


async def test_a_batch_that_only_fails_opens_the_breaker(autojump_clock) -> None:
    async with batches(workers=(8, 8, 8)) as (_, made):
        bad = [{"prompt": f"q{n}", "fail": {"init": "sandbox"}} for n in range(40)]
        await submit(made, bad, target_groups=20, max_attempts=1)
        record = await over(made)
        assert (record.state, "env_error" in str(record.reason)) == ("failed", True)
        assert record.groups.failed + record.groups.cancelled + record.groups.carried == 40
        assert record.groups.carried > 0
