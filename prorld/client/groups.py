"""Groups as a trainer reads them: the samples that count, and the columns of a branch without a copy."""

from __future__ import annotations

import sys
from array import array
from typing import Any, Literal, NamedTuple

from prorld.client.errors import BAD_REPLY, ClientError
from prorld.wire.batches import PackedBatchGroup
from prorld.wire.trajectory import PackedBranch, PackedTrajectory

__all__ = ["Columns", "Sample", "columns", "usable"]


class Columns(NamedTuple):
    """The columns of a branch, one entry per token. ``numpy.asarray`` takes each of them without a copy."""

    token_ids: memoryview[int]
    mask: memoryview[int]
    logprobs: memoryview[float]


class Sample(NamedTuple):
    """A sample to train on. ``trajectory`` is there where trajectories were asked for."""

    sample_index: int
    job_id: str
    reward: float
    advantage: float
    trajectory: PackedTrajectory | None


def usable(group: PackedBatchGroup) -> list[Sample]:
    """The samples of a group that count. The others are masked or dropped, and no part of its mean or spread."""
    trajectories = group.trajectories or [None] * len(group.rewards)
    rows = zip(group.job_ids, group.rewards, group.advantages, trajectories, strict=True)
    return [
        Sample(index, job_id, reward, advantage, trajectory)
        for index, (job_id, reward, advantage, trajectory) in enumerate(rows)
        if job_id is not None and reward is not None and advantage is not None
    ]


def columns(branch: PackedBranch) -> Columns:
    """The arrays of a branch as they came over the wire. Raises ``ClientError`` where they don't fit each other."""
    try:
        found = Columns(_view(branch.token_ids, "i"), memoryview(branch.mask), _view(branch.logprobs, "f"))
    except TypeError as exc:
        raise ClientError(f"branch {branch.branch} holds no whole numbers: {exc}", code=BAD_REPLY) from exc
    if not len(found.token_ids) == len(found.mask) == len(found.logprobs):
        raise ClientError(f"branch {branch.branch} has columns of different length", code=BAD_REPLY)
    return found


def _view(column: bytes, typecode: Literal["i", "f"]) -> memoryview[Any]:
    if sys.byteorder == "big":
        swapped = array(typecode, column)
        swapped.byteswap()
        return memoryview(swapped)
    return memoryview(column).cast(typecode)
