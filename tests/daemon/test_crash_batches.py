"""A daemon that is killed while trainers work, and a disk that takes nothing: in small what the bench does in full."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import trio

from prorld.bench.crash import CrashPlan, crash_script, missed, run_crash
from prorld.bench.crash_daemon import small_disk
from prorld.bench.crash_disk import measure_disk
from prorld.bench.processes import BenchFailed
from prorld.testing.scripted_engine.serve import Serving, run_scripted_engine

pytestmark = [pytest.mark.slow]

PLAN = CrashPlan(kills=6, workers=2, latest_s=1.0, disk=False)


async def test_nothing_that_was_told_is_untrue_after_kills():
    """Single jobs, chained batches, a stream, evaluations. Not one answer is taken back."""
    found = await run_crash(PLAN, lambda _: None)
    assert missed(found, PLAN) == [], "\n".join(found.notes)
    assert found.jobs > 10
    assert found.batches >= 4
    assert found.groups_done > 0


@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare(1) is not installed")
async def test_nothing_is_lost_when_the_disk_takes_nothing(tmp_path: Path):
    """Neither by writes that fail nor on a full disk; both are said, and it goes on when there is room again."""
    try:
        async with small_disk(tmp_path / "disk"):
            pass
    except BenchFailed as exc:
        pytest.skip(str(exc))
    notes: list[str] = []
    async with trio.open_nursery() as nursery:
        serving: Serving = await nursery.start(run_scripted_engine, crash_script())
        found = await measure_disk(tmp_path, serving.url, notes, lambda _: None)
        nursery.cancel_scope.cancel()
    assert (found["disk_lies"], found["io_lies"]) == (0, 0), "\n".join(notes)
    # Twice each: once it is over before the daemon is killed, once after that.
    assert (found["disk_said"], found["io_said"]) == (2, 2)
    assert found["disk_refused"]
    assert found["io_refused"]
