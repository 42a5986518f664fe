"""The bench of batches once, tiny: every strategy on a real daemon."""

from __future__ import annotations

import math

import msgspec
import pytest

from prorld.bench.dapo import run_dapo
from prorld.bench.dapo_figures import STRATEGIES, DapoPlan

pytestmark = [pytest.mark.slow]

TINY = DapoPlan(
    speed=300.0, slots=16, group_size=4, target=4, running=6, training_s=15.0, steps=dict.fromkeys(STRATEGIES, 3)
)


async def test_a_tiny_bench_measures_every_strategy():
    """Each trains on as many informative groups as it should; the others throw away more, and are never stale."""
    heard: list[str] = []
    found = msgspec.structs.asdict(await run_dapo(TINY, heard.append))
    assert len(heard) == len(STRATEGIES) * 4
    assert found["notes"] == []
    for name in STRATEGIES:
        assert found[f"{name}_groups"] == found[f"{name}_steps"] * 4
        assert 0 < found[f"{name}_step_s"] < 60
        assert 0 < found[f"{name}_slot_use"] <= 1
        for figure in ("ratio", "wasted_share", "duration_bias", "difficulty_bias", "full_share", "cpu_share"):
            assert math.isfinite(found[f"{name}_{figure}"]), (name, figure)
    assert [found[f"{name}_staleness_max"] for name in ("batches", "abort", "requeue")] == [0, 0, 0]
    for name in ("abort", "requeue"):
        assert found[f"{name}_wasted_share"] > found["carry_wasted_share"]
