"""The loop on a real daemon with a scripted engine: kills, Ctrl-C, both modes. The learner counts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prorld.client import Client
from prorld.testing.scripted_engine.script import Latency, Script
from prorld.train.records import EvalRecord, Record, StepRecord
from tests.daemon.support import daemon, environ, scripted_engine, until

ROOT = Path(__file__).parents[2]
HERE = [point.name for point in entry_points(group="prorld.handlers")]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("math" not in HERE, reason="prorld-math is not installed"),
]

STEPS, GROUPS, SAMPLES = 4, 3, 4
# Half of the answers are right, so that most groups teach something and some do not.
SCRIPT = Script(turns=["It is \\boxed{4}.", "It is \\boxed{5}."], pick="lot", latency=Latency(fixed_s=0.05))


def settings(place: Path, **more: Any) -> Path:
    """A run's file."""
    prompts = place / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"problem": f"{n} - {n - 4}", "answer": "4"}) + "\n" for n in range(64)))
    found = {
        "model": "none", "out": str(place / "run"), "steps": STEPS, "checkpoint_every": 2,
        "tasks": {"handler": "math", "prompts": str(prompts)},
        "groups": {"per_step": GROUPS, "samples": SAMPLES},
        "sampling": {"max_tokens": 32},
        "hand_over": {"directory": str(place / "weights")},
        "evaluation": {"count": 4, "temperatures": [0.0]},
    }  # fmt: skip
    for name, value in more.items():
        found[name] = {**found[name], **value} if isinstance(value, dict) else value  # type: ignore[dict-item]
    file = place / "run.toml"
    file.write_text(toml(found))
    return file


def toml(found: dict[str, Any]) -> str:
    """Enough of it."""
    top = [f"{name} = {json.dumps(value)}\n" for name, value in found.items() if not isinstance(value, dict)]
    for name, value in found.items():
        if isinstance(value, dict):
            top += [f"[{name}]\n", *(f"{key} = {json.dumps(item)}\n" for key, item in value.items())]
    return "".join(top)


@contextmanager
def trainer(place: Path, file: Path) -> Iterator[subprocess.Popen[str]]:
    """The run as a process of its own, which does not outlive the test."""
    command = [sys.executable, "-m", "tests.train.fake_trainer", str(file)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=environ(place / "state"), cwd=ROOT, stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def ended(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What it says of itself at its end."""
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def records(place: Path) -> list[Any]:
    """The lines of the run so far."""
    file = place / "run" / "metrics.jsonl"
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [msgspec.json.decode(line, type=Record) for line in lines]


def steps_of(place: Path) -> list[StepRecord]:
    return [record for record in records(place) if isinstance(record, StepRecord)]


def assert_whole(place: Path, end: dict[str, Any], *, steps: int = STEPS) -> None:
    """As many optimizer steps as were asked for, every group in exactly one of them, each line once."""
    found = steps_of(place)
    assert end["why"] == "complete"
    assert end["steps"] == steps
    assert [record.step for record in found] == [*range(1, steps + 1)]
    used = [group for record in found for group in record.group_ids]
    assert len({*used}) == len(used) == steps * GROUPS
    assert end["used"] == used
    evaluated = [record.step for record in records(place) if isinstance(record, EvalRecord)]
    assert evaluated == [0, steps]


def assert_nothing_left(client: Client, place: Path) -> None:
    """Every group that was used is acknowledged, one version of the weights is on the disk, nothing runs."""
    for batch in client.batches().items:
        assert batch.state != "running", batch.batch_id
    [root] = (place / "weights").iterdir()
    [version] = root.iterdir()
    assert version.name == f"v{client.policy('default').version}"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_is_what_was_asked_for(tmp_path, mode):
    """Steps, records, evaluations, versions, and a reward over all rollouts, not only those that were kept."""
    with (
        scripted_engine(tmp_path, SCRIPT) as engine,
        daemon(tmp_path, engine, talkative=True) as here,
        here.client() as client,
        trainer(tmp_path, settings(tmp_path, mode=mode)) as process,
    ):
        assert_whole(tmp_path, ended(process))
        assert_nothing_left(client, tmp_path)
        found = steps_of(tmp_path)
        assert client.policy("default").version == found[-1].version == 1 + STEPS
        for record in found:
            assert record.reward is not None
            assert record.groups_seen >= 1
            assert record.daemon_cpu_s is not None
            assert record.daemon_cpu_s > 0
        assert (tmp_path / "run" / "checkpoints").is_dir()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_trainer_that_is_killed_goes_on(tmp_path, mode):
    """SIGKILL in the middle of a step after a checkpoint, and once more; the same command ends all of them."""
    file = settings(tmp_path, mode=mode)
    with (
        scripted_engine(tmp_path, SCRIPT) as engine,
        daemon(tmp_path, engine, talkative=True) as here,
        here.client() as client,
    ):
        for step in (2, 3):
            with trainer(tmp_path, file) as process:
                until(lambda step=step: len(steps_of(tmp_path)) >= step, 120, f"{step} steps")
                process.kill()
                process.communicate(timeout=30)
        with trainer(tmp_path, file) as process:
            assert_whole(tmp_path, ended(process))
        assert_nothing_left(client, tmp_path)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_daemon_that_is_killed_is_waited_for(tmp_path, mode):
    """SIGKILL in the middle of a step, another daemon on another port: the run notices nothing but time."""
    with scripted_engine(tmp_path, SCRIPT) as engine, ExitStack() as running_here:
        with daemon(tmp_path, engine, talkative=True) as first:
            process = running_here.enter_context(trainer(tmp_path, settings(tmp_path, mode=mode)))
            until(lambda: len(steps_of(tmp_path)) >= 2, 120, "two steps")
            first.process.kill()
            first.process.wait()
        with daemon(tmp_path, engine, talkative=True) as second, second.client() as client:
            assert_whole(tmp_path, ended(process))
            assert_nothing_left(client, tmp_path)


def test_ctrl_c_ends_with_a_checkpoint(tmp_path):
    """SIGINT, then the same command with more steps."""
    with (
        scripted_engine(tmp_path, SCRIPT) as engine,
        daemon(tmp_path, engine, talkative=True),
    ):
        with trainer(tmp_path, settings(tmp_path, checkpoint_every=100)) as process:
            until(lambda: len(steps_of(tmp_path)) >= 1, 120, "a step")
            process.send_signal(signal.SIGINT)
            first = ended(process)
        assert first["why"] == "interrupted"
        assert first["steps"] >= 1
        kept = json.loads((tmp_path / "run" / "state.json").read_bytes())
        assert kept["optimizer_steps"] == first["steps"]
        with trainer(tmp_path, settings(tmp_path, checkpoint_every=100, steps=STEPS + 1)) as process:
            assert_whole(tmp_path, ended(process), steps=STEPS + 1)


@pytest.mark.parametrize(("mode", "rule"), [("sync", "spread"), ("sync", "all"), ("async", "spread")])
def test_a_task_that_is_solved_is_a_normal_end(tmp_path, mode, rule):
    """Every rollout is right, so there is nothing to learn."""
    script = Script(turns=["It is \\boxed{4}."])
    with (
        scripted_engine(tmp_path, script) as engine,
        daemon(tmp_path, engine, talkative=True),
        trainer(tmp_path, settings(tmp_path, mode=mode, groups={"rule": rule, "prompts_per_group": 2})) as process,
    ):
        end = ended(process)
        assert (end["why"], end["steps"]) == ("nothing_to_learn", 0)
        [record] = steps_of(tmp_path)
        assert (record.reward, record.figures) == (1.0, None)


def test_rule_all_takes_every_group(tmp_path):
    """As many prompts as groups, no more."""
    with (
        scripted_engine(tmp_path, SCRIPT) as engine,
        daemon(tmp_path, engine, talkative=True) as here,
        here.client() as client,
        # By chance every group of a step may be as good throughout.
        trainer(tmp_path, settings(tmp_path, groups={"rule": "all", "empty_max": 50})) as process,
    ):
        assert ended(process)["why"] == "complete"
        for record in steps_of(tmp_path):
            assert (record.groups, record.groups_seen, record.staleness_max) == (GROUPS, GROUPS, 0)
        for batch in client.batches().items:
            assert batch.purpose == "eval" or batch.next_offset == GROUPS


def test_a_directory_holds_one_run(tmp_path):
    """Other settings that matter are refused, with their names."""
    with scripted_engine(tmp_path, SCRIPT) as engine, daemon(tmp_path, engine, talkative=True):
        with trainer(tmp_path, settings(tmp_path, steps=1)) as process:
            ended(process)
        with trainer(tmp_path, settings(tmp_path, steps=1, groups={"samples": 2})) as process:
            err = process.communicate(timeout=60)[1]
        assert process.returncode != 0
        assert "other settings (groups)" in err
