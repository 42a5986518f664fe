"""What a batch leaves, and the one that gets it: rollouts, not prompts, go over from step to step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from prorld.errors import Conflict, Forgotten, Impossible, NotFound
from tests.rollout.batches.support import FakePolicies, Life, life, prompts, settled


async def first_step(one: Life, **body: Any) -> None:
    """Three groups start, one is enough: 1 has one finished sample, 2 runs, 3 waits, 4 waits."""
    await one.submit(instances=prompts(5), target_groups=1, max_running_groups=3, **body)
    await settled()
    await one.jobs.finish("b:1:0", reward=1.0, versions=(0,))
    await one.finish("b:0", 1.0, 0.0)


async def test_leftovers_go_on_and_come_first_in_the_next_batch(tmp_path: Path, autojump_clock) -> None:
    """With id and finished samples; they count as submitted; their place is that of the new batch."""
    async with life(tmp_path) as one:
        await first_step(one)
        assert (await one.get()).leftovers == 4
        assert sorted(one.running()) == ["b:1", "b:2"]
        assert not one.jobs.told_to_end
        await one.jobs.finish("b:2:0", reward=0.0)
        await one.submit(batch_id="c", instances=prompts(2), target_groups=3, carry_from="b", max_running_groups=3)
        await settled()
        assert sorted(one.running()) == ["b:1", "b:2", "b:3"]
        record = await one.get("c")
        assert (record.groups.running, record.groups.waiting) == (3, 3)
        await one.jobs.finish("b:1:1", reward=0.0)
        await one.jobs.finish("b:2:1", reward=1.0)
        await one.finish("b:3", 1.0, 0.0)
        events = [event for event in await one.events("c") if event.event.startswith("group.")]
        assert [(event.group_id, event.index) for event in events if event.event == "group.done"] == [
            ("b:1", 0), ("b:2", 1), ("b:3", 2),
        ]  # fmt: skip
        assert events[0].rewards == [1.0, 0.0]
        assert {event.group_id for event in events if event.event == "group.carried"} == {"b:4", "c:0", "c:1"}
        assert (await one.get()).carried_to == "c"
        assert (await one.get()).leftovers == 0


async def test_a_second_claimant_is_refused(tmp_path: Path, autojump_clock) -> None:
    async with life(tmp_path) as one:
        await first_step(one)
        await one.submit(batch_id="c", target_groups=1, carry_from="b")
        with pytest.raises(Conflict) as taken:
            await one.submit(batch_id="d", target_groups=1, carry_from="b")
        assert taken.value.stable_code == "carry_taken"
        with pytest.raises(NotFound):
            await one.get("d")


async def test_claims_at_the_same_time_have_one_winner(tmp_path: Path, autojump_clock) -> None:
    async with life(tmp_path) as one:
        await first_step(one)
        won: list[str] = []

        async def claim(name: str) -> None:
            try:
                await one.submit(batch_id=name, target_groups=1, carry_from="b")
            except Conflict:
                return
            won.append(name)

        async with trio.open_nursery() as nursery:
            for name in "cdefg":
                nursery.start_soon(claim, name)
        assert len(won) == 1
        assert (await one.get()).carried_to == won[0]


async def test_a_batch_that_still_runs_hands_over_at_its_end(tmp_path: Path, autojump_clock) -> None:
    """The claimant waits for it, also with prompts of its own."""
    async with life(tmp_path) as one:
        await one.submit(instances=prompts(3), target_groups=1)
        await one.submit(batch_id="c", instances=prompts(1), target_groups=2, carry_from="b")
        await one.append(1, 1, "c")
        with pytest.raises(Conflict):
            await one.submit(batch_id="d", target_groups=1, carry_from="b")
        await settled()
        assert sorted(one.running()) == ["b:0", "b:1", "b:2"] or "c:0" not in one.running()
        await one.finish("b:0", 1.0, 0.0)
        await settled()
        await one.finish("b:2", 1.0, 0.0)
        await one.finish("c:1", 1.0, 0.0)
        done = [(event.group_id, event.index) for event in await one.events("c") if event.event == "group.done"]
        assert done == [("b:2", 1), ("c:1", 3)]


async def test_a_claimant_that_is_cancelled_lets_go(tmp_path: Path, autojump_clock) -> None:
    async with life(tmp_path) as one:
        await one.submit(instances=prompts(2), target_groups=1)
        await one.submit(batch_id="c", instances=prompts(1), target_groups=2, carry_from="b")
        await one.batches.cancel("c", "default", "enough")
        assert (await one.get("c")).state == "cancelled"
        await one.finish("b:0", 1.0, 0.0)
        await one.submit(batch_id="d", target_groups=1, carry_from="b", last=True)
        await one.finish("b:1", 1.0, 0.0)
        assert (await one.get("d")).state == "complete"


async def test_leftovers_that_nobody_claims_are_ended(tmp_path: Path, autojump_clock) -> None:
    async with life(tmp_path) as one:
        await first_step(one, carry_ttl_s=60)
        await trio.sleep(59)
        assert not one.jobs.told_to_end
        await trio.sleep(2)
        await settled()
        assert not one.jobs.live
        record = await one.get()
        assert record.leftovers == 0
        with pytest.raises(Forgotten) as late:
            await one.submit(batch_id="c", target_groups=1, carry_from="b")
        assert late.value.stable_code == "leftovers_expired"
        assert len(one.room.members) == 0


async def test_cancelling_an_ended_batch_ends_what_it_left(tmp_path: Path, autojump_clock) -> None:
    async with life(tmp_path) as one:
        await first_step(one)
        before = await one.get()
        await one.batches.cancel("b", "default", "enough")
        await settled()
        assert not one.jobs.live
        record = await one.get()
        assert (record.state, record.reason, record.leftovers) == (before.state, before.reason, 0)


@pytest.mark.parametrize(
    ("change", "path"), [({"policy": "other"}, "policy"), ({"samples_per_group": 3}, "samples_per_group")]
)
async def test_what_does_not_fit_is_422(tmp_path: Path, autojump_clock, change: dict[str, Any], path: str) -> None:
    async with life(tmp_path) as one:
        await first_step(one)
        with pytest.raises(Impossible) as refused:
            await one.submit(batch_id="c", target_groups=1, carry_from="b", **change)
        assert (refused.value.stable_code, refused.value.details) == ("carry_mismatch", {"path": path})


async def test_nobody_claims_from_another_tenant(tmp_path: Path, autojump_clock) -> None:
    async with life(tmp_path) as one:
        await first_step(one)
        with pytest.raises(NotFound) as refused:
            await one.submit("bob", batch_id="c", target_groups=1, carry_from="b")
        assert refused.value.stable_code == "unknown_batch"


async def test_the_new_rule_and_staleness_apply(tmp_path: Path, autojump_clock) -> None:
    """What was sampled two versions ago is too old for a batch that allows one."""
    policies = FakePolicies()
    async with life(tmp_path, policies=policies) as one:
        await first_step(one, max_staleness=None)
        policies.move(2)
        await one.submit(batch_id="c", target_groups=1, carry_from="b", max_staleness=1, last=True)
        assert (await one.ends("c"))[0] == ("1", "stale")
        await one.finish("b:2", 1.0, 0.0, versions=(1,))
        assert (await one.get("c")).state == "complete"


async def test_a_carried_group_may_be_carried_again(tmp_path: Path, autojump_clock) -> None:
    async with life(tmp_path) as one:
        await first_step(one)
        await one.submit(batch_id="c", target_groups=1, carry_from="b")
        await one.finish("b:2", 1.0, 0.0)
        await one.submit(batch_id="d", target_groups=1, carry_from="c", last=True)
        await one.jobs.finish("b:1:1", reward=0.0)
        await settled()
        events = [event for event in await one.events("d") if event.event == "group.done"]
        assert [(event.group_id, event.index) for event in events] == [("b:1", 0)]
        assert (await one.get("d")).leftovers == 2


async def test_a_chain_of_claims_loses_no_group_and_gives_none_twice(tmp_path: Path, autojump_clock) -> None:
    async with life(tmp_path) as one:
        seen: list[str] = []
        for step in range(5):
            more: dict[str, Any] = {"carry_from": f"s{step - 1}"} if step else {"instances": prompts(10)}
            await one.submit(batch_id=f"s{step}", target_groups=2, max_running_groups=3, **more)
            for n in (2 * step + 1, 2 * step):
                await one.finish(f"s0:{n}", 1.0, 0.0)
            page = await one.batches.groups(f"s{step}", "default", after=0, limit=10)
            assert (page.state, len(page.items)) == ("complete", 2)
            seen += [group.group_id for group in page.items]
        assert sorted(seen) == [f"s0:{n}" for n in range(10)]


async def test_a_source_that_is_cancelled_leaves_its_claimant_nothing(tmp_path: Path, autojump_clock) -> None:
    """And lets it go on with what it has."""
    async with life(tmp_path) as one:
        await one.submit(instances=prompts(2), target_groups=1)
        await one.submit(batch_id="c", instances=prompts(1), target_groups=1, carry_from="b")
        await one.batches.cancel("b", "default", "enough")
        assert (await one.get()).state == "cancelled"
        await one.finish("c:0", 1.0, 0.0)
        assert await one.ends("c") == [("0", "done")]


async def test_cancelling_both_ends_all_of_it(tmp_path: Path, autojump_clock) -> None:
    async with life(tmp_path) as one:
        await one.submit(instances=prompts(2), target_groups=1)
        await one.submit(batch_id="c", instances=prompts(1), target_groups=1, carry_from="b")
        async with trio.open_nursery() as nursery:
            for name in ("b", "c", "b"):
                nursery.start_soon(one.batches.cancel, name, "default", "enough")
        assert [(await one.get(name)).state for name in ("b", "c")] == ["cancelled", "cancelled"]
        assert not one.running()
