"""The bench of the queue once, small: all accounted for, and nothing measured is missing."""

from __future__ import annotations

import math

import msgspec
import pytest

from prorld.bench.queue import QueuePlan, run_queue

pytestmark = [pytest.mark.slow]


async def test_a_small_queue_is_accounted_for():
    """Half of it cancelled, half of it run, and nobody lost."""
    found = await run_queue(QueuePlan(jobs=300, cancelled=150), lambda _: None)
    assert (found.jobs, found.cancelled, found.ended_ok, found.ended_cancelled) == (300, 150, 150, 150)
    assert found.unaccounted == 0
    assert found.waiting_seen == 300 - 64
    for name, value in msgspec.structs.asdict(found).items():
        assert name == "notes" or math.isfinite(value), name
