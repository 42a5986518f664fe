"""A branch as most trainers want it: a prompt, and a response in which some tokens were sampled.

The prompt is everything before the first sampled token. What trainers write where nothing was sampled (0.0, 1.0, -100,
nothing) differs and is no part of it: here a log-probability is 0.0 where the mask is 0, as in the trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from prorld.domain.calls import CallParams
from prorld.domain.outcome import Verdict
from prorld.wire.trajectory import BranchDoc, PackedTrajectory, Trajectory, unpacked

__all__ = ["LogprobsMode", "Row", "rows_of"]

# Which distribution log-probabilities are of: the model's own, the one that was sampled from after temperature, none
# that the engine told, or not the same throughout the row.
LogprobsMode = Literal["raw", "processed", "none", "mixed"]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One branch of one rollout. The three response columns and ``versions`` have the same length.

    ``versions`` is the policy version that made a token, ``None`` where the policy did not. ``step_rewards`` are by
    index into the response. ``is_last`` marks one row of a rollout, the one that was sampled from last.
    """

    job_id: str
    group_id: str | None
    sample_index: int
    branch: int
    is_last: bool
    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float]
    versions: list[int | None]
    step_rewards: dict[int, float]
    finish_reason: str | None
    temperature: float
    reward: float | None
    verdict: Verdict
    logprobs_mode: LogprobsMode = "raw"

    @property
    def token_ids(self) -> list[int]:
        """Prompt and response."""
        return self.prompt_ids + self.response_ids


def rows_of(document: Trajectory | PackedTrajectory) -> list[Row]:
    """A row for each branch in which something was sampled, in the order of the branches."""
    if isinstance(document, PackedTrajectory):
        document = unpacked(document)
    trained = [branch for branch in document.branches if any(branch.mask)]
    last = document.calls[-1].branch if document.calls else None
    return [_row(document, branch, is_last=branch.branch == last) for branch in trained]


def _row(document: Trajectory, branch: BranchDoc, *, is_last: bool) -> Row:
    start = branch.mask.index(1)
    sampled = [segment.finish_reason for segment in branch.segments if segment.source == "sampled"]
    calls = [call.params for call in document.calls if call.branch == branch.branch]
    return Row(
        job_id=document.job.job_id,
        group_id=document.job.group_id,
        sample_index=document.job.sample_index,
        branch=branch.branch,
        is_last=is_last,
        prompt_ids=branch.token_ids[:start],
        response_ids=branch.token_ids[start:],
        response_mask=branch.mask[start:],
        response_logprobs=branch.logprobs[start:],
        versions=_versions(branch)[start:],
        step_rewards={
            step.index - start: step.reward
            for step in document.step_rewards
            if step.branch == branch.branch and step.index >= start
        },
        finish_reason=sampled[-1] if sampled else None,
        temperature=calls[-1].temperature if calls else 1.0,
        reward=document.reward,
        verdict=document.verdict,
        logprobs_mode=_logprobs_mode(calls),
    )


def _logprobs_mode(calls: Sequence[CallParams]) -> LogprobsMode:
    if not calls:
        return "raw"
    alike = len({(call.temperature, call.logprobs_mode) for call in calls}) == 1
    return calls[-1].logprobs_mode if alike else "mixed"


def _versions(branch: BranchDoc) -> list[int | None]:
    versions: list[int | None] = [None] * len(branch.token_ids)
    for span in branch.policy_versions:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    return [version if mask else None for version, mask in zip(versions, branch.mask, strict=True)]
