"""Rows laid out for a model: padded to one length, or one after the other; and cut into buckets of similar length.

What is filled in is never trained on: its mask is 0. Columns are new arrays, writable and contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from prorld.client.arrays import Floats, Ints, Longs, Row

__all__ = ["Packed", "Padded", "buckets", "packed", "padded"]

ScalarT = TypeVar("ScalarT", bound=np.generic)
Flags: TypeAlias = npt.NDArray[np.bool_]


class Padded(NamedTuple):
    """``[rows, length]``, but for the last three, which are ``[rows]``."""

    token_ids: Longs
    # Where there is a token, and where it was sampled in this row.
    attention: Flags
    mask: Flags
    logprobs: Floats
    advantages: Floats
    lengths: Longs
    rollouts: Longs


class Packed(NamedTuple):
    """``[tokens]``, one row after the other; row ``i`` is ``[starts[i], starts[i + 1])``, positions begin anew in each.

    ``advantages`` and ``rollouts`` are by token, ``starts`` is what attention kernels call ``cu_seqlens``.
    """

    token_ids: Longs
    positions: Longs
    mask: Flags
    logprobs: Floats
    advantages: Floats
    rollouts: Longs
    starts: Ints


def padded(rows: Sequence[Row], *, pad_id: int = 0, multiple_of: int = 1, left: bool = False) -> Padded:
    """Rows of one length: that of the longest, rounded up."""
    longest = max((len(row) for row in rows), default=0)
    shape = (len(rows), -(-longest // multiple_of) * multiple_of)
    found = Padded(
        token_ids=np.full(shape, pad_id, np.int64),
        attention=np.zeros(shape, np.bool_),
        mask=np.zeros(shape, np.bool_),
        logprobs=np.zeros(shape, np.float32),
        advantages=np.array([row.advantage for row in rows], np.float32),
        lengths=np.array([len(row) for row in rows], np.int64),
        rollouts=np.array([row.rollout for row in rows], np.int64),
    )
    for at, row in enumerate(rows):
        start = shape[1] - len(row) if left else 0
        where = (at, slice(start, start + len(row)))
        found.token_ids[where] = row.arrays.token_ids
        found.attention[where] = True
        found.mask[where] = row.arrays.mask
        found.logprobs[where] = row.arrays.logprobs
    return found


def packed(rows: Sequence[Row]) -> Packed:
    """Rows without anything between them."""
    lengths = np.array([len(row) for row in rows], np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    if starts[-1] > np.iinfo(np.int32).max:
        raise ValueError(f"{starts[-1]} tokens are too many for one pack")
    return Packed(
        token_ids=_joined([row.arrays.token_ids for row in rows], np.int64),
        positions=np.arange(starts[-1], dtype=np.int64) - np.repeat(starts[:-1], lengths),
        mask=_joined([row.arrays.mask for row in rows], np.bool_),
        logprobs=_joined([row.arrays.logprobs for row in rows], np.float32),
        advantages=np.repeat(np.array([row.advantage for row in rows], np.float32), lengths),
        rollouts=np.repeat(np.array([row.rollout for row in rows], np.int64), lengths),
        starts=starts.astype(np.int32),
    )


def buckets(rows: Sequence[Row], tokens_max: int, *, multiple_of: int = 1) -> list[list[Row]]:
    """The rows in buckets of similar length, longest first; padded, none holds more than ``tokens_max`` tokens.

    A row that is longer by itself is alone. The same rows give the same buckets.
    """
    found: list[list[Row]] = []
    width = 0
    for row in sorted(rows, key=len, reverse=True):
        if not found or (len(found[-1]) + 1) * width > tokens_max:
            found.append([])
            width = -(-len(row) // multiple_of) * multiple_of
        found[-1].append(row)
    return found


def _joined(columns: Sequence[npt.NDArray[Any]], dtype: type[ScalarT]) -> npt.NDArray[ScalarT]:
    return np.concatenate(columns).astype(dtype) if columns else np.zeros(0, dtype)
