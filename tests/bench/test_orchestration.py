"""The whole bench once, small: real processes, every figure measured."""

from __future__ import annotations

import math

import msgspec
import pytest

from prorld.bench.figures import Figures, Plan
from prorld.bench.orchestration import run_bench

pytestmark = [pytest.mark.slow]

SMALL = Plan(
    rollouts=40, clients=8, turns=3, concurrent=30, slow_call_s=0.5, held=40, abandoned=20, malformed=30
)  # fmt: skip


async def test_a_small_bench_measures_everything():
    """Counts are those of the plan, nothing leaks, nothing stays unanswered, and every figure is a number."""
    heard: list[str] = []
    found = await run_bench(SMALL, heard.append)
    assert len(heard) >= 5
    assert (found.rollouts, found.concurrent_seen, found.cancelled, found.held) == (40, 30, 30, 40)
    assert found.requests_per_rollout == 1
    assert found.calls == 30
    assert found.cpu_ms_per_rollout > found.cpu_ms_per_request > 0
    assert (found.malformed_unanswered, found.held_unanswered, found.fds_leaked, found.tasks_leaked) == (0, 0, 0, 0)
    for field in msgspec.structs.fields(Figures):
        assert not math.isnan(getattr(found, field.name)), field.name
