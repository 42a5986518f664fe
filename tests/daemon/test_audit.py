"""Verification on a whole daemon: a job is scored again by command, and one that is chosen without being asked."""

from __future__ import annotations

import urllib.request
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from prorld.cli.main import main
from prorld.config import Config
from prorld.domain.ids import ADMIN_TENANT
from prorld.domain.job import Sampling
from prorld.rollout.audit import is_chosen
from prorld.testing.scripted_engine.script import Script
from prorld.wire.jobs import SubmitJob
from tests.daemon.support import Started, daemon, scripted_engine, until

HERE = [point.name for point in entry_points(group="prorld.handlers")]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("math" not in HERE, reason="prorld-math is not installed"),
]

SCRIPT = Script(turns=["The answer is \\boxed{4}."])
NAMES = [f"job-{n}" for n in range(2000)]
CHOSEN = next(name for name in NAMES if is_chosen(ADMIN_TENANT, name, Config().audit.share))
OTHER = next(name for name in NAMES if not is_chosen(ADMIN_TENANT, name, Config().audit.share))


def metrics(here: Started) -> str:
    """The page of metrics."""
    with here.client() as client:
        address = client.address
    token = (here.state / "token").read_text().strip()
    request = urllib.request.Request(f"{address}/metrics", headers={"authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=10) as reply:
        page: bytes = reply.read()
    return page.decode()


def test_a_daemon_verifies_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By command with the engine's own scores; of itself exactly the job that its id chose; and it ends at once."""
    with scripted_engine(tmp_path, SCRIPT) as engine, daemon(tmp_path, engine) as here, here.client() as client:
        for name in (OTHER, CHOSEN):
            client.submit(
                SubmitJob(
                    job_id=name,
                    handler="math",
                    instance={"problem": "What is 2 + 2?", "answer": "4"},
                    sampling=Sampling(max_tokens=64),
                )
            )
            assert client.wait(name, within_s=60).reward == 1.0
        until(lambda: 'prorld_audits_total{result="ok"} 1.0' in metrics(here), 30, "the chosen job is audited")
        assert main(["verify", "--recent", "5", "--state-dir", str(here.state)]) == 0
        rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
        [engine_info] = client.backends().items
        for name in (OTHER, CHOSEN):
            sampled = str(client.get(name).tokens.sampled)
            assert rows[name][1:] == ["ok", sampled, sampled, "0.00000", "0.00000", "0.0", engine_info.backend_id]
        assert 'prorld_audits_total{result="ok"} 1.0' in metrics(here)
        assert [c.code for c in client.status().conditions if c.code == "logprob_drift"] == []
