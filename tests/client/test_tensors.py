"""Tensors: what the arrays say, with the types that a model wants, and without another copy."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorld.client import layout
from prorld.client.arrays import rows_of_group
from prorld.wire.batches import PackedBatchGroup
from tests.client.rollouts import groups

torch = pytest.importorskip("torch", reason="torch is not installed")

from prorld.client import tensors  # noqa: E402 - it imports torch

pytestmark = pytest.mark.real


@given(groups(), st.booleans())
def test_tensors_are_the_arrays(found: PackedBatchGroup, left: bool):
    """Column by column, to the bit."""
    rows = rows_of_group(found)
    pairs: list[tuple[Any, Any]] = [
        (tensors.padded(rows, left=left, multiple_of=4), layout.padded(rows, left=left, multiple_of=4)),
        (tensors.packed(rows), layout.packed(rows)),
    ]
    for ours, theirs in pairs:
        assert ours._fields == theirs._fields
        for tensor, array in zip(ours, theirs, strict=True):
            assert tensor.numpy().tobytes() == array.tobytes()
            assert tuple(tensor.shape) == array.shape


@given(groups())
def test_a_loss_is_the_same_padded_and_packed(found: PackedBatchGroup):
    """Token-level policy gradient with the recorded log-probabilities; they may be any bits here, so they are cut."""
    rows = rows_of_group(found)
    wide, flat = tensors.padded(rows), tensors.packed(rows)
    one = torch.nan_to_num(wide.logprobs, 0, 0, 0).clamp(-1e3, 1e3) * wide.advantages[:, None]
    other = torch.nan_to_num(flat.logprobs, 0, 0, 0).clamp(-1e3, 1e3) * flat.advantages
    assert torch.allclose(one[wide.mask].double().sum(), other[flat.mask].double().sum())
    assert wide.token_ids.dtype == flat.token_ids.dtype == torch.int64
    assert flat.starts.dtype == torch.int32
    assert wide.mask.dtype == torch.bool
    assert wide.logprobs.dtype == torch.float32
