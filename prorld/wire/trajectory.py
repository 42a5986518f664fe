"""The trajectory document: the tokens of a rollout, who made each of them, and how it was graded.

It has two forms that say the same. In JSON the columns of a branch are lists; in MessagePack they are packed arrays,
bit for bit what the engine returned.
"""

from __future__ import annotations

import sys
from array import array
from typing import Any, Generic, TypeVar

import msgspec

from prorld.domain.branch import Branch, ForkReason, Segment, VersionSpan
from prorld.domain.calls import CallRecord
from prorld.domain.messages import ToolSchema
from prorld.domain.outcome import Outcome, Verdict
from prorld.wire.jobs import Drift, JobRecord

__all__ = [
    "FORMAT",
    "BranchDoc",
    "ExportedTrajectory",
    "PackedBranch",
    "PackedTrajectory",
    "StepReward",
    "Trajectory",
    "TrajectoryJob",
    "branch_doc",
    "branch_of",
    "packed_branch",
    "unpacked",
]

FORMAT = "prorld.trajectory/1"

IdsT = TypeVar("IdsT")
MaskT = TypeVar("MaskT")
LogprobsT = TypeVar("LogprobsT")
BranchT = TypeVar("BranchT")


class _Branch(msgspec.Struct, Generic[IdsT, MaskT, LogprobsT], frozen=True, kw_only=True):
    branch: int
    parent: int | None
    fork_at: int | None
    reason: ForkReason | None
    token_ids: IdsT
    mask: MaskT
    logprobs: LogprobsT
    policy_versions: list[VersionSpan]
    segments: list[Segment]
    routed_experts: dict[str, Any] | None = None


class BranchDoc(_Branch[list[int], list[int], list[float]], frozen=True, kw_only=True):
    """One branch. The three lists have the same length; ``logprobs`` is 0.0 where ``mask`` is 0."""


class PackedBranch(_Branch[bytes, bytes, bytes], frozen=True, kw_only=True):
    """The same in MessagePack: ``token_ids`` int32, ``mask`` uint8, ``logprobs`` float32, all little-endian."""


class StepReward(msgspec.Struct, frozen=True, kw_only=True):
    """A reward on one token."""

    branch: int
    index: int
    reward: float


class TrajectoryJob(JobRecord, frozen=True, kw_only=True):
    """The job's record with its instance."""

    instance: dict[str, Any]


class _Trajectory(msgspec.Struct, Generic[BranchT], frozen=True, kw_only=True):
    format: str = FORMAT
    job: TrajectoryJob
    tokenizer: str
    renderer: str = ""
    tools: list[ToolSchema]
    branches: list[BranchT]
    calls: list[CallRecord]
    drift: Drift
    reward: float | None
    step_rewards: list[StepReward]
    verdict: Verdict
    outcome: Outcome


class Trajectory(_Trajectory[BranchDoc], frozen=True, kw_only=True):
    """``GET /v1/jobs/{id}/trajectory``."""


class PackedTrajectory(_Trajectory[PackedBranch], frozen=True, kw_only=True):
    """The same with ``Accept: application/msgpack``."""


class ExportedTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    """With ``?format=``: the rows that a trainer reads; what they are is the format's own."""

    format: str
    job_id: str
    verdict: Verdict
    rows: list[dict[str, Any]]


def branch_doc(branch: Branch) -> BranchDoc:
    """A branch as JSON has it."""
    return BranchDoc(
        branch=branch.index,
        parent=branch.parent,
        fork_at=branch.fork_at,
        reason=branch.reason,
        token_ids=branch.ids.tolist(),
        mask=list(branch.mask),
        logprobs=branch.logprobs.tolist(),
        policy_versions=list(branch.versions),
        segments=list(branch.segments),
    )


def packed_branch(branch: Branch) -> PackedBranch:
    """A branch as MessagePack has it: its arrays copied as they are."""
    return PackedBranch(
        branch=branch.index,
        parent=branch.parent,
        fork_at=branch.fork_at,
        reason=branch.reason,
        token_ids=_little(branch.ids),
        mask=branch.mask,
        logprobs=_little(branch.logprobs),
        policy_versions=list(branch.versions),
        segments=list(branch.segments),
    )


def branch_of(packed: PackedBranch) -> Branch:
    """The branch that was packed; ``ValueError`` where its columns don't fit together."""
    ids, logprobs = _columns(packed)
    return Branch.rebuilt(
        packed.branch,
        parent=packed.parent,
        fork_at=packed.fork_at,
        reason=packed.reason,
        ids=ids,
        mask=packed.mask,
        logprobs=logprobs,
        segments=packed.segments,
        versions=packed.policy_versions,
    )


def unpacked(packed: PackedTrajectory) -> Trajectory:
    """The document with lists for packed arrays; ``ValueError`` where one is no array of whole items."""
    fields = {name: getattr(packed, name) for name in packed.__struct_fields__}
    fields["branches"] = [_unpacked_branch(branch) for branch in packed.branches]
    return Trajectory(**fields)


def _unpacked_branch(packed: PackedBranch) -> BranchDoc:
    fields = {name: getattr(packed, name) for name in packed.__struct_fields__}
    ids, logprobs = _columns(packed)
    fields["token_ids"], fields["mask"], fields["logprobs"] = ids.tolist(), list(packed.mask), logprobs.tolist()
    return BranchDoc(**fields)


def _columns(packed: PackedBranch) -> tuple[array[int], array[float]]:
    ids, logprobs = array("i"), array("f")
    ids.frombytes(packed.token_ids)
    logprobs.frombytes(packed.logprobs)
    if sys.byteorder == "big":
        ids.byteswap()
        logprobs.byteswap()
    return ids, logprobs


def _little(column: array[Any]) -> bytes:
    if sys.byteorder == "big":
        column = array(column.typecode, column)
        column.byteswap()
    return column.tobytes()
