"""The loop on a real daemon with a scripted engine: kills, Ctrl-C, both modes. The learner counts."""

from __future__ import annotations

import json
import math
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

from prorld.cli.exits import Exit
from prorld.client import Client
from prorld.domain.batch import BatchState
from prorld.testing.scripted_engine.script import Latency, Script
from prorld.train.records import EvalRecord, Record, StepRecord
from tests.daemon.support import Started, daemon, environ, scripted_engine, until

ROOT = Path(__file__).parents[2]
HERE = [point.name for point in entry_points(group="prorld.handlers")]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("calc" not in HERE, reason="prorld-calc is not installed"),
]

STEPS, GROUPS, SAMPLES = 4, 3, 4
# Half of the answers are right, so that most groups teach something and some do not.
SCRIPT = Script(turns=["ANSWER: 4", "ANSWER: 5"], pick="lot", latency=Latency(fixed_s=0.05))


def settings(place: Path, **more: Any) -> Path:
    """A run's file."""
    prompts = place / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"question": f"What is {n} - {n - 4}?", "answer": 4}) + "\n" for n in range(64))
    )
    found = {
        "model": "none", "out": str(place / "run"), "steps": STEPS, "checkpoint_every": 2,
        "tasks": {"handler": "calc", "prompts": str(prompts)},
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


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """One daemon for the runs of all tests that don't kill it."""
    place = tmp_path_factory.mktemp("here")
    with scripted_engine(place, SCRIPT) as engine, daemon(place, engine, talkative=True) as started:
        yield started


@contextmanager
def trainer(file: Path, state: Path) -> Iterator[subprocess.Popen[str]]:
    """The run as a process of its own, which does not outlive the test."""
    command = [sys.executable, "-m", "tests.train.fake_trainer", str(file)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environ(state), cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def ended(process: subprocess.Popen[str], code: int = 0) -> dict[str, Any]:
    """What it says of itself at its end; ``err`` is what it told people."""
    out, err = process.communicate(timeout=240)
    assert process.returncode == code, err
    found: dict[str, Any] = {**json.loads(out.splitlines()[-1]), "err": err}
    return found


def life(place: Path, here: Started, code: int = 0, **more: Any) -> dict[str, Any]:
    """A whole one."""
    with trainer(settings(place, **more), here.state) as process:
        return ended(process, code)


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
def test_a_run_is_what_was_asked_for(tmp_path, here, mode):
    """Steps, records, evaluations, versions, and a reward over all rollouts, not only those that were kept."""
    with here.client() as client:
        before = client.policy("default").version
        assert_whole(tmp_path, life(tmp_path, here, mode=mode))
        assert_nothing_left(client, tmp_path)
        found = steps_of(tmp_path)
        assert client.policy("default").version == found[-1].version == before + 1 + STEPS
        for record in found:
            assert record.reward is not None
            assert record.groups_seen >= 1
            assert record.daemon_cpu_s is not None
            assert record.daemon_cpu_s > 0
        assert (tmp_path / "run" / "checkpoints").is_dir()


def test_rollouts_run_ahead_of_the_trainer_as_far_as_asked(tmp_path, here):
    """Also where a checkpoint, before which no group is acknowledged, is many steps away."""
    waiting = 2
    end = life(tmp_path, here, mode="async", checkpoint_every=100, groups={"max_ready": waiting})
    assert_whole(tmp_path, end)
    with here.client() as client:
        [stream] = [one for one in client.batches().items if one.batch_id.startswith(end["used"][0].split(":")[0])]
        lost = stream.groups.uninformative + stream.groups.failed + stream.groups.stale + stream.groups.cancelled
        assert stream.next_offset <= STEPS * GROUPS + lost + math.ceil(1.5 * GROUPS) + waiting


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_trainer_that_is_killed_goes_on(tmp_path, here, mode):
    """SIGKILL in the middle of a step after a checkpoint, and once more; the same command ends all of them."""
    file = settings(tmp_path, mode=mode)
    for step in (2, 3):
        with trainer(file, here.state) as process:
            until(lambda step=step: len(steps_of(tmp_path)) >= step, 120, f"{step} steps")
            process.kill()
            process.communicate(timeout=30)
    with here.client() as client, trainer(file, here.state) as process:
        assert_whole(tmp_path, ended(process))
        assert_nothing_left(client, tmp_path)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_daemon_that_is_killed_is_waited_for(tmp_path, mode):
    """SIGKILL in the middle of a step, another daemon on another port: the run notices nothing but time."""
    with scripted_engine(tmp_path, SCRIPT) as engine, ExitStack() as running_here:
        with daemon(tmp_path, engine, talkative=True) as first:
            process = running_here.enter_context(trainer(settings(tmp_path, mode=mode), first.state))
            until(lambda: len(steps_of(tmp_path)) >= 2, 120, "two steps")
            first.process.kill()
            first.process.wait()
        with daemon(tmp_path, engine, talkative=True) as second, second.client() as client:
            assert_whole(tmp_path, ended(process))
            assert_nothing_left(client, tmp_path)


def test_ctrl_c_ends_with_a_checkpoint(tmp_path, here):
    """SIGINT, then the same command with more steps."""
    with trainer(settings(tmp_path, checkpoint_every=100), here.state) as process:
        until(lambda: len(steps_of(tmp_path)) >= 1, 120, "a step")
        process.send_signal(signal.SIGINT)
        first = ended(process, Exit.INTERRUPTED)
    assert first["why"] == "interrupted"
    assert first["steps"] >= 1
    kept = json.loads((tmp_path / "run" / "state.json").read_bytes())
    assert kept["optimizer_steps"] == first["steps"]
    assert_whole(tmp_path, life(tmp_path, here, checkpoint_every=100, steps=STEPS + 1), steps=STEPS + 1)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_was_cut_off_in_an_evaluation_goes_on(tmp_path, how):
    """What it left behind wants the policy's version to stay, and waits for an engine that waits for new weights."""
    evaluation = {"count": 4, "temperatures": [0.0]}
    for name in ("slow", "fresh"):
        (tmp_path / name).mkdir()
    slow = Script(turns=["ANSWER: 4", "ANSWER: 5"], pick="lot", latency=Latency(fixed_s=600.0))
    with scripted_engine(tmp_path / "slow", slow) as engine, daemon(tmp_path, engine, talkative=True) as first:
        with trainer(settings(tmp_path, steps=1, evaluation=evaluation), first.state) as process:
            with first.client() as client:
                until(lambda: bool(client.batches().items), 120, "the evaluation")
            process.send_signal(how)
            process.communicate(timeout=60)
            assert process.returncode == (Exit.INTERRUPTED if how == signal.SIGINT else -signal.SIGKILL)
        first.process.kill()
        first.process.wait()
    with scripted_engine(tmp_path / "fresh", SCRIPT) as engine, daemon(tmp_path, engine, talkative=True) as second:
        assert_whole(tmp_path, life(tmp_path, second, steps=1, evaluation=evaluation), steps=1)
        with second.client() as client:
            assert [batch.state for batch in client.batches().items].count(BatchState.CANCELLED) == 1


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_that_is_over_says_so_and_goes_on_with_more_steps(tmp_path, here, mode):
    """Started again it changes nothing; with more steps it is the same run. Other settings that matter are refused."""
    evaluation = {"count": 0}
    first = life(tmp_path, here, mode=mode, steps=1, evaluation=evaluation)
    again = life(tmp_path, here, mode=mode, steps=1, evaluation=evaluation)
    assert again["err"].count("the run was over: its 1 steps were made") == 1
    assert (again["why"], again["used"]) == ("complete", first["used"])
    end = life(tmp_path, here, mode=mode, steps=2, evaluation=evaluation)
    assert (end["why"], end["steps"], end["used"][:GROUPS]) == ("complete", 2, first["used"])
    assert len({*end["used"]}) == 2 * GROUPS
    with trainer(settings(tmp_path, mode=mode, steps=1, groups={"samples": 2}), here.state) as process:
        err = process.communicate(timeout=60)[1]
    assert process.returncode != 0
    assert "other settings (groups)" in err


@pytest.fixture(scope="module")
def solved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """A daemon on an engine that is always right."""
    place = tmp_path_factory.mktemp("solved")
    script = Script(turns=["ANSWER: 4"])
    with scripted_engine(place, script) as engine, daemon(place, engine, talkative=True) as started:
        yield started


@pytest.mark.parametrize(("mode", "rule"), [("sync", "spread"), ("sync", "all"), ("async", "spread")])
def test_a_task_that_is_solved_is_an_end_of_its_own(tmp_path, solved, mode, rule):
    """Every rollout is right, so there is nothing to learn: it is told, with an exit code, and goes on when asked."""
    about: dict[str, Any] = {"mode": mode, "evaluation": {"count": 0}}
    groups = {"rule": rule, "prompts_per_group": 2}
    for _ in range(2):
        end = life(tmp_path, solved, Exit.NOTHING_TO_LEARN, groups=groups, **about)
        assert (end["why"], end["steps"]) == ("nothing_to_learn", 0)
        assert "all rewards were equal" in end["err"]
        assert "too easy" in end["err"]
        [record] = steps_of(tmp_path)
        assert (record.reward, record.figures) == (1.0, None)
    used = json.loads((tmp_path / "run" / "state.json").read_bytes())["cursor"]
    assert used >= GROUPS
    life(tmp_path, solved, Exit.NOTHING_TO_LEARN, groups={**groups, "empty_max": 2}, **about)
    assert [record.step for record in steps_of(tmp_path)] == [1, 2]
    assert json.loads((tmp_path / "run" / "state.json").read_bytes())["cursor"] >= used + GROUPS


def test_rule_all_takes_every_group(tmp_path, here):
    """As many prompts as groups, no more."""
    # By chance every group of a step may be as good throughout.
    end = life(tmp_path, here, groups={"rule": "all", "empty_max": 50})
    assert end["why"] == "complete"
    for record in steps_of(tmp_path):
        assert (record.groups, record.groups_seen, record.staleness_max) == (GROUPS, GROUPS, 0)
    run_id = json.loads((tmp_path / "run" / "state.json").read_bytes())["run_id"]
    with here.client() as client:
        mine = [batch for batch in client.batches().items if batch.batch_id.startswith(run_id)]
    assert len(mine) >= STEPS
    assert all(batch.purpose == "eval" or batch.next_offset == GROUPS for batch in mine)
