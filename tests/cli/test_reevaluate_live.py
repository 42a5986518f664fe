"""``prorld reevaluate`` on a real daemon, started anew with another grader."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prorld.testing.scripted_engine.script import Script
from prorld.wire.jobs import SubmitJob
from tests.daemon.support import daemon, environ, scripted_engine

pytestmark = pytest.mark.slow

HANDLER = """
import msgspec
from prorld.domain.messages import user
from prorld.errors import GraderError
from prorld.handlers import AgentHandler, Grade

class Word(msgspec.Struct, frozen=True):
    word: str

class Regraded(AgentHandler[Word]):
    name = "regraded"
    instance_type = Word

    def prompt(self, instance):
        return [user(f"Say {instance.word}.")]

    async def evaluate(self, job, result):
        if job.instance.word == "BROKEN":
            raise GraderError("it can't be graded")
        job.measure("letters", len(result.answer))
        return Grade(reward=float(GRADER))
"""
SETTINGS = '[handlers]\nenabled = ["regraded"]\n\n'


@pytest.fixture
def grader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes the task, as a distribution that the daemon finds, with this grader."""
    place = tmp_path / "plugin"
    info = place / "prorld_regraded-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: prorld-regraded\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[prorld.handlers]\nregraded = regraded_task:Regraded\n")
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")

    def write(expression: str, broken: str = "nothing") -> None:
        words = HANDLER.replace("GRADER", expression).replace("BROKEN", broken)
        (place / "regraded_task.py").write_text(words)

    return write


def reevaluate(place: Path, *argv: str) -> tuple[int, dict[str, Any]]:
    """The command to its end."""
    command = [sys.executable, "-m", "prorld.cli", "reevaluate", *argv, "--json"]
    done = subprocess.run(
        command, check=False, env=environ(place / "state"), capture_output=True, text=True, timeout=120
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_grader_that_was_changed(tmp_path: Path, grader: Any) -> None:
    """The next life of the daemon scores again; what was delivered stays, and what fails has no reward."""
    words = ["four", "fore", "for", "fuer"]
    with scripted_engine(tmp_path, Script(turns=["four"])) as engine:
        grader("result.answer == job.instance.word", broken="fuer")
        with daemon(tmp_path, engine, settings=SETTINGS) as here, here.client() as client:
            for word in words:
                client.submit(
                    SubmitJob(job_id=word, handler="regraded", instance={"word": word}, group_id="g", max_attempts=1)
                )
            records = [client.wait(word) for word in words]
            assert [record.reward for record in records] == [1.0, 0.0, 0.0, None]
            assert [record.metrics for record in records] == [{"letters": 4.0}] * 3 + [{}]
        grader("result.answer[:2] == job.instance.word[:2]", broken="for")
        with daemon(tmp_path, engine, settings=SETTINGS) as here, here.client() as client:
            code, found = reevaluate(tmp_path, "--group", "g", "--reason", "two letters are enough")
            rows = {row["job_id"]: (row["before"], row["now"], row["changed"]) for row in found["jobs"]}
            assert rows == {
                "four": (1.0, 1.0, False), "fore": (0.0, 1.0, True), "for": (0.0, None, False),
                "fuer": (None, 0.0, True),
            }  # fmt: skip
            assert (code, found["failed"], found["mean_before"], found["mean_now"]) == (1, 1, 0.5, 1.0)
            assert [client.get(word) for word in words] == records
            assert client.reevaluations("fore")[0].reason == "two letters are enough"
            assert reevaluate(tmp_path, "four", "fore")[0] == 0
