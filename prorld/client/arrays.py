"""Branches as numpy arrays: views of the very bytes that came in MessagePack, so nothing is copied or rounded.

The arrays can't be written to. They keep the bytes of their own branch alive, and nothing else of the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from prorld.client.errors import BAD_REPLY, ClientError
from prorld.client.groups import usable
from prorld.wire.batches import PackedBatchGroup
from prorld.wire.trajectory import PackedBranch, PackedTrajectory

__all__ = ["Arrays", "Baseline", "Row", "advantages", "arrays", "rows", "rows_of_group", "versions"]

Ints: TypeAlias = npt.NDArray[np.int32]
Longs: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float32]

# ``grpo``: distance from the mean in standard deviations; ``mean``: from the mean; ``others``: from the others' mean.
Baseline: TypeAlias = Literal["grpo", "mean", "others"]

# That of the daemon: equal rewards give 0 and not a division by it.
_EPSILON = 1e-6


class Arrays(NamedTuple):
    """The columns of a branch, one entry per token."""

    token_ids: Ints
    mask: Bytes
    logprobs: Floats


class Row(NamedTuple):
    """A branch to train on. Its advantage is that of all rows of its rollout, which has ``rollout`` as its number."""

    arrays: Arrays
    rollout: int
    advantage: float
    job_id: str
    branch: int

    def __len__(self) -> int:
        return len(self.arrays.token_ids)


def arrays(branch: PackedBranch) -> Arrays:
    """Views of a branch's bytes. Raises ``ClientError`` where its columns don't fit each other."""
    try:
        ids, logprobs = np.frombuffer(branch.token_ids, "<i4"), np.frombuffer(branch.logprobs, "<f4")
    except ValueError as exc:
        raise ClientError(f"branch {branch.branch} holds no whole numbers: {exc}", code=BAD_REPLY) from exc
    mask = np.frombuffer(branch.mask, np.uint8)
    if not len(ids) == len(mask) == len(logprobs):
        raise ClientError(f"branch {branch.branch} has columns of different length", code=BAD_REPLY)
    return Arrays(ids, mask, logprobs)


def versions(branch: PackedBranch) -> Longs:
    """The policy version that made each token; -1 where the policy made none, or nobody knows."""
    found = np.full(len(branch.mask), -1, np.int64)
    for span in branch.policy_versions:
        if span.version is not None:
            found[span.start : span.end] = span.version
    found[np.frombuffer(branch.mask, np.uint8) == 0] = -1
    return found


def rows(trajectory: PackedTrajectory, *, rollout: int = 0, advantage: float = 0.0) -> Iterator[Row]:
    """The branches of a rollout in which something was sampled. No sampled token is in two of them with its mask."""
    for branch in trajectory.branches:
        found = arrays(branch)
        if found.mask.any():
            yield Row(found, rollout, advantage, trajectory.job.job_id, branch.branch)


def rows_of_group(group: PackedBatchGroup, *, first: int = 0, baseline: Baseline | None = None) -> list[Row]:
    """The rows of the samples that count, numbered from ``first``. Their advantages are the daemon's, or by a baseline.

    The group must have its trajectories.
    """
    mine = None if baseline is None else advantages(_counted(group), baseline)
    found: list[Row] = []
    for number, sample in enumerate(usable(group), first):
        if sample.trajectory is None:
            raise ClientError(f"group {group.group_id} has no trajectories: ask for them", code="bad_input")
        advantage = sample.advantage if mine is None else float(mine[sample.sample_index])
        found += rows(sample.trajectory, rollout=number, advantage=advantage)
    return found


def advantages(rewards: Sequence[float | None], baseline: Baseline = "grpo") -> npt.NDArray[np.float64]:
    """By sample index; NaN for a sample without a reward, which has no part in mean or spread.

    A single sample has nothing to be compared with: 0.
    """
    values = np.array([np.nan if reward is None else reward for reward in rewards], np.float64)
    counted = values[~np.isnan(values)]
    if len(counted) < 2:
        return np.where(np.isnan(values), values, 0.0)
    # By the distance from one of them, so that equal rewards have exactly themselves for their mean.
    centred: npt.NDArray[np.float64] = values - (counted[0] + (counted - counted[0]).mean())
    if baseline == "others":
        return centred * (len(counted) / (len(counted) - 1))
    return centred if baseline == "mean" else centred / (counted.std() + _EPSILON)


def _counted(group: PackedBatchGroup) -> list[float | None]:
    """Rewards of the samples that count; a masked one may have a reward, too."""
    counts = {sample.sample_index for sample in usable(group)}
    return [reward if index in counts else None for index, reward in enumerate(group.rewards)]
