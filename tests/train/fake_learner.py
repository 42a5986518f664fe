"""A learner without weights: it counts, remembers what it was given, and keeps all of that in its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from prorld.train.errors import NothingToLearn
from prorld.train.shapes import Form, StepFigures, TrainGroup
from prorld.whole_file import written_directory


class FakeLearner:
    """``used`` are the groups of all steps, over all lives that a checkpoint joins."""

    def __init__(self) -> None:
        self.used: list[str] = []
        self.tokens = 0
        self._steps = 0

    @property
    def step_count(self) -> int:
        return self._steps

    def step(self, groups: Sequence[TrainGroup]) -> StepFigures:
        samples = [sample for group in groups for sample in group.samples]
        if not any(sample.advantage for sample in samples):
            raise NothingToLearn("no advantage differs from zero")
        rows = [row for sample in samples for row in sample.rows]
        assert rows, "groups come with their tokens"
        self._steps += 1
        self.used += [group.group_id for group in groups]
        trained = sum(sum(row.response_mask) for row in rows)
        self.tokens += trained
        return StepFigures(
            loss=0.0, gradient_norm=1.0, gap=0.0, gap_max=0.0, clipped=0.0, entropy=0.0, tokens_trained=trained,
            tokens_computed=trained, seconds=0.0,
        )  # fmt: skip

    def hand_over(self, directory: Path, form: Form) -> Path:
        with written_directory(directory) as half:
            (half / "steps").write_text(f"{self._steps} {form}")
        return directory

    def save(self, directory: Path) -> None:
        with written_directory(directory) as half:
            (half / "learner.json").write_text(json.dumps([self._steps, self.used, self.tokens]))

    def load(self, directory: Path) -> None:
        self._steps, self.used, self.tokens = json.loads((directory / "learner.json").read_text())
