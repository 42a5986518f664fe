"""Records and status as lines."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from prorld.cli.records import age, job_table, one_line
from prorld.cli.status import status_lines
from prorld.domain.job import JobState
from prorld.domain.outcome import Outcome, OutcomeKind
from prorld.wire.ops import BackendInfo, Condition, LoopLagStatus, Ready, Stages, StageStatus, Status

NOW = datetime(2026, 1, 1, 0, 1, 0, tzinfo=UTC)


def test_a_table_of_jobs(make):
    """One line a job; what waits says for what."""
    waiting = make.record(job_id="job-2", state=JobState.INITIALISING, waiting_for="run", outcome=None, reward=None)
    head, done, other = job_table([make.record(), waiting], NOW)
    assert head.split() == ["JOB", "HANDLER", "STATE", "OUTCOME", "VERDICT", "REWARD", "TURNS", "TOKENS", "TOOK", "AGE"]
    assert done.split() == ["job-1", "calc", "done", "ok", "use", "1", "2", "14", "2.5", "s", "59.9", "s"]
    assert "initialising, waits for run" in other


def test_the_end_of_a_job_on_one_line(make):
    """A message with newlines and escapes stays on the line and can't steer."""
    outcome = Outcome(kind=OutcomeKind.LLM_ERROR, message="bad\nreply\x1b[0m")
    line = one_line(make.record(outcome=outcome, reward=None))
    assert line.startswith("job-1  llm_error  reward -  use  2 turns")
    assert line.endswith("bad reply\\x1b[0m")
    assert (
        one_line(make.record(outcome=None, state=JobState.QUEUED, waiting_for="init"))
        == "job-1  queued, waits for init"
    )


@pytest.mark.parametrize(
    ("at", "text"),
    [
        ("2026-01-01T00:00:59Z", "1.0 s"),
        ("2026-01-01T00:00:59.123456789Z", "877 ms"),
        ("2026-01-01T01:00:00+01:00", "60.0 s"),
        ("2026-01-02T00:00:00Z", "0.0 s"),
        ("nonsense", "?"),
    ],
)
def test_ages(at, text):
    """Ages of instants in any zone; a clock that is ahead gives no negative age."""
    assert age(at, NOW) == text


def make_status(**changes):
    gate = StageStatus(workers=8, active=1, waiting=2)
    fields: dict[str, Any] = {
        "version": "0.1.0", "boot_id": "b", "pid": 7, "uptime_s": 125.0, "draining": False,
        "jobs": {"queued": 2, "running": 0}, "outcomes": {}, "stages": Stages(init=gate, run=gate, eval=gate),
        "backends": [], "sandboxes": 1, "loop_lag_s": LoopLagStatus(p50=0.0001, p99=0.002),
    }  # fmt: skip
    return Status(**(fields | changes))


def test_status_without_an_engine_says_how_to_get_one():
    """What is missing comes with its cure."""
    missing = Ready(ready=False, missing=[Condition(code="no_engine", message="no engine", cure="add one")])
    text = "\n".join(status_lines(make_status(), missing, "http://h:1"))
    assert "prorld 0.1.0 at http://h:1: not ready, up 2m05s, pid 7" in text
    assert "missing: no engine; add one" in text
    assert "jobs       2 queued\n" in text
    assert "run        1 of 8 workers busy, 2 waiting" in text
    assert "none up" in text
    assert "prorld doctor" in text


def test_status_tells_sandboxes_that_wait_from_those_of_jobs():
    """Some live although there is no job."""
    ready = Ready(ready=True)
    assert "sandboxes  1" in status_lines(make_status(), ready, "a")
    text = "\n".join(status_lines(make_status(sandboxes=3, sandboxes_warm=2), ready, "a"))
    assert "sandboxes  3, of them 2 waiting for a job\n" in text


def test_status_lists_engines():
    """Engines are a table."""
    engine = BackendInfo(
        backend_id="b-1",
        url="http://e",
        kind="vllm",
        policy="default",
        state="up",
        model="m",
        max_context_tokens=1,
        leases=3,
    )
    text = "\n".join(status_lines(make_status(backends=[engine]), Ready(ready=True), "a"))
    assert "b-1     vllm  up     3       0      -        m      http://e" in text
