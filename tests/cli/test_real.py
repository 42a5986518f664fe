"""The commands against a real daemon with the embedded engine and real sandboxes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec

import pytest

HERE = [point.name for point in entry_points(group="prorld.handlers")]

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif("calc" not in HERE, reason="prorld-calc is not installed"),
    pytest.mark.skipif(find_spec("xllamacpp") is None, reason="the embedded engine is not installed"),
]

WITHIN_S = 300
# The small model rambles where it may.
SHORT = ("--max-tokens", "48", "--max-turns", "3")


def environ(state):
    """The caller's environment without anything that configures prorld but the state directory."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PRORLD")}
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**kept, "PRORLD_STATE": str(state), "PYTHONPATH": path, "XDG_CONFIG_HOME": str(state)}


def prorld(state, *argv):
    """One command to its end."""
    command = [sys.executable, "-m", "prorld.cli", *argv]
    return subprocess.run(command, env=environ(state), capture_output=True, text=True, check=False, timeout=WITHIN_S)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    """A daemon of this module; yields its state directory and its process."""
    state = tmp_path_factory.mktemp("state")
    command = [sys.executable, "-m", "prorld.cli", "serve", "--port", "0", "--log-format", "json"]
    with (
        (state / "stderr").open("wb") as errors,
        subprocess.Popen(command, env=environ(state), stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line)["event"] == "daemon.started":
                break
        else:
            pytest.fail(f"the daemon did not start: {(state / 'stderr').read_text()}")
        yield state, process
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.stdout.read()
        assert process.wait(60) == 0


def test_from_a_command_to_a_graded_trajectory(daemon):
    """Submit, wait, list, show: a graded rollout comes back and its tokens fit each other."""
    state, _ = daemon
    instance = json.dumps({"question": "What is 12 plus 30?", "answer": 42})
    done = prorld(state, "submit", "--handler", "calc", "--instance", instance, "--n", "2", "--wait", "--json", *SHORT)
    records = json.loads(done.stdout)
    assert (done.returncode, len(records)) == (0, 2), done.stderr
    assert len({record["group_id"] for record in records}) == 1
    for record in records:
        assert record["state"] == "done"
        assert record["outcome"]["kind"] in {"ok", "policy_limit"}
        assert record["reward"] in {0.0, 1.0}
    job_id = records[0]["job_id"]
    assert job_id in prorld(state, "jobs", "--state", "done", "--group", records[0]["group_id"]).stdout
    shown = prorld(state, "show", job_id)
    assert "What is 12 plus 30?" in shown.stdout
    doc = json.loads(prorld(state, "show", job_id, "--json").stdout)
    sampled = sum(sum(branch["mask"]) for branch in doc["branches"])
    assert sampled == sum(call["sampled_len"] for call in doc["calls"]) == records[0]["tokens"]["sampled"] > 0
    rows = prorld(state, "show", job_id, "--tokens").stdout.splitlines()
    assert len(rows) == 2 + len(doc["branches"][0]["token_ids"])


def test_a_cancelled_group_ends_cancelled(daemon):
    """``cancel --group --wait`` returns when all of the group have ended, and no sandbox of a job is left."""
    state, _ = daemon
    instance = json.dumps({"question": "What is 1 plus 1?", "answer": 2})
    ids = prorld(state, "submit", "--handler", "calc", "--instance", instance, "--n", "8", *SHORT).stdout.split()
    group = json.loads(prorld(state, "jobs", "--json", "--limit", "1").stdout)[0]["group_id"]
    ended = prorld(state, "cancel", "--group", group, "--wait", "--reason", "a test")
    assert ended.returncode == 0, ended.stderr
    records = json.loads(prorld(state, "jobs", "--group", group, "--json").stdout)
    assert {record["job_id"] for record in records} == set(ids)
    assert {record["state"] for record in records} == {"done"}
    assert "cancelled" in {record["outcome"]["kind"] for record in records}
    status = json.loads(prorld(state, "status", "--json").stdout)
    assert status["sandboxes"] == status["sandboxes_warm"]


def test_refusals_are_told_with_their_exit_code(daemon):
    """An unknown job and an unknown handler fail; a wrong token is a matter of permission."""
    state, _ = daemon
    assert prorld(state, "show", "no-such-job").returncode == 1
    unknown = prorld(state, "submit", "--handler", "nothing", "--instance", "{}", "--json")
    assert (unknown.returncode, json.loads(unknown.stderr)["error"]["code"]) == (1, "unknown_handler")
    wrong = state / "wrong"
    wrong.write_text("not-the-token-of-this-daemon")
    assert prorld(state, "status", "--token-file", str(wrong)).returncode == 77


def test_status_and_handlers(daemon):
    """The daemon tells what it is and what it can."""
    state, process = daemon
    status = json.loads(prorld(state, "status", "--json").stdout)
    assert status["pid"] == process.pid
    assert "calc" in prorld(state, "handlers").stdout
    assert prorld(state, "status", "--ready").returncode == 0


def test_the_demo(tmp_path):
    """The demo ends well, shows its table and leaves documents that ``show`` reads."""
    done = prorld(tmp_path, "demo", "--n", "3", "--json")
    report = json.loads(done.stdout)
    assert len(report["rows"]) == 3, done.stderr
    assert {row["record"]["state"] for row in report["rows"]} == {"done"}
    assert done.returncode == (0 if report["good"] else 1)
    for row in report["rows"]:
        assert prorld(tmp_path, "show", row["file"]).returncode == 0
    assert not (tmp_path / "demo" / "endpoint.json").exists()
