"""The example of docs/train-learner.md runs as it is written there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.train.support import group, row, sample, tiny_model

pytest.importorskip("torch")
pytestmark = pytest.mark.real

PAGE = Path(__file__).parents[2] / "docs" / "train-learner.md"


def test_the_example_runs(tmp_path, monkeypatch):
    """With a model of its own, and groups: weights for two versions and a checkpoint are there afterwards."""
    (block,) = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    model, weights = tiny_model(tmp_path / "model"), tmp_path / "weights"
    monkeypatch.chdir(tmp_path)
    groups = [group(sample(1.0, row([3, 4], [5])), sample(-1.0, row([3, 4], [6]), index=1))]
    scope: dict[str, Any] = {"groups": groups}
    exec(block.replace("/models/small", str(model)).replace("/dev/shm/weights", str(weights)), scope)
    assert scope["learner"].step_count == 1
    assert scope["figures"].tokens_trained == 2
    assert sorted(path.name for path in weights.iterdir()) == ["v0", "v1"]
    assert (tmp_path / "checkpoints" / "1" / "learner.safetensors").is_file()
