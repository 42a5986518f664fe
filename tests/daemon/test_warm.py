"""A daemon that keeps sandboxes warm: they are listed, used, given up in a drain, and gone however it ends."""

from __future__ import annotations

import signal
import time
import urllib.request
from pathlib import Path

import pytest

from prorld.domain.job import AgentLimits
from prorld.domain.outcome import OutcomeKind
from prorld.testing.scripted_engine.script import Script
from prorld.wire.jobs import SubmitJob
from tests.daemon.support import Started, alive, daemon, scripted_engine, until

pytestmark = pytest.mark.slow

TURNS: list[list[int] | str] = [
    '<tool_call>{"name": "bash", "arguments": {"command": "echo 4"}}</tool_call>',
    "The answer is \\boxed{4}.",
]


def job(name: str) -> SubmitJob:
    """A math job with a shell."""
    return SubmitJob(
        job_id=name,
        handler="math",
        instance={"problem": "What is 2 + 2?", "answer": "4"},
        agent=AgentLimits(tools=["bash"]),
    )


def sandboxes_left(here: Started) -> list[Path]:
    return [entry for entry in (here.state / "sandboxes").glob("*/*") if entry.name != "owner"]


def metrics_page(here: Started, address: str) -> str:
    """What Prometheus reads."""
    token = (here.state / "token").read_text().strip()
    asked = urllib.request.Request(f"{address}/metrics", headers={"authorization": f"Bearer {token}"})
    with urllib.request.urlopen(asked, timeout=10) as answer:
        return answer.read().decode()


def counted(page: str, name: str) -> float:
    """The value of one series."""
    return next((float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name)), 0.0)


def test_jobs_find_warm_ones(tmp_path: Path) -> None:
    """Jobs that keep coming find sandboxes ready; SIGTERM leaves none, nor a directory."""
    with scripted_engine(tmp_path, Script(turns=TURNS)) as engine, daemon(tmp_path, engine, warm=3) as here:
        with here.client() as client:
            boot = client.status().boot_id
            assert client.sandboxes().items == []
            for number in range(6):
                client.submit(job(f"j{number}"))
                record = client.wait(f"j{number}")
                assert record.outcome is not None
                assert record.outcome.kind == OutcomeKind.OK, record
                time.sleep(0.3)
            rows = client.sandboxes().items
            assert 1 <= len(rows) <= 3
            assert all(row.job_id == "" and row.sandbox_id.startswith(f"{boot}-warm-") for row in rows)
            assert all(row.rss_bytes > 0 and row.age_s > 0 and row.state == "up" for row in rows)
            assert counted(metrics_page(here, client.address), 'prorld_sandboxes_taken_total{how="warm"') >= 2
        family = here.family()
        here.process.send_signal(signal.SIGTERM)
        here.process.wait(30)
        assert not alive(family)
        assert not sandboxes_left(here)


def test_a_killed_daemon_leaves_no_warm_ones(tmp_path: Path) -> None:
    """SIGKILL: the processes end with the warden, and the next start removes the directories."""
    with scripted_engine(tmp_path, Script(turns=TURNS)) as engine:
        with daemon(tmp_path, engine, warm=3) as here:
            with here.client() as client:
                for number in range(3):
                    client.submit(job(f"j{number}"))
                    client.wait(f"j{number}")
                until(lambda: client.status().sandboxes >= 1, 10, "one is warm")
            family = here.family()
            here.process.kill()
            here.process.wait()
            until(lambda: not alive(family), 5, "no process is left")
            assert sandboxes_left(here)
        with daemon(tmp_path, engine, warm=3) as here, here.client() as client:
            assert client.status().sandboxes == 0
            assert not sandboxes_left(here)
