"""What becomes of a live job when it ends: the one form of it that is told, kept and looked at again.

A look at an ended job finds the same, bit for bit, whether the daemon that ran it still lives or not, since all of them
start from this form.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from prorld.domain.branch import Segment
from prorld.domain.calls import CallRecord
from prorld.domain.messages import Message
from prorld.handlers.base import Grade, RunResult
from prorld.rollout.entry import JobEntry, drift_of
from prorld.store.jobs import StoredJob
from prorld.wire.jobs import JobRecord
from prorld.wire.trajectory import PackedTrajectory, StepReward, TrajectoryJob, packed_branch

__all__ = ["canonical", "empty_job", "kept_bytes", "record_of", "step_rewards", "stored_job"]

# Per token: an id, a log-probability and a mask byte. Per job and segment: measured object overhead, rounded up.
TOKEN_BYTES: Final = 9
JOB_BYTES: Final = 6000
SEGMENT_BYTES: Final = 700
CALL_BYTES: Final = 900
EVENT_BYTES: Final = 1000
RESULT_BYTES: Final = 500
# What RUN leaves for EVAL is a handler's own; as deep as what clients may send.
DATA_DEPTH_MAX: Final = 100
# Events in which nothing is a plugin's.
OUR_EVENTS: Final = frozenset({"job.queued", "job.restored", "job.stage", "job.attempt", "job.done"})


def stored_job(entry: JobEntry) -> StoredJob:
    """All of a job that has come to its end."""
    session, result = entry.session, entry.result
    branches = () if session is None else session.branches
    calls = [] if session is None else list(session.calls)
    data, can_grade = _kept_data(result)
    trajectory = PackedTrajectory(
        **_head(entry),
        tokenizer="" if session is None else session.tokenizer,
        renderer="" if session is None else session.renderer,
        tools=[] if session is None else list(session.tools),
        branches=[packed_branch(branch) for branch in branches],
        calls=calls,
        drift=drift_of(session),
        reward=entry.reward,
        step_rewards=step_rewards(entry.grade, ((branch.index, branch.segments) for branch in branches), calls),
    )
    return StoredJob(
        spec=entry.spec,
        trajectory=trajectory,
        transcript=[] if session is None else list(session.transcript),
        stop=None if result is None else result.stop,
        answer=None if result is None else result.answer,
        data=data,
        carried=dict(entry.carried),
        can_grade=can_grade,
        events=entry.events.kept,
    )


def empty_job(entry: JobEntry) -> StoredJob:
    """The same of a job of which nothing but its end can be kept."""
    trajectory = PackedTrajectory(
        **_head(entry),
        tokenizer="",
        tools=[],
        branches=[],
        calls=[],
        drift=drift_of(None),
        reward=None,
        step_rewards=[],
    )
    events = [event if event.event in OUR_EVENTS else replace(event, data={}) for event in entry.events.kept]
    return StoredJob(spec=entry.spec, trajectory=trajectory, can_grade=False, events=events)


def _head(entry: JobEntry) -> dict[str, Any]:
    record = entry.final_record()
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    return {
        "job": TrajectoryJob(**fields, instance=entry.spec.instance),
        "verdict": record.verdict,
        "outcome": record.outcome,
    }


def record_of(stored: StoredJob) -> JobRecord:
    """The record of an ended job."""
    job = stored.trajectory.job
    return JobRecord(**{name: getattr(job, name) for name in JobRecord.__struct_fields__})


def step_rewards(
    grade: Grade | None, branches: Iterable[tuple[int, Sequence[Segment]]], calls: Sequence[CallRecord]
) -> list[StepReward]:
    """A turn's reward sits on the last token the policy sampled in it; that of a turn without tokens has no place."""
    if grade is None or not grade.step_rewards:
        return []
    last: dict[int, tuple[int, int]] = {}
    for index, segments in branches:
        for segment in segments:
            if segment.source == "sampled" and segment.calls and segment.end > segment.start:
                last[calls[segment.calls[-1]].turn] = (index, segment.end - 1)
    return [
        StepReward(branch=last[turn][0], index=last[turn][1], reward=reward)
        for turn, reward in grade.step_rewards
        if turn in last
    ]


def _kept_data(result: RunResult | None) -> tuple[dict[str, Any], bool]:
    """What RUN left for EVAL, as it is read again, and whether that is all of it."""
    if result is None or not result.data:
        return {}, True
    if not _is_plain(result.data, DATA_DEPTH_MAX):
        return {}, False
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(result.data), type=dict[str, Any]), True
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        return {}, False


def _is_plain(value: object, depth: int) -> bool:
    """Whether it is the same when it is written and read, but for tuples, which become lists."""
    if isinstance(value, dict):
        return depth > 0 and all(isinstance(key, str) and _is_plain(item, depth - 1) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value)
    return value is None or isinstance(value, (str, bytes, bool, int, float))


def kept_bytes(stored: StoredJob, request_bytes: int) -> int:
    """About how much memory an ended job takes."""
    size = JOB_BYTES + request_bytes + EVENT_BYTES * len(stored.events)
    if stored.stop is not None:
        size += RESULT_BYTES + 4 * len(stored.answer or "")
    size += sum(len(path) + len(data) for path, data in stored.carried.items())
    size += CALL_BYTES * len(stored.trajectory.calls)
    for branch in stored.trajectory.branches:
        size += TOKEN_BYTES * len(branch.mask)
        for segment in branch.segments:
            size += SEGMENT_BYTES + (0 if segment.message is None else 4 * _chars(segment.message))
    return size


def _chars(message: Message) -> int:
    return len(message.content) + len(message.reasoning or "") + sum(len(call.raw) for call in message.tool_calls)


def canonical(record: JobRecord) -> dict[str, Any]:
    """What the one line in the log says of a job."""
    timing = {name: round(getattr(record.timing, name), 3) for name in record.timing.__struct_fields__}
    outcome = record.outcome
    return {
        "job_id": record.job_id,
        "handler": record.handler,
        "tenant": record.tenant,
        "outcome": None if outcome is None else outcome.kind.value,
        "code": None if outcome is None else outcome.code,
        "verdict": None if record.verdict is None else record.verdict.value,
        "stop_reason": record.stop_reason,
        "reward": record.reward,
        "attempts": len(record.attempts),
        "turns": record.turns,
        "sampled": record.tokens.sampled,
        "observed": record.tokens.observed,
        "backends": record.backends,
        **timing,
    }
