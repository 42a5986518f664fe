"""A learner that was saved and loaded goes on as if nothing had been, to the bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from prorld.train.errors import LearnError
from prorld.train.shapes import LearnSettings
from tests.train.support import dice_groups, opened, same, tiny_model, weights_of

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.real

SETTINGS = LearnSettings(learning_rate=1e-3)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model's directory."""
    return tiny_model(tmp_path_factory.mktemp("model"))


def steps(learner, seeds):
    """The figures of some steps, without how long they took."""
    return [msgspec.structs.replace(learner.step(dice_groups(seed)), seconds=0.0) for seed in seeds]


@pytest.mark.parametrize("lora_rank", [None, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_resumed_run_is_the_run(model, tmp_path, dtype, lora_rank):
    """Same figures, same weights, same moments, same dice, same count: with and without a life in between."""
    settings = msgspec.structs.replace(SETTINGS, dtype=dtype, lora_rank=lora_rank, passes=2)
    torch.manual_seed(3)
    whole = opened(model, settings)
    wanted = steps(whole, range(5))
    dice = torch.rand(3)

    torch.manual_seed(3)
    first = opened(model, settings)
    found = steps(first, range(2))
    first.save(tmp_path / "at" / "2")
    torch.rand(7)
    second = opened(model, msgspec.structs.replace(settings, seed=9))
    second.load(tmp_path / "at" / "2")
    assert second.step_count == 2
    found += steps(second, range(2, 5))

    assert found == wanted
    assert second.step_count == whole.step_count == 5
    assert same(weights_of(second), weights_of(whole))
    assert same(second._weights.state(), whole._weights.state())
    assert torch.equal(torch.rand(3), dice)


def test_before_the_first_step_there_is_something_to_resume_from(model, tmp_path):
    """No moments yet; the next step makes them."""
    whole, first, second = opened(model, SETTINGS), opened(model, SETTINGS), opened(model, SETTINGS)
    first.save(tmp_path)
    steps(second, [7])
    second.load(tmp_path)
    assert second.step_count == 0
    assert steps(second, [0, 1]) == steps(whole, [0, 1])
    assert same(weights_of(second), weights_of(whole))


def test_the_latest_state_takes_the_place_of_the_one_before(model, tmp_path):
    """In the same directory, with nothing left beside it."""
    learner = opened(model, SETTINGS)
    for count in (1, 2):
        steps(learner, [count])
        learner.save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    other = opened(model, SETTINGS)
    other.load(tmp_path)
    assert other.step_count == 2


SAVE_AND_DIE = """
import os, signal, sys
import safetensors.torch
from pathlib import Path
from prorld.train import checkpoint
from prorld.train.learner import open_learner
from prorld.train.shapes import LearnSettings
from tests.train.support import dice_groups

learner = open_learner(Path(sys.argv[1]), LearnSettings(learning_rate=1e-3))
learner.step(dice_groups(0))
learner.save(Path(sys.argv[2]))
learner.step(dice_groups(1))

def half(tensors, path, metadata):
    whole = safetensors.torch.save(tensors, metadata)
    with open(path, "wb") as out:
        out.write(whole[: len(whole) // 2])
        out.flush()
        os.kill(os.getpid(), signal.SIGKILL)

checkpoint.save_file = half
learner.save(Path(sys.argv[2]))
"""


def test_a_kill_while_saving_leaves_the_state_before(model, tmp_path):
    """The process dies with half of the new file written; the old one loads."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    died = subprocess.run(
        [sys.executable, "-c", SAVE_AND_DIE, str(model), str(tmp_path)], check=False, env=environment, timeout=300
    )
    assert died.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    learner, other = opened(model, SETTINGS), opened(model, SETTINGS)
    learner.load(tmp_path)
    assert learner.step_count == 1
    steps(other, [0])
    assert same(weights_of(learner), weights_of(other))


@pytest.mark.parametrize("which", ["missing", "garbage", "cut", "foreign", "other schema", "other adapter", "larger"])
def test_a_state_that_does_not_fit_changes_nothing(model, tmp_path, which):
    """It is refused by name, and the learner is what it was."""
    learner = opened(model, SETTINGS)
    steps(learner, [0])
    file = tmp_path / "learner.safetensors"
    if which == "other adapter":
        opened(model, msgspec.structs.replace(SETTINGS, lora_rank=2)).save(tmp_path)
    elif which == "larger":
        opened(tiny_model(tmp_path / "larger", num_hidden_layers=3), SETTINGS).save(tmp_path)
    elif which != "missing":
        learner.save(tmp_path)
        content = file.read_bytes()
        written = {
            "garbage": b"no tensors",
            "cut": content[:-100],
            "foreign": (model / "model.safetensors").read_bytes(),
            "other schema": content.replace(rb"\"schema\":1", rb"\"schema\":2"),
        }
        file.write_bytes(written[which])
    before = weights_of(learner)
    with pytest.raises(LearnError):
        learner.load(tmp_path)
    assert learner.step_count == 1
    assert same(weights_of(learner), before)
