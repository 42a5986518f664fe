"""A batch from its submit to its end, on fake jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from prorld.domain.outcome import OutcomeKind
from prorld.errors import Conflict, Forgotten, Impossible, NotFound, Overloaded, RequestError, TooMany
from prorld.rollout.batches.settings import BatchSettings
from prorld.wire.batches import EndCounts
from tests.rollout.batches.support import FakePolicies, Life, life, prompts, settled


async def test_a_batch_ends_when_its_target_is_met(tmp_path: Path, autojump_clock) -> None:
    """Informative groups count, others are filtered; what is left is carried, and the last event says how it ended."""
    async with life(tmp_path) as one:
        record = await one.submit(instances=prompts(8), target_groups=2, max_running_groups=3)
        assert (record.state, record.groups.running + record.groups.waiting) == ("running", 8)
        await settled()
        assert one.running() == ["b:0", "b:1", "b:2"]
        await one.finish("b:1", 1.0, 0.0)
        await one.finish("b:0", 1.0, 1.0)
        assert one.running() == ["b:2", "b:3", "b:4"]
        await one.finish("b:4", 0.0, 1.0)
        assert await one.ends() == [
            ("1", "done"), ("0", "filtered"), ("4", "done"), ("2", "carried"), ("3", "carried"), ("5", "carried"),
            ("6", "carried"), ("7", "carried"),
        ]  # fmt: skip
        events = await one.events()
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        last = events[-1]
        assert (last.event, last.state) == ("batch.end", "complete")
        assert last.counts == EndCounts(submitted=8, done=2, filtered=1, carried=5)
        record = await one.get()
        assert (record.state, record.leftovers, record.ended_at is not None) == ("complete", 5, True)
        assert (record.groups.informative, record.groups.uninformative, record.groups.carried) == (2, 1, 5)


async def test_the_terminal_event_of_a_group_has_everything_by_sample_index(tmp_path: Path, autojump_clock) -> None:
    async with life(tmp_path) as one:
        asked = [{"prompt": "q", "expected": "", "reward": 1.0}]
        await one.submit(instances=asked, target_groups=1, samples_per_group=3, quorum={"min_usable": 2})
        await settled()
        await one.jobs.finish("b:0:0", reward=1.0, seconds=2.0, versions=(0, 1))
        await one.jobs.finish("b:0:2", reward=None, kind=OutcomeKind.ENV_ERROR)
        await one.jobs.finish("b:0:1", reward=0.0, seconds=4.0)
        (event,) = [event for event in await one.events() if event.event == "group.done"]
        assert (event.index, event.group_id) == (0, "b:0")
        assert event.rewards == [1.0, 0.0, None]
        assert event.verdicts == ["use", "use", "drop"]
        assert event.durations_s == [2.0, 4.0, 1.0]
        assert event.policy_versions == [[0, 1], [0], [0]]
        assert event.job_ids == ["b:0:0", "b:0:1", "b:0:2"]
        assert isinstance(event.advantages, list)
        assert event.advantages[2] is None
        assert event.advantages[0] == pytest.approx(1.0, abs=1e-4)
        assert "std" in str(event.advantage_formula)


async def test_groups_with_too_few_usable_samples_fail(tmp_path: Path, autojump_clock) -> None:
    """An infrastructure failure is never a zero: without a quorum the group fails and says why."""
    async with life(tmp_path) as one:
        await one.submit(instances=prompts(1), target_groups=1)
        await settled()
        await one.jobs.finish("b:0:0", reward=None, kind=OutcomeKind.LLM_ERROR, code="engine_failed")
        await one.jobs.finish("b:0:1", reward=1.0)
        event = next(event for event in await one.events() if event.event == "group.failed")
        assert "engine_failed" in str(event.reason)
        record = await one.get()
        assert (record.state, record.groups.failed) == ("exhausted", 1)
        assert record.waste.jobs == 2


async def test_stragglers_are_cancelled_after_their_grace(tmp_path: Path, autojump_clock) -> None:
    """The group stands without them, and is told when they are gone."""
    async with life(tmp_path, ends_at_once=False) as one:
        quorum = {"min_usable": 2, "grace_s": 10}
        await one.submit(instances=prompts(1), target_groups=1, samples_per_group=3, quorum=quorum)
        await one.finish("b:0", 1.0, 0.0)
        assert not one.jobs.told_to_end
        await trio.sleep(10.1)
        assert list(one.jobs.told_to_end) == ["b:0:2"]
        assert await one.ends() == []
        await one.jobs.go("b:0:2")
        (event,) = [event for event in await one.events() if event.event == "group.done"]
        assert event.verdicts == ["use", "use", "drop"]


async def test_redundant_groups_are_told_cancelled_when_their_jobs_are_gone(tmp_path: Path, autojump_clock) -> None:
    """Neither their event nor the end of the batch comes before."""
    async with life(tmp_path, ends_at_once=False) as one:
        await one.submit(instances=prompts(3), target_groups=1, leftovers="cancel", max_running_groups=2)
        await one.finish("b:0", 1.0, 0.0)
        assert sorted(one.jobs.told_to_end) == ["b:1:0", "b:1:1"]
        assert await one.ends() == [("0", "done"), ("2", "cancelled")]
        assert (await one.get()).state == "running"
        await one.jobs.go("b:1:0")
        assert await one.ends() == [("0", "done"), ("2", "cancelled")]
        await one.jobs.go("b:1:1")
        assert await one.ends() == [("0", "done"), ("2", "cancelled"), ("1", "cancelled")]
        record = await one.get()
        assert (record.state, record.leftovers, record.waste.jobs) == ("complete", 0, 2)


async def test_drain_lets_the_running_ones_end(tmp_path: Path, autojump_clock) -> None:
    async with life(tmp_path) as one:
        await one.submit(instances=prompts(4), target_groups=1, leftovers="drain", max_running_groups=2)
        await one.finish("b:0", 1.0, 0.0)
        assert (await one.get()).state == "running"
        await one.finish("b:1", 1.0, 0.0)
        assert [end for end in await one.ends() if end[1] == "done"] == [("0", "done"), ("1", "done")]
        assert (await one.get()).state == "complete"


async def test_cancel_ends_all_of_it_and_may_be_repeated(tmp_path: Path, autojump_clock) -> None:
    async with life(tmp_path) as one:
        await one.submit(instances=prompts(3), target_groups=2, max_running_groups=2)
        await one.finish("b:0", 1.0, 0.0)
        await one.batches.cancel("b", "default", "enough")
        assert (await one.get()).state == "cancelled"
        again = await one.batches.cancel("b", "default", "other words")
        assert (again.state, again.reason) == ("cancelled", "enough")
        assert not one.jobs.live
        ends = [end for _, end in await one.ends()]
        assert sorted(ends) == ["cancelled", "cancelled", "done"]


async def test_max_wall_s_is_a_hard_stop(tmp_path: Path, autojump_clock) -> None:
    async with life(tmp_path) as one:
        await one.submit(instances=prompts(1), target_groups=1, max_wall_s=60)
        await trio.sleep(59)
        assert (await one.get()).state == "running"
        await trio.sleep(2)
        record = await one.get()
        assert (record.state, "max_wall_s" in str(record.reason)) == ("exhausted", True)


async def test_max_groups_is_a_hard_stop(tmp_path: Path, autojump_clock) -> None:
    async with life(tmp_path) as one:
        await one.submit(instances=prompts(5), target_groups=2, max_groups=2)
        await one.finish("b:0", 1.0, 1.0)
        await one.finish("b:1", 1.0, 1.0)
        record = await one.get()
        assert (record.state, record.groups.uninformative) == ("exhausted", 2)
        assert sum([record.groups.uninformative, record.groups.carried]) == 5


async def test_submission_order_is_kept_where_it_is_asked_for(tmp_path: Path, autojump_clock) -> None:
    """A quick group waits for those before it, so that speed decides nothing."""
    async with life(tmp_path) as one:
        await one.submit(instances=prompts(3), target_groups=2, selection="submission")
        await one.finish("b:1", 1.0, 0.0)
        assert await one.ends() == []
        await one.finish("b:0", 1.0, 0.0)
        assert (await one.ends())[:2] == [("0", "done"), ("1", "done")]


async def test_a_newer_version_makes_running_groups_stale(tmp_path: Path, autojump_clock) -> None:
    """Heard of at once; the samples that run are ended, and the group says so."""
    policies = FakePolicies()
    async with life(tmp_path, policies=policies) as one:
        await one.submit(instances=prompts(2), target_groups=2, max_staleness=1)
        await settled()
        await one.jobs.finish("b:0:0", reward=1.0, versions=(0,))
        policies.move(1)
        assert await one.ends() == []
        policies.move(2)
        assert await one.ends() == [("0", "stale")]
        assert "b:0:1" in one.jobs.told_to_end
        await one.finish("b:1", 1.0, 0.0, versions=(1,))
        (event,) = [event for event in await one.events() if event.event == "group.done"]
        assert event.staleness == 1
        assert (await one.get()).staleness.max == 1


async def test_a_stream_stops_for_a_trainer_that_does_not_acknowledge(tmp_path: Path, autojump_clock) -> None:
    """At ``max_ready_groups`` nothing more is accepted or started; an acknowledgement lets it go on."""
    async with life(tmp_path) as one:
        await one.submit(instances=prompts(6), max_running_groups=1, max_ready_groups=2)
        await one.finish("b:0", 1.0, 0.0)
        await one.finish("b:1", 1.0, 0.0)
        assert one.running() == []
        done = [event.seq for event in await one.events() if event.event == "group.done"]
        answer = await one.ack(done[0])
        assert (answer.through, answer.ready) == (done[0], 1)
        await settled()
        assert one.running() == ["b:2"]
        assert (await one.get()).state == "running"


async def test_a_stream_without_prompts_left_waits_for_more(tmp_path: Path, autojump_clock) -> None:
    async with life(tmp_path) as one:
        await one.submit(instances=prompts(1))
        await one.finish("b:0", 1.0, 0.0)
        assert (await one.get()).state == "running"
        await one.append(1, 1, last=True)
        await one.finish("b:1", 1.0, 0.0)
        record = await one.get()
        assert (record.state, record.is_last) == ("exhausted", True)


async def test_prompts_that_came_with_the_batch_end_it(tmp_path: Path, autojump_clock) -> None:
    """Without a word about more of them it is over when they ran out; one that was appended to waits for the last."""
    async with life(tmp_path) as one:
        await one.submit(instances=prompts(1), target_groups=2)
        await one.submit(batch_id="c", instances=prompts(1), target_groups=2)
        await one.submit(batch_id="d", instances=prompts(1), target_groups=2, last=False)
        await one.append(1, 1, "c")
        for group in ("b:0", "c:0", "c:1", "d:0"):
            await one.finish(group, 1.0, 1.0)
        assert [(await one.get(name)).state for name in "bcd"] == ["exhausted", "running", "running"]
        await one.append(2, 0, "c", last=True)
        assert (await one.get("c")).state == "exhausted"


async def test_wants_grows_with_what_could_be_used(tmp_path: Path, autojump_clock) -> None:
    async with life(tmp_path) as one:
        await one.submit(max_running_groups=2, target_groups=4)
        totals = [event.total for event in await one.events() if isinstance(event.total, int)]
        assert totals
        assert totals == sorted(set(totals))
        assert (await one.get()).wants == totals[-1]


# --- appending --------------------------------------------------------------------------------------------------------


async def test_appending_is_idempotent_and_gapless(tmp_path: Path, autojump_clock) -> None:
    async with life(tmp_path) as one:
        await one.submit(target_groups=100)
        first = await one.append(0, 3)
        assert (first.accepted, first.next_offset) == (3, 3)
        assert await one.append(0, 3) == first
        assert (await one.append(1, 2)).next_offset == 3
        with pytest.raises(Conflict) as gap:
            await one.append(4, 1)
        assert (gap.value.stable_code, gap.value.details) == ("offset_gap", {"expected_offset": 3})
        with pytest.raises(Conflict) as other:
            await one.append(2, 2)
        assert other.value.details == {"expected_offset": 3}
        assert (await one.append(3, 1, last=True)).next_offset == 4
        with pytest.raises(Conflict) as closed:
            await one.append(4, 1)
        assert closed.value.stable_code == "no_more"
        assert (await one.append(3, 1, last=True)).next_offset == 4
        await one.batches.cancel("b", "default", "enough")
        await settled()
        with pytest.raises(Conflict) as ended:
            await one.append(4, 1)
        assert ended.value.stable_code == "batch_ended"


async def test_a_full_window_is_429(tmp_path: Path, autojump_clock) -> None:
    async with life(tmp_path, settings=BatchSettings(waiting_max=4)) as one:
        await one.submit(target_groups=100, max_running_groups=1)
        await one.append(0, 4)
        await settled()
        await one.append(4, 1)
        with pytest.raises(TooMany) as full:
            await one.append(5, 1)
        assert (full.value.stable_code, full.value.retry_after_s > 0) == ("window_full", True)
        await one.finish("b:0", 1.0, 1.0)
        assert (await one.append(5, 1)).next_offset == 6


async def test_a_bad_prompt_refuses_all_of_them_by_its_place(tmp_path: Path, autojump_clock) -> None:
    async with life(tmp_path) as one:
        bad = [*prompts(2), {"prompt": 3}]
        with pytest.raises(RequestError) as refused:
            await one.submit(instances=bad, target_groups=1)
        assert refused.value.details == {"index": 2, "path": "instances[2].prompt"}
        with pytest.raises(NotFound):
            await one.get()


# --- admission --------------------------------------------------------------------------------------------------------


async def test_the_same_body_is_the_same_batch(tmp_path: Path, autojump_clock) -> None:
    async with life(tmp_path) as one:
        body: dict[str, Any] = {"instances": prompts(2), "target_groups": 1}
        await one.submit(**body)
        _, is_new = await one.submitted(**body)
        assert not is_new
        with pytest.raises(Conflict) as other:
            await one.submitted(**body | {"target_groups": 2})
        assert other.value.stable_code == "batch_exists"
        await one.submit("bob", **body)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"handler": "none"}, "unknown_handler"),
        ({"handler": None}, "unknown_handler"),
        ({"policy": "none"}, "unknown_policy"),
        ({"samples_per_group": 1}, "impossible_quorum"),
        ({"quorum": {"min_usable": 3}}, "impossible_quorum"),
        ({"quorum": {"min_usable": 1}}, "impossible_quorum"),
        ({"target_groups": 3, "max_groups": 2}, "impossible_target"),
        ({"capture": ["routed_experts"]}, "unknown_capture"),
        ({"carry_from": "b"}, "impossible"),
        ({"carry_from": "nothing"}, "unknown_batch"),
    ],
)
async def test_what_cannot_be_is_refused(tmp_path: Path, autojump_clock, body: dict[str, Any], code: str) -> None:
    async with life(tmp_path) as one:
        with pytest.raises((Impossible, NotFound)) as refused:
            await one.submit(**body)
        assert refused.value.stable_code == code
        assert not one.floor.actors


async def test_a_draining_daemon_takes_no_batch(tmp_path: Path, autojump_clock) -> None:
    async with life(tmp_path) as one:
        one.draining = True
        with pytest.raises(Overloaded) as refused:
            await one.submit(target_groups=1)
        assert refused.value.stable_code == "draining"


# --- trouble ----------------------------------------------------------------------------------------------------------


async def test_without_room_groups_wait_and_none_is_lost(tmp_path: Path, autojump_clock) -> None:
    async with life(tmp_path, room=2) as one:
        await one.submit(instances=prompts(3), target_groups=3)
        for n in range(3):
            await trio.sleep(1)
            assert one.running() == [f"b:{n}"]
            await one.finish(f"b:{n}", 1.0, 0.0)
        assert (await one.get()).state == "complete"


async def test_a_refusal_to_start_is_tried_again(tmp_path: Path, autojump_clock) -> None:
    async with life(tmp_path) as one:
        one.jobs.refuses = Overloaded("no disk", retry_after_s=2.0, code="journal_failing")
        await one.submit(instances=prompts(2), target_groups=1)
        await trio.sleep(5)
        assert one.running() == []
        one.jobs.refuses = None
        await trio.sleep(2.5)
        assert one.running() == ["b:0", "b:1"]


async def test_ids_that_a_client_has_taken_are_made_anew(tmp_path: Path, autojump_clock) -> None:
    """A job that is called as ours would be does no harm to the group."""
    async with life(tmp_path) as one:
        await one.submit(batch_id="other", instances=prompts(1), target_groups=1)
        await settled()
        serial, spec = one.jobs.live.pop(("default", "other:0:0"))
        one.jobs.live["default", "b:1:0"] = serial, spec
        await one.submit(instances=prompts(3), target_groups=3)
        await trio.sleep(1)
        ids = [job_id for job_id in one.jobs.started if job_id.startswith("b:")]
        assert sorted(ids)[:2] == ["b:0:0", "b:0:1"]
        assert len(ids) == 6
        assert "b:1:0" not in ids


async def test_a_job_that_only_looks_like_a_member_is_none(tmp_path: Path, autojump_clock) -> None:
    """A client's own job of the same group name and sample index changes nothing."""
    async with life(tmp_path) as one:
        await one.submit(instances=prompts(1), target_groups=1)
        await settled()
        serial, spec = one.jobs.live["default", "b:0:0"]
        one.jobs.live["default", "mine"] = serial + 100, msgspec.structs.replace(spec, job_id="mine")
        await one.jobs.finish("mine", reward=1.0)
        assert (await one.get()).groups.running == 1
        await one.finish("b:0", 1.0, 0.0)
        assert (await one.get()).state == "complete"


async def test_a_bug_in_a_batch_ends_it_and_no_other(
    tmp_path: Path, autojump_clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every group still has its one end, and the batch says that it failed."""
    async with life(tmp_path) as one:
        await one.submit(instances=prompts(2), target_groups=2)
        await one.submit(batch_id="c", instances=prompts(1), target_groups=1)
        await settled()
        (actor,) = [actor for actor in one.floor.actors.values() if actor.ledger.spec.batch_id == "b"]
        monkeypatch.setattr(actor, "_decide", lambda: 1 / 0)
        actor.poke()
        await settled()
        record = await one.get()
        assert (record.state, record.groups.cancelled) == ("failed", 2)
        await one.finish("c:0", 1.0, 0.0)
        assert (await one.get("c")).state == "complete"


async def test_a_forgotten_batch_is_410(tmp_path: Path, autojump_clock) -> None:
    async with life(tmp_path, settings=BatchSettings(forget_after_s=100.0)) as one:
        await one.submit(instances=prompts(1), target_groups=1)
        await one.finish("b:0", 1.0, 0.0)
        await trio.sleep(1)
        assert await one.floor.forget(before="2100-01-01T00:00:00Z") == 0
        record = await one.get()
        await one.ack(record.last_seq)
        assert await one.floor.forget(before="2100-01-01T00:00:00Z") == 1
        with pytest.raises(Forgotten):
            await one.get()
        with pytest.raises(Forgotten):
            await one.submit(instances=prompts(1), target_groups=1)


# --- quota, breaker, pins ---------------------------------------------------------------------------------------------


async def test_over_quota_submits_are_429_until_something_is_acknowledged(tmp_path: Path, autojump_clock) -> None:
    async with life(tmp_path, settings=BatchSettings(unacknowledged_bytes_max=1)) as one:
        await one.submit(instances=prompts(1), target_groups=1)
        await one.finish("b:0", 1.0, 0.0)
        with pytest.raises(TooMany) as over:
            await one.submit(batch_id="c", target_groups=1)
        assert over.value.stable_code == "quota"
        await one.submit("bob", batch_id="c", target_groups=1)
        await one.ack((await one.get()).last_seq)
        await one.submit(batch_id="c", target_groups=1)


async def held(one: Life) -> set[str]:
    """The groups whose jobs are kept for somebody."""
    await settled()
    return await one.reader.ask(lambda db: {row[0] for row in db.execute("SELECT group_id FROM jobs WHERE held = 1")})


async def test_what_is_not_acknowledged_is_held_whatever_its_end(tmp_path: Path, autojump_clock) -> None:
    async with life(tmp_path) as one:
        await one.submit(instances=prompts(4), target_groups=3, max_running_groups=4)
        await one.finish("b:0", 1.0, 1.0)
        await one.finish("b:1", 1.0, 0.0)
        assert await held(one) == {"b:0", "b:1", "b:2", "b:3"}
        answer = await one.ack(0, discard=["b:1", "b:1"])
        assert (answer.through, answer.ready) == (0, 0)
        assert await held(one) == {"b:0", "b:2", "b:3"}
        page = await one.batches.groups("b", "default", after=0, limit=10)
        assert not page.items
        await one.ack((await one.events())[-1].seq)
        assert await held(one) == {"b:2", "b:3"}
        with pytest.raises(Impossible) as unknown:
            await one.ack(0, discard=["b:2"])
        assert unknown.value.stable_code == "unknown_group"
        with pytest.raises(Conflict) as beyond:
            await one.ack(1000)
        assert beyond.value.stable_code == "beyond_last"


async def test_of_a_batch_that_is_over_its_accepted_groups_say_how_long_all_are_held(
    tmp_path: Path, autojump_clock
) -> None:
    """Nobody comes for the others then; those that were carried are another batch's, or nobody's."""
    async with life(tmp_path) as one:
        await one.submit(instances=prompts(4), target_groups=1, max_running_groups=4)
        await one.finish("b:0", 1.0, 1.0)
        await one.finish("b:1", 1.0, 0.0)
        assert await held(one) == {"b:0", "b:1", "b:2", "b:3"}
        await one.ack(0, discard=["b:1"])
        assert await held(one) == {"b:2", "b:3"}
        await one.submit(batch_id="c", target_groups=1, carry_from="b")
        await one.finish("b:2", 0.0, 0.0)
        await one.finish("b:3", 0.0, 0.0)
        assert await held(one) == {"b:2", "b:3"}
        await one.append(0, 0, "c", last=True)
        assert (await one.get("c")).state == "exhausted"
        assert await held(one) == set()


async def test_old_events_that_are_acknowledged_are_forgotten(tmp_path: Path, autojump_clock) -> None:
    """So that a stream of weeks does not fill the disk. Numbers go on, here and in a later life."""
    settings = BatchSettings(events_kept=4)
    async with life(tmp_path, settings=settings) as one:
        await one.submit(instances=prompts(9), max_running_groups=20, max_ready_groups=20)
        for group in range(8):
            await one.finish(f"b:{group}", 1.0, 0.0)
        before = await one.events()
        assert await one.floor.forget_events() == 0
        await one.ack(6)
        assert await one.floor.forget_events() == 6
        await one.ack(len(before))
        kept = len(before) - 4
        assert await one.floor.forget_events() == kept - 6
        assert await one.events(after=kept) == before[kept:]
        for after in (-1, 0, kept - 1):
            with pytest.raises(Forgotten) as gone:
                await one.batches.events("b", "default", after=after, limit=100)
            assert (gone.value.stable_code, gone.value.details) == ("events_forgotten", {"after": kept})
        page = await one.batches.groups("b", "default", after=0, limit=100)
        assert [group.seq for group in page.items] == [
            event.seq for event in before[kept:] if event.event == "group.done"
        ]
        rows = await one.reader.ask(lambda db: db.execute("SELECT count(*) FROM groups").fetchone()[0])
        assert rows == 1 + len(page.items)
    async with life(tmp_path, settings=settings) as one:
        assert await one.events(after=kept) == before[kept:]
        await one.finish("b:8", 1.0, 0.0)
        record = await one.get()
        assert record.groups.informative == 9
        assert [event.seq for event in await one.events(after=kept)] == list(range(kept + 1, record.last_seq + 1))
        assert (await one.append(9, 1)).next_offset == 10


async def test_ended_batches_are_bounded_in_number_and_size(tmp_path: Path, autojump_clock) -> None:
    async with life(tmp_path, settings=BatchSettings(ended_max=2)) as one:
        for name in ("a", "b", "c", "d"):
            await one.submit(batch_id=name, instances=prompts(1), target_groups=1)
            await one.finish(f"{name}:0", 1.0, 0.0)
        for name in ("b", "c", "d"):
            await one.ack((await one.get(name)).last_seq, name)
        assert await one.floor.forget(before="") == 1
        listed = await one.batches.list("default")
        assert [record.batch_id for record in listed.items] == ["d", "c", "a"]
    async with life(tmp_path, settings=BatchSettings(ended_bytes_max=1)) as one:
        assert await one.floor.forget(before="") == 2
        assert [record.batch_id for record in (await one.batches.list("default")).items] == ["a"]


async def test_a_breaker_ends_training_and_refuses_more_of_it(tmp_path: Path, autojump_clock) -> None:
    """Rather than burn the prompts; evaluations and other tenants go on, and after the cool-down a few may try."""
    async with life(tmp_path) as one:
        await one.submit(instances=prompts(40), target_groups=20, max_running_groups=10)
        await one.submit(batch_id="e", instances=prompts(1), purpose="eval")
        await settled()
        for group in range(10):
            for sample in (0, 1):
                if ("default", f"b:{group}:{sample}") in one.jobs.live:
                    await one.jobs.finish(f"b:{group}:{sample}", reward=None, kind=OutcomeKind.ENV_ERROR)
        record = await one.get()
        assert (record.state, "env_error" in str(record.reason)) == ("failed", True)
        assert record.groups.waiting + record.groups.running == 0
        with pytest.raises(Overloaded) as open_:
            await one.submit(batch_id="c", target_groups=1)
        assert (open_.value.stable_code, open_.value.retry_after_s > 1) == ("breaker_open", True)
        await one.submit("bob", batch_id="c", target_groups=1)
        assert (await one.get("e")).state == "running"
        await trio.sleep(31)
        await one.submit(batch_id="c", instances=prompts(9), target_groups=9)
        await settled()
        probes = [job_id for _, job_id in one.jobs.live if job_id.startswith("c:")]
        assert len(probes) == 4
        for job_id in probes:
            await one.jobs.finish(job_id, reward=1.0)
        await trio.sleep(2)
        assert len([job_id for _, job_id in one.jobs.live if job_id.startswith("c:")]) == 14


async def test_evaluations_overtake_and_deliver_everything(tmp_path: Path, autojump_clock) -> None:
    async with life(tmp_path) as one:
        record = await one.submit(instances=prompts(3), purpose="eval", pin_version=True)
        assert record.priority > (await one.submit(batch_id="t", target_groups=1)).priority
        assert one.floor.pinned("default") == [("default", "b")]
        await one.finish("b:0", 1.0, 1.0)
        await one.finish("b:1", None, 0.0, kind=OutcomeKind.OK)
        assert one.floor.pinned("default") == [("default", "b")]
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(one.floor.wait_unpinned, "default")
                await one.finish("b:2", 0.0, 0.0)
        record = await one.get()
        assert (record.state, record.groups.informative) == ("complete", 3)
        assert one.floor.pinned("default") == []
