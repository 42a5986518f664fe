"""The small parts of the loop: instances by number, lines without repeats, checkpoints, curves, CPU."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from prorld.cli.train_screen import screen_of
from prorld.errors import ConfigError
from prorld.train.curves import draw, plot_lines
from prorld.train.daemon_cpu import DaemonCpu
from prorld.train.progress import Kept
from prorld.train.prompts import from_file, prompts_of
from prorld.train.records import EndRecord, EvalRecord, Metrics, Record, Seen, StepRecord
from prorld.train.run_config import EvaluationSettings, RunSettings, TaskSettings
from tests.train.fake_learner import FakeLearner

CALC = "prorld_calc.generate"


def run_of(out: Path, **tasks) -> RunSettings:
    return RunSettings(model="m", out=str(out), tasks=TaskSettings(**tasks))


def step(number: int, reward: float | None = 0.5) -> StepRecord:
    return StepRecord(
        step=number, version=number, reward=reward, reward_kept=reward, groups=1, groups_seen=1, samples=2,
        solved_all=0, solved_none=0, staleness=0.0, staleness_max=0, figures=None, tokens_sampled=1,
        wasted_rollouts=0, wasted_tokens=0, rollout_s=1.0, train_s=1.0, optimizer_steps=number, group_ids=[],
    )  # fmt: skip


def test_a_file_is_gone_through_again_in_another_order():
    """Every line once in each round, and a number is the same instance whoever asks for how many."""
    lines = [{"n": n} for n in range(10)]
    take = from_file(lines, 3)
    first, second = take(0, 10), take(10, 10)
    assert sorted(item["n"] for item in first) == sorted(item["n"] for item in second) == [*range(10)]
    assert first != second
    assert take(7, 6) == [*first[7:], *second[:3]]
    assert from_file(lines, 4)(0, 10) != first


def test_the_last_lines_are_held_out(tmp_path):
    """Training never gets to them."""
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(f'{{"n": {n}}}\n' for n in range(10)))
    settings = RunSettings(model="m", tasks=TaskSettings(prompts=str(file)), evaluation=EvaluationSettings(count=4))
    take, held = prompts_of(settings)
    assert [item["n"] for item in held] == [6, 7, 8, 9]
    assert {item["n"] for item in take(0, 30)} == {*range(6)}
    with pytest.raises(ConfigError, match="none is left"):
        prompts_of(msgspec.structs.replace(settings, evaluation=EvaluationSettings(count=10)))


@pytest.mark.slow
def test_a_generator_goes_on_for_ever(tmp_path):
    """Over the end of a part, always the same, and held-out ones are the same for every seed and none of training's."""
    pytest.importorskip("prorld_calc")
    settings = RunSettings(model="m", tasks=TaskSettings(generator=CALC), evaluation=EvaluationSettings(count=8))
    take, held = prompts_of(settings)
    found = take(250, 12)
    assert len({item["question"] for item in found}) == 12
    again, held_again = prompts_of(msgspec.structs.replace(settings, tasks=TaskSettings(generator=CALC, seed=9)))
    assert held_again == held
    assert again(250, 12) != found
    assert take(0, 256)[250:] + take(256, 6) == found
    assert not {item["question"] for item in take(0, 256)} & {item["question"] for item in held}


@pytest.mark.parametrize("module", ["no_such_module", "json.tool", "this"])
def test_a_generator_that_is_none_is_told(module):
    """It fails, wants other arguments, or prints something else."""
    take, _ = prompts_of(RunSettings(model="m", tasks=TaskSettings(generator=module)))
    with pytest.raises(ConfigError, match="generator"):
        take(0, 1)


def test_a_line_that_is_no_instance_is_named(tmp_path):
    """With its number."""
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"a": 1}\n[]\n')
    with pytest.raises(ConfigError, match="line 2"):
        prompts_of(run_of(tmp_path, prompts=str(file)))


def test_lines_after_the_checkpoint_are_written_again(tmp_path):
    """They are left out when the run goes on, and so is half a line of a life that was killed."""
    metrics = Metrics(tmp_path / "metrics.jsonl")
    for number in (1, 2, 3):
        metrics.add(step(number))
        metrics.add(EvalRecord(step=number, temperature=0.0, reward=1.0, samples=1, seconds=1.0))
    with metrics.path.open("ab") as file:
        file.write(b'{"event":"step","st')
    later = Metrics(metrics.path)
    later.go_back(2)
    later.add(step(3, 0.75))
    assert [line["step"] for line in map(json.loads, metrics.path.read_text().splitlines())] == [1, 1, 2, 2, 3]
    assert [record.reward for record in later.steps] == [0.5, 0.5, 0.75]
    assert later.has_evaluation(2, 0.0)
    assert not later.has_evaluation(3, 0.0)


def test_a_checkpoint_is_the_old_one_or_the_new_one(tmp_path):
    """One that was being written is no checkpoint, and is cleared away by the next."""
    kept, learner, settings = Kept(tmp_path), FakeLearner(), run_of(tmp_path, prompts="p")
    state = kept.begin(settings, 4)
    assert kept.load(settings) == state
    state = kept.save(msgspec.structs.replace(state, step=1), learner)
    (tmp_path / "checkpoints" / "step-2-half").mkdir()
    loaded = kept.load(settings)
    assert loaded == state
    kept.learner_of(state, FakeLearner())
    kept.save(msgspec.structs.replace(state, step=2), learner)
    [only] = (tmp_path / "checkpoints").iterdir()
    assert only.name.startswith("step-2-")
    assert only.name != "step-2-half"


def test_a_learner_of_another_step_is_refused(tmp_path):
    """The state and the learner are of one moment."""
    kept, settings = Kept(tmp_path), run_of(tmp_path, prompts="p")
    state = kept.save(kept.begin(settings, 0), FakeLearner())
    with pytest.raises(ConfigError, match="3 were made"):
        kept.learner_of(msgspec.structs.replace(state, optimizer_steps=3), FakeLearner())


def test_what_was_seen_since():
    """Sums over all rollouts give the mean of the new ones."""
    now = Seen(groups=4, samples=8, reward_sum=6.0)
    assert now.since(Seen(groups=2, samples=4, reward_sum=5.0)).reward == 0.25
    assert Seen().reward is None


def test_a_curve_goes_from_low_to_high():
    """The first dots are at the bottom, the last at the top, and nothing is in between of what is not known."""
    lines = plot_lines([0.0, None, 1.0], width=6, height=2, low=0.0, high=1.0)
    assert [line[:7] for line in lines] == ["  1.00 ", "  0.00 "]
    high, low = (line.partition("|")[2] for line in lines)
    assert len(high) == len(low) == 6
    assert [cell != "\u2800" for cell in low] == [True, True, False, False, False, False]
    assert [cell != "\u2800" for cell in high] == [False, False, False, False, True, True]


@pytest.mark.parametrize("count", [1, 2, 50, 1000])
def test_any_number_of_steps_fits(count):
    """More steps than dots share them, fewer have several."""
    lines = plot_lines([0.5] * count, width=10, height=4, low=0.0, high=1.0)
    marked = [cell for line in lines for cell in line.partition("|")[2] if cell != "\u2800"]
    assert len(marked) == 10


def test_the_cpu_of_a_daemon_elsewhere_is_not_known(tmp_path):
    """No endpoint, another address: nothing is told, rather than a zero."""
    assert DaemonCpu(tmp_path, "http://127.0.0.1:1").since() is None
    (tmp_path / "endpoint.json").write_text(
        json.dumps(
            {"address": "http://127.0.0.1:1", "boot_id": "b", "pid": os.getpid(), "version": "1", "started_at": "x"}
        )
    )
    assert DaemonCpu(tmp_path, "http://127.0.0.1:2").since() is None
    # A process that is called as the warden is, started by a thread that is not the first.
    wait = "import sys, time; print(flush=True); time.sleep(60)"
    started: list[subprocess.Popen[bytes]] = []
    command = [sys.executable, "-c", wait, "prorld.sandbox.warden"]
    starter = threading.Thread(target=lambda: started.append(subprocess.Popen(command, stdout=subprocess.PIPE)))
    starter.start()
    starter.join()
    with started[0] as warden:
        assert warden.stdout is not None
        warden.stdout.readline()
        assert len(DaemonCpu(tmp_path, "http://127.0.0.1:1")._now() or {}) == 2
        warden.kill()
    here = DaemonCpu(tmp_path, "http://127.0.0.1:1")
    sum(n * n for n in range(2_000_000))
    used = here.since()
    assert used is not None
    assert used > 0


def test_scripts_get_lines_and_people_get_words(tmp_path, capsys):
    """The same record, whoever looks and wherever it goes; warnings reach both."""
    settings, metrics = run_of(tmp_path, prompts="p"), Metrics(tmp_path / "metrics.jsonl")
    metrics.add(step(1))
    for as_json in (True, False):
        with screen_of(settings, as_json=as_json) as screen:
            screen.say("working")
            screen.warn("an engine is out")
            screen.show(step(1), metrics)
        shown = capsys.readouterr()
        assert "an engine is out" in shown.err
        assert "working" not in shown.err
        if as_json:
            assert msgspec.json.decode(shown.out, type=Record) == step(1)
        else:
            assert "reward 0.500" in shown.err
            assert shown.out == ""


def test_a_terminal_keeps_the_curve_of_the_end(tmp_path, monkeypatch):
    """Each step rubs the last curve out; the end leaves one behind, above its own line. A log has none."""
    settings, metrics = run_of(tmp_path, prompts="p"), Metrics(tmp_path / "metrics.jsonl")
    end = EndRecord(why="complete", step=2, optimizer_steps=2, seconds=1.0, steps_per_hour=None)
    for terminal in (True, False):
        written = io.StringIO()
        monkeypatch.setattr(written, "isatty", lambda terminal=terminal: terminal)
        monkeypatch.setattr("sys.stderr", written)
        with screen_of(settings, as_json=False) as screen:
            for record in (step(1), step(2)):
                metrics.add(record)
                screen.say("working")
                screen.show(record, metrics)
            screen.show(end, metrics)
        left = written.getvalue().rpartition("\x1b[J")[2]
        assert ("working" in written.getvalue()) is terminal
        assert left.splitlines()[-1].startswith("complete after 2 steps")
        assert ("  1.00 |" in left) is terminal


@pytest.mark.real
def test_a_picture_is_drawn_without_a_display(tmp_path):
    """Of no steps, of one, of one that learnt nothing."""
    pytest.importorskip("matplotlib")
    metrics = Metrics(tmp_path / "metrics.jsonl")
    for record in (
        None,
        step(1),
        step(2, None),
        EvalRecord(step=2, temperature=1.0, reward=0.5, samples=1, seconds=1.0),
    ):
        if record is not None:
            metrics.add(record)
        draw(metrics, tmp_path / "curve.png", "a run")
        assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
