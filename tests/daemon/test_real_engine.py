"""Random cancels on the real engine and real sandboxes: nothing of a cancelled job is left in either."""

from __future__ import annotations

import random
import time
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest

from prorld.domain.job import AgentLimits, Sampling
from prorld.domain.outcome import OutcomeKind
from prorld.wire.jobs import SubmitJob
from tests.daemon.support import Started, daemon, until

HERE = [point.name for point in entry_points(group="prorld.handlers")]

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif("calc" not in HERE, reason="prorld-calc is not installed"),
    pytest.mark.skipif(find_spec("xllamacpp") is None, reason="the embedded engine is not installed"),
]

ROUNDS = 3
JOBS = 8
# Each of these may be open or not at any moment, for reasons that have nothing to do with jobs.
SLACK = 8


def job(name: str) -> SubmitJob:
    """A calculator job that rambles as long as it is let."""
    return SubmitJob(
        job_id=name,
        handler="calc",
        instance={"question": "What is 822 plus 597?", "answer": 1419},
        agent=AgentLimits(max_turns=4),
        sampling=Sampling(max_tokens=64),
    )


def idle(here: Started) -> tuple[int, int]:
    """Processes and descriptors of a daemon with nothing to do."""
    return len(here.family()), here.descriptors()


def test_random_cancels_leave_nothing_in_engine_or_sandbox(tmp_path: Path) -> None:
    """No process, no directory, no socket, no call in the engine; and the next job is served as ever."""
    dice = random.Random(7)
    with daemon(tmp_path, None) as here, here.client() as client:
        until(lambda: bool(client.backends().items), 60, "the embedded engine is up")
        client.submit(job("warm"))
        client.wait("warm")
        until(lambda: client.status().sandboxes == 0, 5, "the first sandbox is gone")
        processes, descriptors = idle(here)
        for round_ in range(ROUNDS):
            names = [f"r{round_}-{number}" for number in range(JOBS)]
            for name in names:
                client.submit(job(name))
            for name in dice.sample(names, JOBS):
                time.sleep(dice.uniform(0, 0.4))
                client.cancel(name, reason="at random")
            ends = [client.wait(name) for name in names]
            kinds = {record.outcome.kind for record in ends if record.outcome is not None}
            assert kinds <= {OutcomeKind.CANCELLED, OutcomeKind.OK, OutcomeKind.POLICY_LIMIT}
            assert OutcomeKind.CANCELLED in kinds
            assert client.status().sandboxes == 0
            until(lambda: len(here.family()) <= processes, 3, "no process of a sandbox is left")
            assert [p.name for p in (here.state / "sandboxes").glob("*/*") if p.name != "owner"] == []
        until(lambda: here.descriptors() <= descriptors + SLACK, 10, "sockets and files are closed")
        backend = client.backends().items[0]
        assert (backend.leases, backend.inflight) == (0, 0)
        client.submit(job("after"))
        record = client.wait("after")
        assert record.outcome is not None
        assert record.outcome.kind in (OutcomeKind.OK, OutcomeKind.POLICY_LIMIT)
