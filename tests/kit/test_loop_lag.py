"""The probe measures what it says, in bounded memory."""

from __future__ import annotations

from functools import partial

import pytest
import trio
import trio.testing

from prorld.kit.loop_lag import LagQuantiles, LoopLag, run


def test_no_samples_no_lag():
    """An empty window says so."""
    assert LoopLag().quantiles() == LagQuantiles(samples=0, p50_s=0.0, p99_s=0.0, max_s=0.0)


def test_quantiles_by_nearest_rank():
    """Of 1..100 the median is 50, the 99th percentile 99 and the worst 100, in whatever order they came."""
    lag = LoopLag()
    for sample in reversed(range(1, 101)):
        lag.note(sample)
    assert lag.quantiles() == LagQuantiles(samples=100, p50_s=50, p99_s=99, max_s=100)


def test_the_window_is_bounded_and_forgets():
    """Only the newest samples count."""
    lag = LoopLag(window=10)
    for sample in (*[9.0] * 100, *[1.0] * 10):
        lag.note(sample)
    assert lag.quantiles() == LagQuantiles(samples=10, p50_s=1.0, p99_s=1.0, max_s=1.0)


async def test_the_probe_notes_how_late_it_was_woken(autojump_clock: trio.testing.MockClock):
    """An idle loop is on time; a wake-up half a second late is a sample of half a second."""
    lag = LoopLag()
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(run, 1.0, lag.note))
        await trio.sleep(10.5)
        assert lag.quantiles() == LagQuantiles(samples=10, p50_s=0.0, p99_s=0.0, max_s=0.0)
        autojump_clock.jump(1.0)
        await trio.testing.wait_all_tasks_blocked()
        assert lag.quantiles().max_s == pytest.approx(0.5)
        nursery.cancel_scope.cancel()
