"""Commands that stay: on a real daemon with a scripted engine, which is watched, killed and started again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from prorld.domain.job import Sampling
from prorld.testing.byte_tokenizer import write_byte_tokenizer
from prorld.testing.scripted_engine.script import Latency, Script
from prorld.wire.jobs import SubmitJob
from tests.daemon.support import daemon, environ, scripted_engine, until

HERE = [point.name for point in entry_points(group="prorld.handlers")]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("math" not in HERE, reason="prorld-math is not installed"),
]

N = 3
TASKS = [{"problem": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(8)]
# A script of one turn; answers take a while, so that a kill meets some of them.
SCRIPT = Script(turns=["The answer is \\boxed{4}."], latency=Latency(fixed_s=0.3))


def prorld(place: Path, *argv: str) -> subprocess.Popen[str]:
    """A command that goes on."""
    command = [sys.executable, "-m", "prorld.cli", *argv]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environ(place / "state"), stdout=pipe, stderr=pipe, text=True)


def lines(file: Path) -> list[str]:
    """What is in a file so far, whole lines only."""
    return [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")] if file.exists() else []


def run_argv(place: Path) -> tuple[str, ...]:
    """The run of all tests of this page."""
    tasks = place / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    flags = ("--n", str(N), "--max-inflight", "4", "--max-tokens", "256", "--trajectories")
    return ("run", str(tasks), "--handler", "math", "-o", str(place / "out.jsonl"), *flags)


def assert_exact(file: Path) -> None:
    """Every sample once, graded, with its tokens."""
    found = [json.loads(line) for line in lines(file)]
    counted = Counter((line["instance"]["problem"], line["record"]["sample_index"]) for line in found)
    assert counted == Counter((task["problem"], i) for task in TASKS for i in range(N))
    assert {line["record"]["outcome"]["kind"] for line in found} == {"ok"}
    for line in found:
        assert line["record"]["reward"] == float(line["instance"]["answer"] == "4")
        assert sum(line["trajectory"]["branches"][0]["mask"]) == line["record"]["tokens"]["sampled"]


def test_a_run_outlives_a_daemon_that_is_killed(tmp_path):
    """SIGKILL in the middle, another daemon on another port: every sample has its line once."""
    out = tmp_path / "out.jsonl"
    with ExitStack() as stack:
        engine = stack.enter_context(scripted_engine(tmp_path, SCRIPT))
        with daemon(tmp_path, engine) as first:
            run = prorld(tmp_path, *run_argv(tmp_path))
            until(lambda: len(lines(out)) >= 4, 60, "some rollouts have ended")
            first.process.kill()
            first.process.wait()
        stack.enter_context(daemon(tmp_path, engine))
        _, err = run.communicate(timeout=90)
    assert run.returncode == 0, err
    assert "waiting up to" in err
    assert_exact(out)


def test_a_run_that_is_interrupted_goes_on(tmp_path):
    """Ctrl-C cancels what runs, SIGKILL leaves half of it behind; the same command makes it whole."""
    out = tmp_path / "out.jsonl"
    with scripted_engine(tmp_path, SCRIPT) as engine, daemon(tmp_path, engine) as here, here.client() as client:
        for number, code, least in ((signal.SIGINT, 130, 2), (signal.SIGKILL, -9, 6)):
            run = prorld(tmp_path, *run_argv(tmp_path))
            until(lambda least=least: len(lines(out)) >= least, 60, "some rollouts have ended")
            run.send_signal(number)
            _, err = run.communicate(timeout=30)
            assert run.returncode == code, err
            if number == signal.SIGINT:
                until(lambda: client.status().jobs["running"] == 0, 10, "what ran is cancelled")
        run = prorld(tmp_path, *run_argv(tmp_path))
        _, err = run.communicate(timeout=90)
        assert run.returncode == 0, err
    assert "rollouts are in" in err
    assert_exact(out)


# By lot, half of the answers are right: most groups teach something.
COIN = Script(turns=["It is \\boxed{4}.", "It is \\boxed{5}."], pick="lot", latency=Latency(fixed_s=0.05))
GROUPS = 3


def ended(place: Path, *argv: str) -> tuple[int, str]:
    """A command to its end."""
    command = prorld(place, *argv)
    out, err = command.communicate(timeout=120)
    return command.returncode, out + err


def test_a_batch_from_prompts_to_a_file_of_groups(tmp_path):
    """Submit, watch, write and acknowledge; the same again writes nothing, and the next batch takes what was left."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"problem": f"{n} - {n - 4}", "answer": "4"}) + "\n" for n in range(24)))
    asked = ("batch", "submit", str(prompts), "--handler", "math", "--target", str(GROUPS), "--samples", "4")
    file = tmp_path / "groups.jsonl"
    written = ("batch", "groups", "one", "--trajectories", "--instances", "-o", str(file), "--ack")
    with scripted_engine(tmp_path, COIN) as engine, daemon(tmp_path, engine, talkative=True):
        assert ended(tmp_path, *asked, "--id", "one") == (0, "one\n")
        assert ended(tmp_path, *asked, "--id", "one") == (0, "one\n")
        code, out = ended(tmp_path, "batch", "watch", "one")
        assert (code, "batch.end  complete" in out) == (0, True), out
        assert ended(tmp_path, *written) == (0, f"{GROUPS} groups written to {file}\n")
        assert ended(tmp_path, *written) == (0, f"0 groups written to {file}\n")
        found = [json.loads(line)["group"] for line in lines(file)]
        assert len(found) == GROUPS
        for group in found:
            assert set(group["rewards"]) == {0.0, 1.0}
            assert [one["job"]["job_id"] for one in group["trajectories"]] == group["job_ids"]
            assert group["instance"]["answer"] == "4"
        code, out = ended(tmp_path, "batch", "show", "one", "--json")
        record = json.loads(out)
        assert (record["state"], record["groups"]["informative"]) == ("complete", GROUPS)
        assert record["acknowledged"] >= found[-1]["seq"]
        assert ended(tmp_path, *asked, "--id", "two", "--carry-from", "one", "--leftovers", "cancel")[0] == 0
        assert ended(tmp_path, "batch", "watch", "two", "--json")[0] == 0
        code, out = ended(tmp_path, "batch", "list")
        assert (code, [line.split()[0] for line in out.splitlines()]) == (0, ["BATCH", "two", "one"])
        code, out = ended(tmp_path, "cancel", "--batch", "two")
        assert (code, "already ended: complete" in out) == (0, True)
        code, out = ended(tmp_path, "batch", "show", "three")
        assert (code, out) == (1, "prorld: there is no batch three\n")


def test_jobs_are_watched_live(tmp_path):
    """The list is printed again as it changes, until Ctrl-C; a daemon that goes away ends it with words."""
    with scripted_engine(tmp_path, SCRIPT) as engine, daemon(tmp_path, engine) as here, here.client() as client:
        watching = prorld(tmp_path, "jobs", "--watch", "--json")
        assert watching.stdout is not None
        assert json.loads(watching.stdout.readline()) == []
        client.submit(SubmitJob(job_id="a", handler="math", instance=TASKS[2], sampling=Sampling(max_tokens=64)))
        states = []
        while "done" not in states:
            states += [record["state"] for record in json.loads(watching.stdout.readline())]
        watching.send_signal(signal.SIGINT)
        out, err = watching.communicate(timeout=10)
        assert (watching.returncode, err.strip()) == (130, ""), out
        for_people = prorld(tmp_path, "jobs", "--watch", "--state", "done")
        assert for_people.stdout is not None
        table = [for_people.stdout.readline() for _ in range(2)]
        assert table[0].startswith("JOB ")
        assert table[1].startswith("a ")
    _, err = for_people.communicate(timeout=30)
    assert for_people.returncode == 69
    assert "prorld serve" in err


def test_one_rollout_is_tried_on_an_engine_of_ones_own(tmp_path):
    """No daemon: the engine and its tokenizer are named, the sandbox is a real one."""
    tokenizer = write_byte_tokenizer(tmp_path / "tokenizer")
    with scripted_engine(tmp_path, SCRIPT) as engine:
        argv = ("try", "math", json.dumps(TASKS[2]), "--backend", f"vllm={engine}", "--tokenizer", str(tokenizer))
        trying = prorld(tmp_path, *argv)
        out, err = trying.communicate(timeout=60)
    assert trying.returncode == 0, err
    assert "reward     1" in out
    assert "What is 2 + 2?" in out
    assert "run begins" in err
    assert not (tmp_path / "state" / "endpoint.json").exists()
