"""What a group is told of an ended job."""

from __future__ import annotations

from prorld.domain.branch import VersionSpan
from prorld.domain.job import JobSpec
from prorld.domain.outcome import OutcomeKind
from prorld.domain.versions import PolicyVersion
from prorld.rollout.batches.members import sample_end
from prorld.store.jobs import StoredJob
from prorld.testing.group_jobs import ended_job

SPEC = JobSpec(job_id="b:0:1", tenant="t", handler="fake", instance={}, group_id="b:0", sample_index=1)


def with_spans(job: StoredJob, *spans: VersionSpan) -> StoredJob:
    job.trajectory.branches[0].policy_versions[:] = spans
    return job


def test_a_time_out_says_where_it_was() -> None:
    """Only while the policy worked may it become a zero."""
    end = sample_end(ended_job(SPEC, reward=None, kind=OutcomeKind.TIMEOUT, code="total_timeout"))
    assert (end.sample_index, end.kind, end.stage, end.code) == (1, "timeout", "run", "total_timeout")


def test_of_every_epoch_the_oldest_and_the_newest_version_count() -> None:
    """A rollback may make a version old that is the newest of its epoch."""
    spans = [(0, 4), (0, 5), (1, 3), (1, 6), (1, 7)]
    job = with_spans(
        ended_job(SPEC),
        *(VersionSpan(start=n, end=n + 1, epoch=epoch, version=version) for n, (epoch, version) in enumerate(spans)),
    )
    end = sample_end(job)
    assert end.oldest == PolicyVersion(0, 4)
    assert end.sampled == (PolicyVersion(0, 4), PolicyVersion(0, 5), PolicyVersion(1, 3), PolicyVersion(1, 7))
    assert sample_end(with_spans(ended_job(SPEC))).sampled == ()
