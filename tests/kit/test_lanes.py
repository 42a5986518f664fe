"""Lanes: bounded threads, nothing abandoned, and no library that ends the process. Real threads, real time."""

from __future__ import annotations

import sys
import threading
from functools import partial

import pytest
import trio
import trio.testing

from prorld.kit.lanes import Lane, LaneStatistics, LibraryExit


async def test_a_call_runs_in_a_thread_of_the_lane():
    """The result comes back, from a thread that is named after the lane."""
    lane = Lane("files", 2)
    assert await lane.run(lambda a, b: (a + b, threading.current_thread().name), 1, 2) == (3, "lane files")
    assert lane.statistics() == LaneStatistics(name="files", threads=2, busy=0, waiting=0, runs_total=1)


async def test_an_error_comes_out_as_it_is():
    """What the call raises is what run raises."""
    lane = Lane("files", 1)
    with pytest.raises(ZeroDivisionError):
        await lane.run(lambda: 1 // 0)
    assert lane.statistics().runs_total == 1


async def test_a_library_that_exits_does_not_end_the_process():
    """sys.exit() in a call is an error of ours, with the exit as its cause."""
    with pytest.raises(LibraryExit) as caught:
        await Lane("spython", 1).run(sys.exit, 3)
    assert isinstance(caught.value.__cause__, SystemExit)


async def test_no_more_threads_than_the_lane_has_and_other_lanes_are_free():
    """Two calls of three run in a lane of two; another lane is not held up."""
    lane, other = Lane("slow", 2), Lane("other", 1)
    release = threading.Event()
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(partial(lane.run, release.wait, 60.0))
        await trio.testing.wait_all_tasks_blocked()
        seen = lane.statistics()
        assert (seen.busy, seen.waiting) == (2, 1)
        assert await other.run(lambda: 1) == 1
        release.set()
    assert lane.statistics().runs_total == 3


async def test_a_cancelled_call_is_waited_for_and_its_result_kept():
    """A call that runs when the cancel comes ends first, and what it made reaches the caller."""
    lane = Lane("files", 1)
    started, release = threading.Event(), threading.Event()
    results: list[str] = []

    def make() -> str:
        started.set()
        release.wait()
        return "made"

    async def caller(scope: trio.CancelScope) -> None:
        with scope:
            results.append(await lane.run(make))
            await trio.sleep_forever()

    scope = trio.CancelScope()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(caller, scope)
        await trio.to_thread.run_sync(started.wait)
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert lane.statistics().busy == 1
        release.set()
    assert results == ["made"]
    assert scope.cancelled_caught


async def test_a_call_in_the_line_is_cancelled_at_once():
    """A caller that waits for a thread leaves when cancelled, and its call never runs."""
    lane = Lane("files", 1)
    release = threading.Event()
    ran: list[int] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(lane.run, release.wait, 60.0))
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(0.01) as scope:
            await lane.run(ran.append, 1)
        assert scope.cancelled_caught
        release.set()
    assert ran == []
    assert lane.statistics().runs_total == 1
    assert lane.statistics().runs_total == 1


async def test_abandoned_on_request_only():
    """A pure read may be left behind; it keeps its place in the lane until it ends."""
    lane = Lane("files", 1)
    release = threading.Event()
    with trio.move_on_after(0.01) as scope:
        await lane.run(release.wait, abandon_on_cancel=True)
    assert scope.cancelled_caught
    assert lane.statistics().busy == 1
    release.set()
    assert await lane.run(lambda: 2) == 2
