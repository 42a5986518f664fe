"""The trajectory document: the tokens of a rollout, who made each of them, and how it was graded."""

from __future__ import annotations

from typing import Any

import msgspec

from prorld.domain.branch import Branch, ForkReason, Segment, VersionSpan
from prorld.domain.calls import CallRecord
from prorld.domain.messages import ToolSchema
from prorld.domain.outcome import Outcome, Verdict
from prorld.wire.jobs import Drift, JobRecord

FORMAT = "prorld.trajectory/1"


class BranchDoc(msgspec.Struct, frozen=True, kw_only=True):
    """One branch. The three lists have the same length; ``logprobs`` is 0.0 where ``mask`` is 0."""

    branch: int
    parent: int | None
    fork_at: int | None
    reason: ForkReason | None
    token_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    policy_versions: list[VersionSpan]
    segments: list[Segment]
    routed_experts: dict[str, Any] | None = None


class StepReward(msgspec.Struct, frozen=True, kw_only=True):
    """A reward on one token."""

    branch: int
    index: int
    reward: float


class TrajectoryJob(JobRecord, frozen=True, kw_only=True):
    """The job's record with its instance."""

    instance: dict[str, Any]


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /v1/jobs/{id}/trajectory``."""

    format: str = FORMAT
    job: TrajectoryJob
    tokenizer: str
    tools: list[ToolSchema]
    branches: list[BranchDoc]
    calls: list[CallRecord]
    drift: Drift
    reward: float | None
    step_rewards: list[StepReward]
    verdict: Verdict
    outcome: Outcome


def branch_doc(branch: Branch) -> BranchDoc:
    """A branch as it is sent."""
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
