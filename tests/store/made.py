"""Jobs as they come to the journal."""

from __future__ import annotations

import random
from array import array

from prorld.domain.branch import Segment, VersionSpan
from prorld.domain.job import JobSpec, JobState, Timing
from prorld.domain.outcome import Outcome, OutcomeKind, Verdict
from prorld.store.jobs import JobAccepted, JobEnded, StoredJob
from prorld.wire.jobs import Drift, JobRecord
from prorld.wire.trajectory import PackedBranch, PackedTrajectory, TrajectoryJob

CREATED = "2026-01-01T00:00:00.000000Z"
ENDED = "2026-01-01T00:01:00.000000Z"


def accepted(
    serial: int,
    job_id: str,
    *,
    tenant: str = "default",
    handler: str = "fake",
    group_id: str | None = None,
    held: bool = False,
) -> JobAccepted:
    """A job that is accepted."""
    spec = JobSpec(job_id=job_id, tenant=tenant, handler=handler, group_id=group_id, instance={"n": serial})
    return JobAccepted(serial=serial, spec=spec, digest="d", request_bytes=10, created_at=CREATED, held=held)


def ended(
    job: JobAccepted, *, ended_at: str = ENDED, tokens: int = 8, verdict: Verdict = Verdict.USE, reward: float = 1.0
) -> JobEnded:
    """Its end, with so many tokens of which the later half was sampled."""
    spec = job.spec
    outcome = Outcome(kind=OutcomeKind.OK, code="ok")
    record = JobRecord(
        job_id=spec.job_id, handler=spec.handler, policy=spec.policy, tenant=spec.tenant, state=JobState.DONE,
        outcome=outcome, verdict=verdict, reward=reward, timing=Timing(), group_id=spec.group_id,
        created_at=job.created_at, ended_at=ended_at,
    )  # fmt: skip
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    trajectory = PackedTrajectory(
        job=TrajectoryJob(**fields, instance=spec.instance), tokenizer="t", tools=[],
        branches=[branch(job.serial, tokens)], calls=[],
        drift=Drift(), reward=reward, step_rewards=[], verdict=verdict, outcome=outcome,
    )  # fmt: skip
    return JobEnded(serial=job.serial, record=record, stored=StoredJob(spec=spec, trajectory=trajectory))


def branch(seed: int, tokens: int) -> PackedBranch:
    """A branch: a prompt, then what was sampled."""
    dice = random.Random(seed)
    half = tokens // 2
    ids = array("i", (dice.randrange(150_000) for _ in range(tokens)))
    logprobs = array("f", (0.0 if i < half else -dice.expovariate(2) for i in range(tokens)))
    return PackedBranch(
        branch=0, parent=None, fork_at=None, reason=None, token_ids=ids.tobytes(),
        mask=bytes(half) + b"\1" * (tokens - half), logprobs=logprobs.tobytes(),
        policy_versions=[VersionSpan(start=half, end=tokens, epoch=0, version=3)],
        segments=[
            Segment(start=0, end=half, source="prompt"),
            Segment(start=half, end=tokens, source="sampled"),
        ],
        routed_experts=None,
    )  # fmt: skip
