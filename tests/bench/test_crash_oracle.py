"""The oracle of the crash bench: each kind of lie is found, and the truth is none."""

from __future__ import annotations

from typing import Any

import pytest

from prorld.bench.crash_oracle import Oracle, counts_of


def job(state: str = "done", **more: Any) -> dict[str, Any]:
    """A job's record."""
    return {"job_id": "a", "state": state, "attempts": [], "reward": 1.0 if state == "done" else None, **more}


def batch(state: str = "running", **more: Any) -> dict[str, Any]:
    """A batch's record."""
    ended = None if state == "running" else "later"
    groups = dict.fromkeys(
        ("waiting", "running", "informative", "uninformative", "failed", "stale", "cancelled", "carried"), 0
    )
    return {
        "batch_id": "b", "state": state, "reason": None, "created_at": "now", "ended_at": ended, "last_seq": 0,
        "acknowledged": 0, "next_offset": 0, "groups": groups, **more,
    }  # fmt: skip


def event(seq: int, name: str = "group.done", group: str | None = None) -> dict[str, Any]:
    """An event of a group of its own."""
    return {"seq": seq, "event": name, "group_id": group or f"b:{seq}"}


def test_the_truth_is_no_lie():
    """A job that ends, a batch that grows and ends, each told often."""
    oracle = Oracle()
    for record in (job("queued"), job("running"), job(), job()):
        oracle.job(record)
    first, second = event(1), event(2, "group.filtered")
    oracle.batch(batch())
    oracle.batch_events("b", [first])
    oracle.batch_groups("b", [first])
    oracle.batch_groups("b", [first])
    oracle.acked("b", 1)
    oracle.appended("b", 2)
    groups = {**batch()["groups"], "informative": 1, "uninformative": 1}
    ended = batch("complete", last_seq=2, acknowledged=1, next_offset=2, groups=groups)
    oracle.batch(ended)
    oracle.replayed("b", [first, second])
    oracle.counted(ended, [first, second], 2)
    oracle.trail("a", [{"seq": 1, "event": "job.queued"}, {"seq": 2, "event": "job.done"}])
    assert oracle.lies == []
    assert oracle.done == {"a": job()}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (job(), job(reward=0.0)),
        (job(), job("queued")),
        (job("running", attempts=[{"n": 1}]), job("running", attempts=[])),
        (job("running", attempts=[{"n": 1}]), job(attempts=[{"n": 2}])),
    ],
)
def test_a_job_that_takes_something_back_is_a_lie(first: dict[str, Any], second: dict[str, Any]):
    """Its result, its end, its attempts."""
    oracle = Oracle()
    oracle.job(first)
    oracle.job(second)
    assert oracle.lies_total >= 1


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (batch("complete"), batch()),
        (batch("complete"), batch("failed")),
        (batch("complete", last_seq=3), batch("complete", last_seq=4)),
        (batch("complete"), batch("complete", ended_at="another time")),
    ],
)
def test_a_batch_that_has_ended_stays_as_it_is(first: dict[str, Any], second: dict[str, Any]):
    """State, time and last event."""
    oracle = Oracle()
    oracle.batch(first)
    oracle.batch(second)
    assert oracle.lies_total == 1


def test_what_was_told_of_a_running_batch_counts():
    """Prompts that were taken, acknowledgements, and events that were shown."""
    for tell in (
        lambda oracle: oracle.appended("b", 3),
        lambda oracle: oracle.acked("b", 3),
        lambda oracle: oracle.batch_events("b", [event(3)]),
    ):
        oracle = Oracle()
        tell(oracle)
        oracle.batch(batch(last_seq=2, acknowledged=2, next_offset=2))
        assert oracle.lies_total == 1


def test_an_answer_that_was_overtaken_is_no_lie():
    """It knows of what had been told when it was asked for; what came later it can't know, and must not undo."""
    oracle = Oracle()
    oracle.acked("b", 2)
    before = oracle.before("b")
    oracle.acked("b", 3)
    oracle.appended("b", 4)
    oracle.batch(batch("complete", acknowledged=3, next_offset=4))
    oracle.batch(batch(acknowledged=2), before)
    assert oracle.lies == []
    assert oracle.batches["b"]["state"] == "complete"
    oracle.batch(batch(acknowledged=1), before)
    assert oracle.lies_total == 1


def test_a_number_is_one_event_for_ever():
    """Another event under it is a lie, and so is a group that is delivered twice."""
    oracle = Oracle()
    oracle.batch_events("b", [event(1)])
    oracle.batch_events("b", [event(1, "group.failed")])
    assert oracle.lies_total == 1
    oracle.batch_groups("b", [event(2, group="b:0")])
    oracle.batch_groups("c", [event(7, group="b:0")])
    assert oracle.lies_total == 2


@pytest.mark.parametrize(
    "items",
    [
        [event(1), event(3)],
        [event(2)],
        [event(1), event(2, group="b:1")],
        [event(1), event(2, "group.failed", group="b:1")],
    ],
)
def test_a_replay_has_no_gap_and_one_end_of_each_group(items: list[dict[str, Any]]):
    """Whatever was delivered."""
    oracle = Oracle()
    oracle.batch_groups("b", [item for item in items if item["event"] == "group.done"])
    oracle.lies.clear()
    before = oracle.lies_total
    oracle.replayed("b", items)
    assert oracle.lies_total > before


def test_what_was_shown_is_in_the_replay():
    """An event and a group that are missing from it."""
    oracle = Oracle()
    oracle.batch_events("b", [event(2)])
    oracle.replayed("b", [event(1, "group.filtered")])
    assert oracle.lies_total == 1
    oracle.batch_groups("c", [event(1)])
    oracle.replayed("c", [])
    assert oracle.lies_total == 2


def test_the_counts_add_up():
    """What the record counts is in the events, and all that was submitted has an end."""
    items = [event(1), event(2, "group.carried")]
    assert counts_of(items)["carried"] == 1
    right = {**batch()["groups"], "informative": 1, "carried": 1}
    for record, submitted in ((batch(groups=right), 3), (batch(), 2), (batch(groups={**right, "running": 1}), 2)):
        oracle = Oracle()
        oracle.counted(record, items, submitted)
        assert oracle.lies_total == 1


def test_a_job_has_one_end_and_it_is_the_last_event():
    """By its own trail."""
    trails: list[list[str]] = [["job.queued"], ["job.done", "job.queued"], ["job.done", "job.done"], []]
    for names in trails:
        oracle = Oracle()
        oracle.trail("a", [{"seq": at + 1, "event": name} for at, name in enumerate(names)])
        assert oracle.lies_total == 1, names
