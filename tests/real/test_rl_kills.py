"""Kills in the middle of real learning: of the trainer alone, and of the daemon alone, in both modes.

Three processes as on a cluster: a daemon, a vLLM that lives on, a trainer. What ``prorld learn-demo`` starts dies with
it, so it is the wrong one to ask here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from prorld.train.records import EndRecord, Metrics
from prorld.train.shapes import LearnSettings
from tests.daemon.support import until
from tests.real.vllm_server import CONTEXT_TOKENS, VllmServer, vllm_server

ROOT = Path(__file__).parents[2]
RUN_S = 900.0
START_S = 60.0
STEPS, GROUPS, SAMPLES = 4, 3, 6
LAST_WORDS = 3000

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed here"),
    pytest.mark.skipif(find_spec("prorld_calc") is None, reason="prorld-calc is not installed"),
]


@pytest.fixture(scope="module")
def own_head(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model with a head of its own: new weights reach a tied one only in part."""
    from prorld.train.learner import open_learner  # noqa: PLC0415 # torch may be missing

    folder = tmp_path_factory.mktemp("model") / "own-head"
    return open_learner(str(gguf), LearnSettings()).hand_over(folder, "weights")


@pytest.fixture(scope="module")
def engine(vllm_python: str, own_head: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    with vllm_server(vllm_python, own_head, tmp_path_factory.mktemp("engine"), scale_out=True) as server:
        yield server


@contextmanager
def command(place: Path, name: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """``prorld NAME`` on the state directory of the test, logged to ``NAME.log``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PRORLD")}
    environment = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "prorld.cli", name, *arguments, "--state-dir", str(place / "state")]
    with (
        (place / f"{name}.log").open("ab") as log,
        subprocess.Popen(argv, env=environment, stdout=log, stderr=log, cwd=ROOT) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(START_S)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def serving(place: Path, engine: VllmServer) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon on that engine, once it says where it is."""
    endpoint = place / "state" / "endpoint.json"
    # Of the one before; its port is nobody's now.
    endpoint.unlink(missing_ok=True)
    with command(place, *serve(place, engine)) as process:
        until(lambda: endpoint.exists() or process.poll() is not None, START_S, "the daemon listens")
        assert process.poll() is None, (place / "serve.log").read_text()[-LAST_WORDS:]
        yield process


def serve(place: Path, engine: VllmServer) -> list[str]:
    config = place / "daemon.toml"
    config.write_text(
        f'[server]\nport = 0\n\n[stages]\nrun = 32\n\n[engine]\nenabled = false\n\n[log]\nformat = "json"\n\n'
        f'[policies.default]\ntokenizer = "{engine.model}"\n'
    )
    return ["serve", "--config", str(config), "--backend", f"vllm={engine.url}"]


def train(place: Path, engine: VllmServer, mode: str) -> list[str]:
    argv = ["train", "--model", str(engine.model), "--handler", "calc", "--generator", "prorld_calc.generate"]
    argv += ["--options=--hard 0.5", "--max-tokens", "32", "--max-turns", "3", "--max-context", str(CONTEXT_TOKENS)]
    argv += ["--steps", str(STEPS), "--groups", str(GROUPS), "--samples", str(SAMPLES), "--mode", mode]
    argv += ["--eval-count", "4", "--checkpoint-every", "2", "--device", "cpu"]
    return [*argv, "--weights-dir", str(place / "weights"), "--out", str(place / "run"), "--json"]


def metrics_of(place: Path) -> Metrics:
    metrics = Metrics(place / "run" / "metrics.jsonl")
    metrics.read()
    return metrics


def assert_whole(place: Path) -> None:
    """As many optimizer steps as were asked for, each group in exactly one, trained on what the engine had sampled."""
    metrics = metrics_of(place)
    assert [record.step for record in metrics.steps] == [*range(1, STEPS + 1)]
    used = [group for record in metrics.steps for group in record.group_ids]
    assert len({*used}) == len(used) == STEPS * GROUPS
    for record in metrics.steps:
        assert record.figures is not None
        assert 0 <= record.figures.gap < 0.1
        assert record.figures.gradient_norm > 0
    end = metrics.records[-1]
    assert isinstance(end, EndRecord)
    assert (end.why, end.optimizer_steps) == ("complete", STEPS)


def ends(process: subprocess.Popen[bytes], place: Path) -> None:
    assert process.wait(RUN_S) == 0, (place / "train.log").read_text()[-LAST_WORDS:]


def has_steps(place: Path, count: int, *processes: subprocess.Popen[bytes]) -> bool:
    for process in processes:
        assert process.poll() is None, f"{process.args!r} ended with {process.returncode}"
    return len(metrics_of(place).steps) >= count


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_trainer_is_killed(tmp_path, engine, mode):
    """SIGKILL in the middle of a step, one after a checkpoint and one between two."""
    with serving(tmp_path, engine) as daemon:
        for step in (1, 2):
            with command(tmp_path, *train(tmp_path, engine, mode)) as trainer:
                until(lambda step=step, trainer=trainer: has_steps(tmp_path, step, daemon, trainer), RUN_S, "a step")
                trainer.kill()
        with command(tmp_path, *train(tmp_path, engine, mode)) as trainer:
            ends(trainer, tmp_path)
    assert_whole(tmp_path)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_daemon_is_killed(tmp_path, engine, mode):
    """SIGKILL in the middle of a step, and another daemon on another port: the same trainer goes on."""
    with ExitStack() as stack:
        with serving(tmp_path, engine) as first:
            trainer = stack.enter_context(command(tmp_path, *train(tmp_path, engine, mode)))
            until(lambda: has_steps(tmp_path, 2, first, trainer), RUN_S, "two steps")
            first.kill()
        with serving(tmp_path, engine):
            ends(trainer, tmp_path)
    assert_whole(tmp_path)
