"""Event sequences: gapless, bounded, and honest about what is gone."""

from __future__ import annotations

import trio
import trio.testing
from hypothesis import given, strategies

from prorld.rollout.clock import SystemClock
from prorld.rollout.events import EventLog, Feed
from prorld.wire.events import GAP, JobEvent


def job_event(seq: int) -> JobEvent:
    return JobEvent(seq=seq, event="job.turn", at="now")


@given(
    total=strategies.integers(0, 30), kept=strategies.integers(1, 10),
    seq=strategies.integers(0, 2**63), limit=strategies.integers(1, 12),
)  # fmt: skip
def test_every_number_is_delivered_or_named_in_a_gap(total, kept, seq, limit):
    """Whatever a reader asks for after: consecutive numbers, at most so many, and a gap where events are gone."""

    async def check() -> None:
        log = EventLog(kept_max=kept)
        for _ in range(total):
            log.emit("job.turn", "now")
        found = list(log.after(seq, limit))
        assert len(found) <= limit
        gone = max(0, total - kept)
        expected = list(range(max(seq, gone) + 1, total + 1))
        if seq < gone:
            gap = found.pop(0)
            assert (gap.event, gap.seq, gap.data) == (
                GAP, gone, {"reason": "overrun", "first": seq + 1, "last": gone},
            )  # fmt: skip
            limit_left = limit - 1
        else:
            limit_left = limit
        assert [event.seq for event in found] == expected[:limit_left]
        await trio.lowlevel.checkpoint()

    trio.run(check)


async def test_a_feed_tells_each_tenant_its_own() -> None:
    """Numbers are of the whole, what a tenant may not see is passed over, and the number read up to is told."""
    feed = Feed(SystemClock())
    for seq in range(1, 7):
        feed.of_job("ab"[seq % 2], "j", job_event(seq))
    feed.of_daemon("daemon.draining", jobs=1)
    events, upto = feed.after(0, 100, "a")
    assert ([event.seq for event in events], upto) == ([2, 4, 6], 7)
    events, upto = feed.after(2, 1, "a")
    assert ([event.seq for event in events], upto) == ([4], 4)
    assert [event.event for event in feed.after(6, 100, None)[0]] == ["daemon.draining"]
    assert feed.after(7, 100, None) == ([], 7)


async def test_a_feed_says_what_a_slow_reader_missed() -> None:
    """Numbers that are gone are named, and the reader goes on with the oldest that is kept."""
    feed = Feed(SystemClock(), kept_max=3)
    for seq in range(1, 11):
        feed.of_job("a", "j", job_event(seq))
    events, upto = feed.after(2, 100, "a")
    assert [(event.seq, event.event) for event in events] == [
        (7, GAP),
        (8, "job.turn"),
        (9, "job.turn"),
        (10, "job.turn"),
    ]
    assert (events[0].data, upto) == ({"reason": "overrun", "first": 3, "last": 7}, 10)
    assert [event.seq for event in feed.after(events[0].seq, 100, "a")[0]] == [8, 9, 10]


async def test_a_number_of_an_earlier_life_starts_again() -> None:
    """A reader that comes back after a restart is told at once and gets what there is."""
    feed = Feed(SystemClock())
    feed.of_job("a", "j", job_event(1))
    with trio.fail_after(1):
        await feed.wait_after(500, "a")
    events, upto = feed.after(500, 100, "a")
    assert [(event.seq, event.event, event.data) for event in events] == [
        (0, GAP, {"reason": "restarted"}),
        (1, "job.turn", {}),
    ]
    assert upto == 1


async def test_a_waiting_tenant_sleeps_through_the_events_of_others(autojump_clock: trio.testing.MockClock) -> None:
    """It is woken by its own."""
    feed = Feed(SystemClock())
    woken = trio.Event()

    async def wait() -> None:
        await feed.wait_after(0, "a")
        woken.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        feed.of_job("b", "j", job_event(1))
        await trio.testing.wait_all_tasks_blocked()
        assert not woken.is_set()
        feed.of_job("a", "j", job_event(1))
        await woken.wait()


async def test_many_may_wait_for_the_same_event() -> None:
    """Each of those who follow one job, or the daemon, is told."""
    log, feed, told = EventLog(), Feed(SystemClock()), []

    async def follow(sequence: EventLog, name: str) -> None:
        await sequence.wait_after(0)
        told.append(name)

    async def follow_all(name: str) -> None:
        await feed.wait_after(0, None)
        told.append(name)

    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(follow, log, f"job {number}")
            nursery.start_soon(follow_all, f"all {number}")
        await trio.testing.wait_all_tasks_blocked()
        log.emit("job.turn", "now")
        feed.of_daemon("daemon.draining")
    assert sorted(told) == ["all 0", "all 1", "all 2", "job 0", "job 1", "job 2"]
