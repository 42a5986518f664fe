"""What a step minimises: the clipped surrogate of PPO as DAPO has it, corrected for who sampled."""

# The extra `torch` is not part of what this project is developed with.
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from prorld.train.shapes import LearnSettings

__all__ = ["Loss", "policy_loss"]


class Loss(NamedTuple):
    """The loss of some tokens, and in how many of them the clip held the ratio."""

    loss: Any
    clipped: int


def policy_loss(*, now: Any, start: Any, recorded: Any, advantages: Any, weights: Any, settings: LearnSettings) -> Loss:
    """All are vectors over trained tokens, and log-probabilities but the last two.

    ``recorded`` is what the engine sampled with, ``start`` the trainer's own at the start of the step, ``now`` those
    that carry gradient. Two ratios follow, kept apart: from the engine to the start of the step, which is off where
    versions or numerics differ and is only cut from above; and from there to now, which the clip keeps near one.
    """
    importance = torch.exp(start - recorded).clamp(max=settings.importance_max)
    ratio = torch.exp(now - start)
    # Clip-higher: what was rare has more room to become likely than what is likely has to become rare.
    held = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    free, bound = ratio * advantages, held * advantages
    loss = -(weights * importance * torch.minimum(free, bound)).sum()
    return Loss(loss, int((bound < free).sum()))
