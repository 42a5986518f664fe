"""What passes between the loop, which talks to the daemon, and the learner, which knows torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from prorld.export.rows import Row

__all__ = ["Form", "LearnSettings", "Learner", "StepFigures", "TrainGroup", "TrainSample"]

# How weights are handed to engines: a whole model's directory, an adapter's, or one file for llama.cpp.
Form = Literal["weights", "lora", "gguf", "gguf-lora"]


class TrainSample(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout to train on. Its advantage is that of all its rows; a loss is normalised by rollout or by token."""

    sample_index: int
    reward: float
    advantage: float
    rows: list[Row]


class TrainGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The usable samples of one group."""

    group_id: str
    staleness: int
    samples: list[TrainSample]


class LearnSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a step is made of groups. The defaults are DAPO's, on a small model."""

    learning_rate: float = 2e-5
    loss: Literal["token", "sample"] = "token"
    clip_low: float = 0.2
    clip_high: float = 0.28
    # The weight of what another version sampled is cut off here.
    importance_max: float = 2.0
    # How often a step passes over its groups; more than one makes the clip bite.
    passes: int = 1
    grad_norm_max: float = 1.0
    lora_rank: int | None = None
    # What the model computes in; what is trained is kept in float32 beside it.
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    device: str = "auto"
    threads: int = 1
    # The longest packed row; longer groups are split.
    tokens_max: int = 8192
    seed: int = 0


class StepFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What one step came to. ``gap`` is the mean distance of the trainer's log-probabilities from the engine's."""

    loss: float
    gradient_norm: float
    gap: float
    gap_max: float
    clipped: float
    entropy: float
    tokens_trained: int
    tokens_computed: int
    seconds: float


class Learner(Protocol):
    """The weights and how they change. Everything blocks; nothing of it knows the daemon."""

    @property
    def step_count(self) -> int:
        """Steps made, over all lives."""
        ...

    def step(self, groups: Sequence[TrainGroup]) -> StepFigures:
        """One optimizer step on these groups."""
        ...

    def hand_over(self, directory: Path, form: Form) -> Path:
        """Write what an engine loads, whole or not at all; the path to name to it."""
        ...

    def save(self, directory: Path) -> None:
        """Everything an exact resume needs, whole or not at all."""
        ...

    def load(self, directory: Path) -> None:
        """Go on from there, to the bit."""
        ...
