"""Real learning through a real daemon and a real vLLM on the processor: weights, hand-over, kills.

A few small steps, which prove the path and no learning; ``prorld bench learn --check`` proves that.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prorld.client.find import read_endpoint
from prorld.train.records import EndRecord, EvalRecord, Metrics, StepRecord
from tests.daemon.support import until

VLLM = os.environ.get("PRORLD_TEST_VLLM")
ROOT = Path(__file__).parents[2]
DEMO_S = 1500.0
STEPS = 3

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed here"),
    pytest.mark.skipif(find_spec("prorld_calc") is None, reason="prorld-calc is not installed"),
]


@contextmanager
def demo(out: Path, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """``prorld learn-demo`` as a process in a group of its own."""
    command = [sys.executable, "-m", "prorld.cli", "learn-demo", "--json", "--out", str(out), "--steps", str(STEPS)]
    command += ["--groups", "3", "--samples", "6", "--eval-count", "4", *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (out.parent / "demo.log").open("ab") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def engine_flags(engine: str) -> list[str]:
    """Of the demo, for an engine; skips where it is not here."""
    if engine == "vllm":
        if VLLM is None:
            pytest.skip("no vLLM here: run ./just test-real rl")
        return ["--engine", "vllm", "--python", VLLM]
    if find_spec("xllamacpp") is None:
        pytest.skip("the embedded engine is not installed")
    return ["--engine", "embedded"]


def read(out: Path) -> Metrics:
    metrics = Metrics(out / "metrics.jsonl")
    metrics.read()
    return metrics


def steps_done(out: Path) -> int:
    return len(read(out).steps)


@pytest.mark.parametrize("engine", ["vllm", "embedded"])
def test_a_few_steps_of_the_demo(tmp_path, engine):
    """The engine has the trainer's weights before and after each step: their log-probabilities agree."""
    out = tmp_path / "run"
    with demo(out, *engine_flags(engine)) as process:
        assert process.wait(DEMO_S) == 0, (tmp_path / "demo.log").read_text()[-3000:]
    metrics = read(out)
    assert_learnt(metrics)
    assert [record.temperature for record in metrics.evaluations if record.step == 0] == [0.0, 1.0]
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    # What was started has gone with it.
    pid = read_endpoint(out / "daemon").pid if (out / "daemon" / "endpoint.json").exists() else None
    assert pid is None or not Path(f"/proc/{pid}").exists()


def assert_learnt(metrics: Metrics) -> None:
    """Every step is there once, with groups of its own; what was learnt from has a small gap."""
    assert [record.step for record in metrics.steps] == [*range(1, len(metrics.steps) + 1)]
    used = [group for record in metrics.steps for group in record.group_ids]
    assert len({*used}) == len(used)
    for record in metrics.steps:
        if record.figures is not None:
            assert 0 <= record.figures.gap < 0.1
            assert record.figures.gradient_norm > 0
        assert record.daemon_cpu_s is not None
    ends = [record for record in metrics.records if isinstance(record, EndRecord)]
    assert ends[-1].why in ("complete", "nothing_to_learn")
    assert ends[-1].optimizer_steps == sum(record.figures is not None for record in metrics.steps)


@pytest.mark.parametrize("engine", ["vllm", "embedded"])
def test_everything_is_killed_and_goes_on(tmp_path, engine):
    """SIGKILL to the trainer in the middle of a step ends its daemon and engine, too; the same command goes on."""
    out = tmp_path / "run"
    flags = engine_flags(engine)
    with demo(out, *flags) as process:
        until(lambda: steps_done(out) >= 1 or process.poll() is not None, DEMO_S, "a step")
        daemon = read_endpoint(out / "daemon").pid
        process.kill()
        process.wait()
        until(lambda: not Path(f"/proc/{daemon}").exists(), 60, "the daemon has ended with the demo")
    first = [record for record in read(out).records if isinstance(record, StepRecord | EvalRecord)]
    assert first
    with demo(out, *flags) as process:
        assert process.wait(DEMO_S) == 0, (tmp_path / "demo.log").read_text()[-3000:]
    assert_learnt(read(out))


def test_the_weights_that_are_left_are_those_of_the_last_step(tmp_path):
    """The checkpoint names the step that the metrics end with."""
    out = tmp_path / "run"
    with demo(out, *engine_flags("vllm"), "--mode", "async") as process:
        assert process.wait(DEMO_S) == 0, (tmp_path / "demo.log").read_text()[-3000:]
    metrics = read(out)
    assert_learnt(metrics)
    state: dict[str, Any] = msgspec.json.decode((out / "state.json").read_bytes())
    assert state["optimizer_steps"] == metrics.steps[-1].optimizer_steps
    assert (out / "checkpoints" / state["checkpoint"]).is_dir()
