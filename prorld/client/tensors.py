"""Rows as torch tensors, padded or packed. Importing this imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch  # pyright: ignore[reportMissingImports] - an extra

from prorld.client import layout
from prorld.client.arrays import Row
from prorld.client.layout import buckets

__all__ = ["PackedTensors", "PaddedTensors", "buckets", "packed", "padded"]


class PaddedTensors(NamedTuple):
    """``prorld.client.layout.Padded`` with tensors."""

    token_ids: torch.Tensor
    attention: torch.Tensor
    mask: torch.Tensor
    logprobs: torch.Tensor
    advantages: torch.Tensor
    lengths: torch.Tensor
    rollouts: torch.Tensor


class PackedTensors(NamedTuple):
    """``prorld.client.layout.Packed`` with tensors."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    logprobs: torch.Tensor
    advantages: torch.Tensor
    rollouts: torch.Tensor
    starts: torch.Tensor


def padded(
    rows: Sequence[Row],
    *,
    pad_id: int = 0,
    multiple_of: int = 1,
    left: bool = False,
    device: str | int | None = None,
) -> PaddedTensors:
    """As ``layout.padded``; on the CPU nothing is copied again."""
    found = layout.padded(rows, pad_id=pad_id, multiple_of=multiple_of, left=left)
    return PaddedTensors(*(torch.from_numpy(column).to(device) for column in found))


def packed(rows: Sequence[Row], *, device: str | int | None = None) -> PackedTensors:
    """As ``layout.packed``; on the CPU nothing is copied again."""
    return PackedTensors(*(torch.from_numpy(column).to(device) for column in layout.packed(rows)))
