"""What meets at a bad moment: claims and ends, drops and restarts, damage, a disk that fails, names that collide."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import trio

from prorld.errors import Forgotten, Impossible, Overloaded
from prorld.rollout.batches.settings import BatchSettings
from prorld.rollout.supervisor import SupervisorLimits
from prorld.store.batches import BatchAccepted, EventsTold
from prorld.testing.inline_lane import InlineLane
from prorld.wire.jobs import SubmitJob
from tests.rollout.batches.support import Life, life, prompts, settled
from tests.rollout.batches.test_on_supervisor import batches, over, submit

T = TypeVar("T")


class SlowDisk:
    """Each commit takes ten milliseconds."""

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        await trio.sleep(0.01)
        return await InlineLane().run(fn, *args)


def fails_at_news(one: Life) -> Callable[[], None]:
    """From the next news of a batch on the disk takes nothing; what is returned mends it."""
    write, is_broken = one.journal._file.write, False

    def refuse(disowned: Any, lazy: Any, wanted: Any) -> Any:
        nonlocal is_broken
        is_broken = is_broken or any(isinstance(change, EventsTold) for wish in wanted for change in wish.changes)
        if is_broken:
            raise OSError(28, "No space left on device")
        return write(disowned, lazy, wanted)

    one.journal._file.write = refuse  # type: ignore[method-assign]

    def mend() -> None:
        one.journal._file.write = write  # type: ignore[method-assign]

    return mend


@pytest.mark.parametrize("later_ms", range(0, 80, 4))
async def test_a_claimant_that_ends_when_its_source_does(tmp_path: Path, autojump_clock, later_ms: int) -> None:
    """Whoever is first: the leftovers are the claimant's, and cancelled with it, or free for another one."""
    async with life(tmp_path) as one:
        await one.submit(instances=prompts(3), target_groups=1)
        await one.submit(batch_id="c", instances=prompts(1), target_groups=2, carry_from="b")
        await settled()
        await one.jobs.finish("b:0:0", reward=1.0)
        one.journal._lane = SlowDisk()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.batches.cancel, "c", "default", "enough")
            await trio.sleep(later_ms / 1000)
            nursery.start_soon(partial(one.jobs.finish, "b:0:1", reward=0.0))
        await trio.sleep(1)
        source, claimant = await one.get(), await one.get("c")
        assert (source.state, claimant.state) == ("complete", "cancelled")
        if source.carried_to == "c":
            assert claimant.groups.cancelled == 3
            assert (one.jobs.live, source.leftovers) == ({}, 0)
            return
        assert (claimant.groups.cancelled, source.leftovers) == (1, 2)
    async with life(tmp_path) as one:
        await one.submit(batch_id="d", target_groups=9, carry_from="b", last=True)
        await one.finish("b:1", 1.0, 0.0)
        await one.finish("b:2", 1.0, 0.0)
        record = await one.get("d")
        assert (record.state, record.groups.informative) == ("exhausted", 2)


async def test_what_began_to_be_dropped_is_not_offered_again(tmp_path: Path, autojump_clock) -> None:
    """The cancel was answered; the jobs were not gone yet when the daemon died."""
    async with life(tmp_path, ends_at_once=False) as one:
        await one.submit(instances=prompts(3), target_groups=1)
        await one.finish("b:0", 1.0, 0.0)
        await one.batches.cancel("b", "default", "enough")
        assert (await one.get()).leftovers == 2
    async with life(tmp_path) as one:
        await settled()
        assert not one.jobs.live
        assert (await one.get()).leftovers == 0
        with pytest.raises(Forgotten) as refused:
            await one.submit(batch_id="c", target_groups=1, carry_from="b")
        assert refused.value.stable_code == "leftovers_expired"
        assert len(one.room.members) == 0


async def test_a_damaged_sample_costs_itself_alone(tmp_path: Path, autojump_clock) -> None:
    """The daemon starts, the other sample counts, and the group says what it lacks."""
    async with life(tmp_path) as one:
        await one.submit(
            instances=prompts(2),
            target_groups=2,
            quorum={"min_usable": 1, "grace_s": 9000},
            informative={"rule": "all"},
        )
        await settled()
        await one.jobs.finish("b:0:0", reward=1.0)
        await one.jobs.finish("b:1:0", reward=1.0)
        db = one.journal._file._db
        assert db is not None
        db.execute("UPDATE bodies SET body = X'00' WHERE serial = (SELECT serial FROM jobs WHERE job_id = 'b:0:0')")
    async with life(tmp_path) as one:
        await one.jobs.finish("b:0:1", reward=1.0)
        await one.jobs.finish("b:1:1", reward=1.0)
        assert sorted(await one.ends()) == [("0", "done"), ("1", "done")]
        first = next(event for event in await one.events() if event.group_id == "b:0")
        assert first.rewards == [None, 1.0]


async def test_questions_are_refused_while_the_disk_fails(tmp_path: Path, autojump_clock) -> None:
    """Also while the batch itself waits to write: nobody hangs behind it, and all goes on when the disk does."""
    async with life(tmp_path) as one:
        await one.submit(instances=prompts(2), target_groups=2)
        await settled()
        mend = fails_at_news(one)
        await one.finish("b:0", 1.0, 0.0)
        assert await one.ends() == []
        with trio.fail_after(5):
            for asked in (one.ack(0), one.append(2, 1), one.batches.cancel("b", "default", "enough")):
                with pytest.raises(Overloaded) as refused:
                    await asked
                assert refused.value.stable_code == "journal_failing"
        mend()
        await trio.sleep(10)
        await one.finish("b:1", 1.0, 0.0)
        assert (await one.get()).state == "complete"


async def test_a_batch_that_was_refused_in_doubt_is_not_told_of(tmp_path: Path, autojump_clock) -> None:
    """Its row is on the disk for a moment, until it is taken back."""
    async with life(tmp_path) as one:
        await one.submit(instances=prompts(1))
        accepted: list[BatchAccepted] = []
        commit = one.journal.commit

        async def doubtful(*changes: Any, **options: Any) -> list[Any]:
            await commit(*changes, **options)
            accepted.extend(change for change in changes if isinstance(change, BatchAccepted))
            raise Overloaded("the disk did not answer", code="journal_failing")

        one.journal.commit = doubtful  # type: ignore[method-assign]
        for _ in range(2):
            with pytest.raises(Overloaded):
                await one.submit(batch_id="c", instances=prompts(1))
        assert len(accepted) == 1
        db = one.journal._file._db
        assert db is not None
        accepted[0].disown(db)
        one.journal.commit = commit  # type: ignore[method-assign]
        assert (await one.submit(batch_id="c", instances=prompts(1))).state == "running"


async def test_a_group_that_no_daemon_has_room_for(tmp_path: Path, autojump_clock) -> None:
    """Refused when it is asked for; where it was accepted before the room got smaller, it fails and says so."""
    async with life(tmp_path, settings=BatchSettings(jobs_max=1), room=1) as one:
        with pytest.raises(Impossible) as refused:
            await one.submit(instances=prompts(1))
        assert refused.value.stable_code == "too_large"
    async with batches(limits=SupervisorLimits(accepted_bytes_max=1000)) as (_, made):
        large = {"prompt": "x" * 600}
        await submit(made, [large, {"prompt": "small"}], last=True)
        record = await over(made)
        assert (record.state, record.groups.failed, record.groups.informative) == ("exhausted", 1, 1)
        events = await made.events("b", "tests", after=0, limit=100)
        assert "too_large" in str(next(event.reason for event in events if event.event == "group.failed"))


async def test_groups_whose_handler_or_policy_is_gone_fail(tmp_path: Path, autojump_clock) -> None:
    """Those that ran and those that waited, in the next life; the batch comes to its end."""
    slow = {"prompt": "slow", "seconds": {"run": 9000.0}}
    for gone, code in (("handler", "unknown_handler"), ("policy", "unknown_policy")):
        place = tmp_path / gone
        place.mkdir()
        async with batches(state=place) as (_, made):
            await submit(made, [slow] * 4, max_running_groups=2, target_groups=4)
            await trio.sleep(10)
        async with batches(state=place, **{f"without_{gone}": True}) as (here, made):
            record = await over(made)
            assert (record.state, record.groups.failed) == ("exhausted", 4)
            reasons = [str(e.reason) for e in await made.events("b", "tests", after=0, limit=99) if e.group_id]
            assert all(code in reason for reason in reasons), reasons
            assert here.supervisor.is_idle


async def test_a_clients_own_job_is_no_sample_of_a_group(autojump_clock) -> None:
    """Though it has the name of one, it ends before the group begins, and says the same of itself."""
    async with batches() as (here, made):
        body: list[dict[str, Any]] = [{"prompt": "first", "seconds": {"run": 50.0}}, {"prompt": "second"}]
        await submit(made, body, max_running_groups=1, last=True)
        own = msgspec.convert({"job_id": "b:1:0", "group_id": "b:1", "handler": "fake", "instance": {}}, SubmitJob)
        await here.supervisor.submit(own, "tests")
        await here.supervisor.wait_done("b:1:0", "tests")
        record = await over(made)
        assert (record.state, record.groups.informative) == ("exhausted", 2)
        page = await made.groups("b", "tests", after=0, limit=10)
        second = next(group for group in page.items if group.group_id == "b:1")
        assert "b:1:0" not in second.job_ids
        assert len({str(job_id) for job_id in second.job_ids}) == 2


async def test_a_drain_ends_though_a_stream_does_not(tmp_path: Path, autojump_clock) -> None:
    """What runs ends and is told; nothing more begins; the next life goes on with what waited."""
    prompts_ = [{"prompt": f"q{n}", "seconds": {"run": 10.0}} for n in range(6)]
    async with batches(state=tmp_path) as (here, made):
        await submit(made, prompts_, max_running_groups=2, target_groups=6)
        await trio.sleep(5)
        here.supervisor.drain()
        with trio.fail_after(60):
            await here.supervisor.wait_idle()
        await trio.sleep(30)
        record = await made.get("b", "tests")
        assert (record.state, record.groups.informative) == ("running", 2)
        assert here.supervisor.is_idle
    async with batches(state=tmp_path) as (_, made):
        record = await over(made)
        assert (record.state, record.groups.informative) == ("complete", 6)
