"""How late the event loop wakes a task: the one number that says whether something hogs it.

It owns a bounded window of samples. It never judges them: what is too late is for whoever reads the quantiles.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import msgspec
import trio

__all__ = ["LagQuantiles", "LoopLag", "run"]

WINDOW_SAMPLES_MAX = 600


class LagQuantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Quantiles over the window, by nearest rank; all zero while there are no samples."""

    samples: int
    p50_s: float
    p99_s: float
    max_s: float


class LoopLag:
    """The last samples of lag. ``note`` is a sink for the probe."""

    def __init__(self, *, window: int = WINDOW_SAMPLES_MAX) -> None:
        assert window >= 1, window
        self._samples: deque[float] = deque(maxlen=window)

    def note(self, lag_s: float) -> None:
        """Take a sample; the oldest one goes when the window is full."""
        self._samples.append(lag_s)

    def quantiles(self) -> LagQuantiles:
        """The median, the 99th percentile and the worst of the window."""
        ordered = sorted(self._samples)
        if not ordered:
            return LagQuantiles(samples=0, p50_s=0.0, p99_s=0.0, max_s=0.0)
        return LagQuantiles(
            samples=len(ordered), p50_s=_rank(ordered, 0.50), p99_s=_rank(ordered, 0.99), max_s=ordered[-1]
        )


async def run(
    period_s: float,
    sink: Callable[[float], None],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Sleep ``period_s`` over and over; ``sink`` gets the seconds by which each wake-up was late. Ends by cancel."""
    assert period_s > 0, period_s
    task_status.started()
    while True:
        due = trio.current_time() + period_s
        await trio.sleep_until(due)
        sink(max(0.0, trio.current_time() - due))


def _rank(ordered: list[float], share: float) -> float:
    return ordered[math.ceil(share * len(ordered)) - 1]
