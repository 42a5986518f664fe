"""The trajectory document of an ended job, and how much memory the job takes while it is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prorld.domain.branch import Branch
from prorld.domain.messages import Message
from prorld.handlers.base import Grade
from prorld.inference.session import ModelSession
from prorld.rollout.entry import JobEntry, drift_of
from prorld.wire.trajectory import (
    PackedTrajectory,
    StepReward,
    Trajectory,
    TrajectoryJob,
    branch_doc,
    packed_branch,
)

# Per token: an id, a log-probability and a mask byte. Per job and segment: measured object overhead, rounded up.
TOKEN_BYTES = 9
JOB_BYTES = 6000
SEGMENT_BYTES = 700
CALL_BYTES = 900
EVENT_BYTES = 1000
RESULT_BYTES = 500


def trajectory(entry: JobEntry) -> Trajectory:
    """The document with lists; the job must be done."""
    return Trajectory(**_common(entry), branches=[branch_doc(branch) for branch in _branches(entry)])


def packed_trajectory(entry: JobEntry) -> PackedTrajectory:
    """The document with packed arrays; the job must be done."""
    return PackedTrajectory(**_common(entry), branches=[packed_branch(branch) for branch in _branches(entry)])


def _branches(entry: JobEntry) -> Sequence[Branch]:
    return () if entry.session is None else entry.session.branches


def _common(entry: JobEntry) -> dict[str, Any]:
    """What both forms share."""
    if entry.outcome is None or entry.verdict is None:
        raise AssertionError(f"{entry.spec.job_id} is not done")
    record, session = entry.record(), entry.session
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    return {
        "job": TrajectoryJob(**fields, instance=entry.spec.instance),
        "tokenizer": "" if session is None else session.tokenizer,
        "renderer": "" if session is None else session.renderer,
        "tools": [] if session is None else list(session.tools),
        "calls": [] if session is None else list(session.calls),
        "drift": drift_of(session),
        "reward": entry.reward,
        "step_rewards": step_rewards(entry.grade, session),
        "verdict": entry.verdict,
        "outcome": entry.outcome,
    }


def step_rewards(grade: Grade | None, session: ModelSession | None) -> list[StepReward]:
    """A turn's reward sits on the last token the policy sampled in it; that of a turn without tokens has no place."""
    if grade is None or session is None:
        return []
    last: dict[int, tuple[int, int]] = {}
    for branch in session.branches:
        for segment in branch.segments:
            if segment.source == "sampled" and segment.calls and segment.end > segment.start:
                last[session.calls[segment.calls[-1]].turn] = (branch.index, segment.end - 1)
    return [
        StepReward(branch=last[turn][0], index=last[turn][1], reward=reward)
        for turn, reward in grade.step_rewards
        if turn in last
    ]


def kept_bytes(entry: JobEntry) -> int:
    """About how much memory an ended job takes."""
    size = JOB_BYTES + entry.request_bytes + EVENT_BYTES * entry.events.kept
    if entry.result is not None:
        size += RESULT_BYTES + 4 * len(entry.result.answer or "")
    size += sum(len(path) + len(data) for path, data in entry.carried.items())
    if entry.session is not None:
        size += CALL_BYTES * len(entry.session.calls)
        for branch in entry.session.branches:
            size += TOKEN_BYTES * len(branch)
            for segment in branch.segments:
                size += SEGMENT_BYTES + (0 if segment.message is None else 4 * _chars(segment.message))
    return size


def _chars(message: Message) -> int:
    return len(message.content) + len(message.reasoning or "") + sum(len(call.raw) for call in message.tool_calls)
