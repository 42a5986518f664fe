"""What a run writes down of itself: one JSON line for each step and each evaluation, none twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from prorld.train.shapes import StepFigures
from prorld.whole_file import written_file

__all__ = ["EndRecord", "EvalRecord", "Metrics", "Record", "Seen", "StartRecord", "StepRecord"]


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """All groups that ran to their end for a step, those that were not trained on, too; and what was for nobody."""

    groups: int = 0
    used: int = 0
    samples: int = 0
    reward_sum: float = 0.0
    solved_all: int = 0
    solved_none: int = 0
    wasted_rollouts: int = 0
    wasted_tokens: int = 0

    @property
    def reward(self) -> float | None:
        """The mean reward; nothing where nothing ended."""
        return self.reward_sum / self.samples if self.samples else None

    def since(self, before: Seen) -> Seen:
        """What was added."""
        return Seen(**{name: getattr(self, name) - getattr(before, name) for name in self.__struct_fields__})


class StartRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="start"):
    """A life of the run begins, after so many steps of earlier ones."""

    run_id: str
    step: int
    base_version: int
    settings: dict[str, Any]


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="step"):
    """One optimizer step.

    ``reward`` is the mean of all rollouts that ended, ``reward_kept`` of those that were trained on, whose mean a
    filter holds near a half. ``gap`` is the mean distance of the trainer's log-probabilities from the engine's.
    ``daemon_cpu_s`` is of the daemon and its warden: no engine, no sandbox, no grader's process.
    """

    step: int
    version: int
    reward: float | None
    reward_kept: float | None
    groups: int
    groups_seen: int
    samples: int
    solved_all: int
    solved_none: int
    staleness: float
    staleness_max: int
    figures: StepFigures | None
    tokens_sampled: int
    wasted_rollouts: int
    wasted_tokens: int
    rollout_s: float
    train_s: float
    checkpoint_s: float = 0.0
    hand_over_s: float = 0.0
    update_s: float = 0.0
    wall_s: float = 0.0
    daemon_cpu_s: float | None = None
    optimizer_steps: int
    group_ids: list[str]


class EvalRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="eval"):
    """The held-out instances, under the weights after a step."""

    step: int
    temperature: float
    reward: float | None
    samples: int
    seconds: float


class EndRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="end"):
    """A life of the run ended. ``why``: ``complete``, ``reached``, ``nothing_to_learn`` or ``interrupted``."""

    why: str
    step: int
    optimizer_steps: int
    seconds: float
    steps_per_hour: float | None


Record = StartRecord | StepRecord | EvalRecord | EndRecord


class Metrics:
    """``metrics.jsonl``. What a step wrote that is not part of the checkpoint is left out when the run goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[Record] = []

    @property
    def steps(self) -> list[StepRecord]:
        """The steps so far."""
        return [record for record in self.records if isinstance(record, StepRecord)]

    @property
    def evaluations(self) -> list[EvalRecord]:
        """The evaluations so far."""
        return [record for record in self.records if isinstance(record, EvalRecord)]

    def read(self, step: int | None = None) -> None:
        """What earlier lives wrote; up to a step, where one is named."""
        self.records = []
        for line in self.path.read_bytes().split(b"\n") if self.path.exists() else []:
            try:
                record = msgspec.json.decode(line, type=Record)
            except msgspec.MsgspecError:
                # The last line of a life that was killed, or the empty one at the end.
                continue
            if step is None or not isinstance(record, StepRecord | EvalRecord) or record.step <= step:
                self.records.append(record)

    def go_back(self, step: int) -> None:
        """Forget what is after the step that the checkpoint has."""
        self.read(step)
        with written_file(self.path) as half, half.open("xb") as file:
            file.writelines(msgspec.json.encode(record) + b"\n" for record in self.records)

    def add(self, record: Record) -> None:
        """One more line."""
        self.records.append(record)
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")

    def has_evaluation(self, step: int, temperature: float) -> bool:
        """Whether an earlier life has done it."""
        return any((item.step, item.temperature) == (step, temperature) for item in self.evaluations)


def mean(values: Sequence[float]) -> float | None:
    """Nothing of nothing."""
    return sum(values) / len(values) if values else None
