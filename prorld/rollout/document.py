"""The trajectory document of an ended job, and how much memory the job takes while it is kept."""

from __future__ import annotations

from prorld.domain.outcome import Outcome, Verdict
from prorld.inference.session import ModelSession
from prorld.rollout.entry import JobEntry, drift_of
from prorld.wire.trajectory import StepReward, Trajectory, TrajectoryJob, branch_doc

# Per token: an id, a log-probability and a mask byte. Per job and segment: measured object overhead, rounded up.
TOKEN_BYTES = 9
JOB_BYTES = 6000
SEGMENT_BYTES = 700


def trajectory(entry: JobEntry) -> Trajectory:
    """The document; the job must be done."""
    outcome, verdict = entry.outcome, entry.verdict
    if outcome is None or verdict is None:
        raise AssertionError(f"{entry.spec.job_id} is not done")
    return _document(entry, outcome, verdict, entry.session)


def _document(entry: JobEntry, outcome: Outcome, verdict: Verdict, session: ModelSession | None) -> Trajectory:
    record = entry.record()
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    return Trajectory(
        job=TrajectoryJob(**fields, instance=entry.spec.instance),
        tokenizer="" if session is None else session.tokenizer,
        tools=[] if session is None else list(session.tools),
        branches=[] if session is None else [branch_doc(branch) for branch in session.branches],
        calls=[] if session is None else list(session.calls),
        drift=drift_of(session),
        reward=entry.reward,
        step_rewards=_step_rewards(entry, session),
        verdict=verdict,
        outcome=outcome,
    )


def _step_rewards(entry: JobEntry, session: ModelSession | None) -> list[StepReward]:
    """A turn's reward sits on the last token the policy sampled in it; that of a turn without tokens has no place."""
    if entry.grade is None or session is None:
        return []
    last: dict[int, tuple[int, int]] = {}
    for branch in session.branches:
        for segment in branch.segments:
            if segment.source == "sampled" and segment.calls and segment.end > segment.start:
                last[session.calls[segment.calls[-1]].turn] = (branch.index, segment.end - 1)
    return [
        StepReward(branch=last[turn][0], index=last[turn][1], reward=reward)
        for turn, reward in entry.grade.step_rewards
        if turn in last
    ]


def kept_bytes(entry: JobEntry) -> int:
    """About how much memory an ended job takes."""
    size = JOB_BYTES + entry.request_bytes
    if entry.session is not None:
        for branch in entry.session.branches:
            size += TOKEN_BYTES * len(branch)
            for segment in branch.segments:
                size += SEGMENT_BYTES + (0 if segment.message is None else 4 * len(segment.message.content))
    return size
