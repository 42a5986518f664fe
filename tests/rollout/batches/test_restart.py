"""Lives that end as by a kill: what was told stays, what was decided is decided again, nothing is there twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from prorld.errors import Conflict, Forgotten
from prorld.store.batches import Unclaimed
from tests.rollout.batches.support import FakePolicies, life, prompts, settled


async def test_a_running_batch_goes_on_where_it_was(tmp_path: Path, autojump_clock) -> None:
    """Events replay identically; finished samples of unfinished groups are kept; the target counts what there was."""
    async with life(tmp_path) as one:
        await one.submit(instances=prompts(6), target_groups=2, max_running_groups=3)
        await one.finish("b:0", 1.0, 1.0)
        await one.finish("b:2", 1.0, 0.0)
        await one.jobs.finish("b:1:0", reward=1.0)
        before, record = await one.events(), await one.get()
    async with life(tmp_path) as one:
        assert await one.events() == before
        again = await one.get()
        assert (again.groups, again.before_filter) == (record.groups, record.before_filter)
        assert "b:1:0" not in {job_id for _, job_id in one.jobs.live}
        await one.jobs.finish("b:1:1", reward=0.0)
        await settled()
        assert [end for end in await one.ends() if end[1] != "carried"] == [
            ("0", "filtered"), ("2", "done"), ("1", "done"),
        ]  # fmt: skip
        events = await one.events()
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        record = await one.get()
        assert (record.state, record.groups.carried, record.before_filter.groups) == ("complete", 3, 3)


async def test_a_stream_goes_on_after_the_last_acknowledgement(tmp_path: Path, autojump_clock) -> None:
    async with life(tmp_path) as one:
        await one.submit(instances=prompts(6), max_running_groups=1, max_ready_groups=2)
        await one.finish("b:0", 1.0, 0.0)
        await one.finish("b:1", 1.0, 0.0)
        first = next(event.seq for event in await one.events() if event.event == "group.done")
        await one.ack(first)
        await one.finish("b:2", 1.0, 0.0)
    async with life(tmp_path) as one:
        await settled()
        assert one.running() == []
        page = await one.batches.groups("b", "default", after=first, limit=10)
        assert [group.group_id for group in page.items] == ["b:1", "b:2"]
        answer = await one.ack(page.items[0].seq)
        assert answer.ready == 1
        await settled()
        assert one.running() == ["b:3"]


async def test_ends_before_a_decision_was_written_are_found(tmp_path: Path, autojump_clock) -> None:
    """The last sample is on the disk, and the daemon dies before its group is told."""
    async with life(tmp_path) as one:
        await one.submit(instances=prompts(1), target_groups=1)
        await settled()
        one.jobs._listeners.clear()
        await one.jobs.finish("b:0:0", reward=1.0)
        await one.jobs.finish("b:0:1", reward=0.0)
        assert await one.ends() == []
    async with life(tmp_path) as one:
        assert await one.ends() == [("0", "done")]
        assert (await one.get()).state == "complete"


async def test_leftovers_and_claims_survive(tmp_path: Path, autojump_clock) -> None:
    async with life(tmp_path) as one:
        await one.submit(instances=prompts(4), target_groups=1, max_running_groups=2)
        await one.submit(batch_id="c", instances=prompts(1), target_groups=2, carry_from="b")
        await settled()
        await one.jobs.finish("b:1:0", reward=1.0)
    async with life(tmp_path) as one:
        with pytest.raises(Conflict):
            await one.submit(batch_id="d", target_groups=1, carry_from="b")
        await one.finish("b:0", 1.0, 0.0)
        await settled()
        assert (await one.get()).carried_to == "c"
    async with life(tmp_path) as one:
        await one.jobs.finish("b:1:1", reward=0.0)
        await one.finish("b:2", 0.0, 1.0)
        done = [(event.group_id, event.index) for event in await one.events("c") if event.event == "group.done"]
        assert done == [("b:1", 0), ("b:2", 1)]
        assert (await one.get("c")).leftovers == 2
    async with life(tmp_path) as one:
        await one.submit(batch_id="e", target_groups=1, carry_from="c", last=True)
        await one.finish("b:3", 1.0, 0.0)
        assert (await one.get("e")).state == "complete"


async def test_a_kill_before_the_end_with_all_that_is_carried(
    tmp_path: Path, autojump_clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it was told: the next life tells it, and a claimant gets all."""
    async with life(tmp_path) as one:
        await one.submit(instances=prompts(4), target_groups=1, max_running_groups=2)
        (actor,) = one.floor.actors.values()

        async def die(*_: Any, **options: Any) -> None:
            await trio.sleep_forever()

        monkeypatch.setattr(actor.ledger, "end", die)
        await settled()
        await one.jobs.finish("b:0:0", reward=1.0)
        await one.finish("b:1", 1.0, 0.0)
        assert [end for _, end in await one.ends()] == ["done"]
    async with life(tmp_path) as one:
        assert [end for _, end in await one.ends()] == ["done", "carried", "carried", "carried"]
        record = await one.get()
        assert (record.state, record.leftovers, record.groups.carried) == ("complete", 3, 3)
        await one.submit(batch_id="c", target_groups=3, carry_from="b", last=True)
        await one.jobs.finish("b:0:1", reward=0.0)
        await one.finish("b:2", 1.0, 0.0)
        await one.finish("b:3", 1.0, 0.0)
        assert [end for _, end in await one.ends("c")] == ["done"] * 3
        assert (await one.get("c")).state == "complete"


async def test_a_kill_before_the_end_of_a_claimant_and_of_its_claim(tmp_path: Path, autojump_clock) -> None:
    """Both end together, in the next life."""
    async with life(tmp_path, ends_at_once=False) as one:
        await one.submit(instances=prompts(2), target_groups=1)
        await one.submit(batch_id="c", target_groups=1, carry_from="b")
        owe = one.journal.owe

        async def die(*changes: Any) -> Any:
            if any(isinstance(change, Unclaimed) for change in changes):
                await trio.sleep_forever()
            return await owe(*changes)

        one.journal.__dict__["owe"] = die
        await one.batches.cancel("c", "default", "enough")
        await settled()
        assert (await one.get("c")).state == "running"
    async with life(tmp_path) as one:
        await settled()
        assert (await one.get("c")).state == "cancelled"
        await one.submit(batch_id="d", target_groups=1, carry_from="b", last=True)
        assert (await one.get()).carried_to == "d"


async def test_cancelled_leftovers_stay_cancelled(tmp_path: Path, autojump_clock) -> None:
    """Their jobs were not gone yet."""
    async with life(tmp_path, ends_at_once=False) as one:
        await one.submit(instances=prompts(2), target_groups=1)
        await one.finish("b:0", 1.0, 0.0)
        await one.batches.cancel("b", "default", "enough")
        assert one.running() == ["b:1"]
    async with life(tmp_path) as one:
        with pytest.raises(Forgotten):
            await one.submit(batch_id="c", target_groups=1, carry_from="b")
        await settled()
        assert not one.running()
        assert (await one.get()).leftovers == 0


async def test_a_cancel_is_kept(tmp_path: Path, autojump_clock) -> None:
    """It was promised; the jobs were not gone yet."""
    async with life(tmp_path, ends_at_once=False) as one:
        await one.submit(instances=prompts(2), target_groups=1)
        await settled()
        await one.batches.cancel("b", "default", "enough")
        assert (await one.get()).state == "running"
    async with life(tmp_path) as one:
        record = await one.get()
        assert (record.state, record.reason, record.groups.cancelled) == ("cancelled", "enough", 2)


async def test_time_without_a_daemon_does_not_count(tmp_path: Path, autojump_clock) -> None:
    async with life(tmp_path) as one:
        await one.submit(instances=prompts(1), target_groups=1, max_wall_s=100)
        await trio.sleep(60)
    await trio.sleep(1000)
    async with life(tmp_path) as one:
        await trio.sleep(30)
        assert (await one.get()).state == "running"
        await trio.sleep(20)
        assert (await one.get()).state == "exhausted"


async def test_what_is_appended_is_there_and_may_be_repeated(tmp_path: Path, autojump_clock) -> None:
    async with life(tmp_path) as one:
        await one.submit(target_groups=10)
        await one.append(0, 3)
        wants = (await one.get()).wants
    async with life(tmp_path) as one:
        assert (await one.append(0, 3)).next_offset == 3
        record = await one.get()
        assert (record.next_offset, record.groups.running, record.wants) == (3, 3, wants)
        assert (await one.append(3, 1, last=True)).next_offset == 4
        for n in range(4):
            await one.finish(f"b:{n}", 1.0, 1.0)
        assert (await one.get()).state == "exhausted"


async def test_an_ended_batch_is_read_from_the_journal(tmp_path: Path, autojump_clock) -> None:
    async with life(tmp_path) as one:
        await one.submit(instances=prompts(1), target_groups=1, metadata={"step": 3})
        await one.finish("b:0", 1.0, 0.0)
        record, events = await one.get(), await one.events()
        await one.ack(record.last_seq)
    async with life(tmp_path) as one:
        again = await one.get()
        assert again.metadata == {"step": 3}
        assert again.acknowledged == record.last_seq
        assert await one.events() == events
        _, is_new = await one.submitted(instances=prompts(1), target_groups=1, metadata={"step": 3})
        assert not is_new


@pytest.mark.parametrize("moment", range(1, 9))
async def test_a_kill_at_any_of_many_moments(tmp_path: Path, autojump_clock, moment: int) -> None:
    """The same history with a kill after so many ended samples: the same ends, each group once, in one sequence."""
    policies = FakePolicies()
    rewards = {0: (1.0, 0.0), 1: (1.0, 1.0), 2: (0.0, 1.0), 3: (0.0, 0.0), 4: (1.0, 0.0)}
    steps = [(group, sample) for group in rewards for sample in (0, 1)]
    body: dict[str, Any] = {"instances": prompts(8), "target_groups": 3, "max_running_groups": 2}
    async with life(tmp_path, policies=policies) as one:
        await one.submit(**body)
        for group, sample in steps[:moment]:
            await settled()
            await one.jobs.finish(f"b:{group}:{sample}", reward=rewards[group][sample])
    async with life(tmp_path, policies=policies) as one:
        _, is_new = await one.submitted(**body)
        assert not is_new
        for group, sample in steps[moment:]:
            await settled()
            await one.jobs.finish(f"b:{group}:{sample}", reward=rewards[group][sample])
        assert await one.ends() == [
            ("0", "done"), ("1", "filtered"), ("2", "done"), ("3", "filtered"), ("4", "done"),
            ("5", "carried"), ("6", "carried"), ("7", "carried"),
        ]  # fmt: skip
        events = await one.events()
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        assert events[-1].event == "batch.end"
