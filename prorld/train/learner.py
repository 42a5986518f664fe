"""The learner: GRPO and DAPO in plain torch. It reads from top to bottom, and ``step`` is the algorithm.

The loop gives it groups with advantages and asks it for files that engines load; it knows no daemon and no engine.
"""

# The extra `torch` is not part of what this project is developed with.
# pyright: reportMissingImports=false

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from prorld.train.batch import strands_of
from prorld.train.checkpoint import Kept, read_checkpoint, set_dice, write_checkpoint
from prorld.train.errors import NotFinite
from prorld.train.hand_over import hand_over
from prorld.train.lora import add_lora
from prorld.train.loss import policy_loss
from prorld.train.model import can_share, device_of, logprobs_of, open_model
from prorld.train.packing import Pack, pack
from prorld.train.shapes import Form, LearnSettings, StepFigures, TrainGroup
from prorld.train.weights import Weights

__all__ = ["TorchLearner", "open_learner"]


def open_learner(model: str | Path, settings: LearnSettings) -> TorchLearner:
    """A learner for the model in a Hugging Face directory, or in a GGUF file.

    How many threads torch uses is of the whole process, and set here. Libraries below it read ``OMP_NUM_THREADS`` when
    the process starts: set that to the same number outside. Threads that wait for each other on busy cores cost far
    more than they bring.
    """
    torch.set_num_threads(settings.threads)
    source = Path(model).absolute()
    opened = open_model(source, settings, device_of(settings.device))
    trained = dict(opened.named_parameters()) if settings.lora_rank is None else add_lora(opened, settings)
    return TorchLearner(opened, source, Weights(trained, settings), settings)


class TorchLearner:
    """A ``Learner`` on one device; ``open_learner`` makes it."""

    def __init__(self, model: Any, source: Path, weights: Weights, settings: LearnSettings) -> None:
        self.model = model
        self._source = source
        self._weights = weights
        self._settings = settings
        self._share = can_share(model)
        self._step_count = 0

    @property
    def step_count(self) -> int:
        """Steps made, over all lives. One that was refused is none."""
        return self._step_count

    def step(self, groups: Sequence[TrainGroup]) -> StepFigures:
        """Move the weights ``passes`` times by these groups. A ``LearnError`` says why that was not done.

        All or nothing: whatever is raised, weights and optimizer are those from before.
        """
        began = time.monotonic()
        packs = [
            made
            for strands in strands_of(groups, self._settings)
            for made in pack(strands, tokens_max=self._settings.tokens_max, share=self._share)
        ]
        # One pass fails before it changes anything.
        before = self._weights.state() if self._settings.passes > 1 else None
        figures = _Figures()
        starts: list[Any] = [None] * len(packs)
        try:
            for _ in range(self._settings.passes):
                for place, made in enumerate(packs):
                    starts[place] = self._backward(made, starts[place], figures)
                figures.gradient_norm += self._weights.move()
        except BaseException:
            self._weights.forget_gradients()
            if before is not None:
                self._weights.restore(before)
            raise
        self._step_count += 1
        return figures.summed_up(packs, self._settings.passes, time.monotonic() - began)

    def hand_over(self, directory: Path, form: Form) -> Path:
        """Write what an engine loads, whole or not at all; the path to name to it.

        The directory takes the place of one that was there. Before the first step it is the model as it was opened: an
        engine whose weights are to be replaced in place has to be started from such a directory.
        """
        return hand_over(self.model, self._source, directory, form)

    def save(self, directory: Path) -> None:
        """Everything an exact resume needs, whole or not at all."""
        write_checkpoint(directory, Kept(step_count=self._step_count), self._weights.state())

    def load(self, directory: Path) -> None:
        """Go on from there, to the bit. The learner has to be of the same model and settings."""
        kept, tensors = read_checkpoint(directory)
        self._weights.restore(tensors)
        set_dice(tensors)
        self._step_count = kept.step_count

    def _backward(self, made: Pack, start: Any, figures: _Figures) -> Any:
        """Add the gradient of one pack. The log-probabilities that the step began with, which the first pass knows."""
        logprobs, entropies = logprobs_of(self.model, made)
        uses = torch.tensor(made.uses, device=logprobs.device)
        now = logprobs[uses]
        recorded, advantages, weights = (
            torch.tensor(column, dtype=torch.float32, device=logprobs.device)
            for column in (made.logprobs, made.advantages, made.weights)
        )
        if start is None:
            start = now.detach()
            figures.meet(start - recorded, entropies[uses])
        loss, clipped = policy_loss(
            now=now, start=start, recorded=recorded, advantages=advantages, weights=weights, settings=self._settings
        )
        if not torch.isfinite(loss):
            raise NotFinite(f"the loss of a pack of {len(made.ids)} tokens is {float(loss.detach())}")
        loss.backward()
        self._weights.take_gradients()
        figures.loss += float(loss.detach())
        figures.clipped += clipped
        return start


class _Figures:
    """Sums over the packs and passes of a step."""

    def __init__(self) -> None:
        self.loss = self.gradient_norm = 0.0
        self.clipped = 0
        self._gap = self._gap_max = self._entropy = 0.0

    def meet(self, apart: Any, entropies: Any) -> None:
        """How far the trainer and the engine are apart on each token, before anything has moved."""
        self._gap += float(apart.abs().sum())
        self._gap_max = max(self._gap_max, float(apart.abs().max()))
        self._entropy += float(entropies.sum())

    def summed_up(self, packs: Sequence[Pack], passes: int, seconds: float) -> StepFigures:
        tokens = sum(len(made.uses) for made in packs)
        return StepFigures(
            loss=self.loss / passes,
            gradient_norm=self.gradient_norm / passes,
            gap=self._gap / tokens,
            gap_max=self._gap_max,
            clipped=self.clipped / (tokens * passes),
            entropy=self._entropy / tokens,
            tokens_trained=tokens,
            tokens_computed=sum(len(made.ids) for made in packs),
            seconds=seconds,
        )
