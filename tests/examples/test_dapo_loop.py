"""The trainer's loop of ``examples`` and the lines of the README, on a real daemon with a scripted engine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from prorld.client import Client
from prorld.testing.scripted_engine.script import Latency, Script
from prorld.wire.batches import BatchRecord
from tests.daemon.support import daemon, environ, scripted_engine, until

ROOT = Path(__file__).parents[2]
HERE = [point.name for point in entry_points(group="prorld.handlers")]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not {"math", "calc"} <= {*HERE}, reason="prorld-math or prorld-calc is not installed"),
]

STEPS, GROUPS, SAMPLES = 3, 4, 4
# Half of the answers are right, so that most groups teach something and some do not.
SCRIPT = Script(turns=["It is \\boxed{4}.", "It is \\boxed{5}."], pick="lot", latency=Latency(fixed_s=0.1))


@contextmanager
def loop(place: Path) -> Iterator[subprocess.Popen[str]]:
    """The loop as a process of its own, which does not outlive the test."""
    prompts = place / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"problem": f"{n} - {n - 4}", "answer": "4"}) + "\n" for n in range(64)))
    command = [sys.executable, str(ROOT / "examples" / "dapo_loop.py"), "--handler", "math", "--prompts", str(prompts)]
    command += ["--steps", str(STEPS), "--groups", str(GROUPS), "--samples", str(SAMPLES)]
    command += ["--publish", "--progress", str(place / "progress.json")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environ(place / "state"), stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def reached(place: Path, step: int, groups: int) -> bool:
    """Whether the loop has written down that it is so far."""
    file = place / "progress.json"
    if not file.exists():
        return False
    found = json.loads(file.read_bytes())
    return (found["step"], found["groups"]) >= (step, groups)


def accepted(client: Client, batch_id: str) -> list[tuple[int, str]]:
    """The groups that a batch accepted, by number and id."""
    events = client.batch_events(batch_id, within_s=10.0)
    return [(event.seq, str(event.group_id)) for event in events if event.event == "group.done"]


def assert_whole(client: Client, out: str) -> None:
    """Every step has its groups, each acknowledged and trained on once, none in two steps."""
    told = {
        int(step): int(groups) for step, groups in re.findall(r"^step (\d+): complete, (\d+) groups", out, re.MULTILINE)
    }
    seen: list[str] = []
    for step in range(STEPS):
        record: BatchRecord = client.batch(f"loop-{step}")
        done = accepted(client, f"loop-{step}")
        assert (record.state, len(done), record.groups.informative) == ("complete", GROUPS, GROUPS)
        assert told.get(step, GROUPS) == GROUPS
        assert record.acknowledged >= done[-1][0]
        seen += [group_id for _, group_id in done]
    assert len(set(seen)) == len(seen)
    assert told[STEPS - 1] == GROUPS
    assert client.policy("default").version == STEPS


def test_a_trainer_that_is_killed_goes_on(tmp_path):
    """SIGKILL in the middle of the second step; the same command ends all of them."""
    with (
        scripted_engine(tmp_path, SCRIPT) as engine,
        daemon(tmp_path, engine, talkative=True) as here,
        here.client() as client,
    ):
        with loop(tmp_path) as first:
            until(lambda: reached(tmp_path, 1, 2), 120, "the second step has begun")
            first.kill()
            before = first.communicate(timeout=30)[0]
        with loop(tmp_path) as second:
            out, err = second.communicate(timeout=180)
        assert second.returncode == 0, err
        assert_whole(client, before + out)


@pytest.mark.parametrize("groups", [2, GROUPS], ids=["in the middle of a step", "while a version is named"])
def test_a_daemon_that_is_killed_is_waited_for(tmp_path, groups: int):
    """SIGKILL, another daemon on another port: the loop notices nothing but time."""
    with scripted_engine(tmp_path, SCRIPT) as engine, ExitStack() as running_here:
        with daemon(tmp_path, engine, talkative=True) as first:
            running = running_here.enter_context(loop(tmp_path))
            until(lambda: reached(tmp_path, 1, groups), 120, "the second step is that far")
            first.process.kill()
            first.process.wait()
        with daemon(tmp_path, engine, talkative=True) as second, second.client() as client:
            out, err = running.communicate(timeout=180)
            assert running.returncode == 0, err
            assert_whole(client, out)


def test_the_lines_of_the_readme_run(tmp_path):
    """As they stand; of its sums the scripted answers fit one."""
    text = (ROOT / "README.md").read_text()
    [block] = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "SubmitBatch" in block]
    assert len([line for line in block.splitlines() if line.strip()]) <= 14
    script = Script(turns=["ANSWER: 42", "ANSWER: 43"], pick="lot")
    with (
        scripted_engine(tmp_path, script) as engine,
        daemon(tmp_path, engine, talkative=True) as here,
        here.client() as client,
    ):
        command = [sys.executable, "-c", block]
        done = subprocess.run(
            command, env=environ(here.state), capture_output=True, text=True, timeout=180, check=False
        )
        assert done.returncode == 0, done.stderr
        assert [line.split()[0] for line in done.stdout.splitlines()[:-1]] == ["step-0:12"] * 4 + ["step-0:13"] * 4
        assert client.batch("step-0").state == "complete"
