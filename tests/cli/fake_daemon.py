"""A daemon as the synchronous client sees it, without a socket: jobs end after so many looks, and trouble on demand."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Self

import msgspec

from prorld.client import ClientError
from prorld.domain.job import JobState, Timing, TokenCounts
from prorld.domain.outcome import Outcome, OutcomeKind, Verdict
from prorld.wire.jobs import JobPage, JobRecord, SubmitJob
from prorld.wire.ops import Condition, Ready

GOOD = Outcome(kind=OutcomeKind.OK, code="ok")


class FakeDaemon:
    """``connect`` gives a client. A job ends ``looks`` calls after it was accepted."""

    def __init__(self, *, looks: int = 3, inflight_max: int = 1000) -> None:
        self.looks = looks
        self.inflight_max = inflight_max
        self.calls = 0
        self.away_until = 0
        self.restarts_at: list[int] = []
        self.forgets: set[str] = set()
        self.refuses: dict[str, ClientError] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.submitted: list[SubmitJob] = []
        self.cancelled: list[str] = []
        self.most_inflight = 0
        self.missing: list[Condition] = []
        self.waited: list[str] = []
        self._jobs: dict[str, tuple[SubmitJob, int]] = {}
        self._ended: dict[str, JobRecord] = {}
        self._serial = itertools.count()

    def connect(self) -> FakeClient:
        """As ``client_of``."""
        return FakeClient(self)

    def tick(self) -> None:
        """A call has come in."""
        self.calls += 1
        if self.restarts_at and self.calls >= self.restarts_at[0]:
            self.restarts_at.pop(0)
            self._jobs.clear()
            self._ended.clear()
            self.away_until = self.calls + 2
        if self.calls <= self.away_until:
            raise ClientError("no daemon answers", code="no_daemon", retryable=True)

    def record(self, job_id: str) -> JobRecord:
        """A job now; ends it when its time has come."""
        if job_id in self.forgets:
            raise ClientError("forgotten", code="forgotten", status=410)
        if job_id in self._ended:
            return self._ended[job_id]
        if job_id not in self._jobs:
            raise ClientError("unknown", code="unknown_job", status=404)
        job, since = self._jobs[job_id]
        ended = self.calls - since >= self.looks
        outcome = self.outcomes.get(str(job.instance.get("x")), GOOD) if ended else None
        record = JobRecord(
            job_id=job_id, handler="fake", policy="default", tenant="default",
            state=JobState.DONE if ended else JobState.RUNNING, outcome=outcome,
            verdict=Verdict.USE if ended else None, reward=1.0 if outcome is GOOD else None, timing=Timing(),
            tokens=TokenCounts(sampled=5), group_id=job.group_id, sample_index=job.sample_index,
            created_at="2026-01-01T00:00:00Z",
        )  # fmt: skip
        if ended:
            self._ended[job_id] = record
        return record

    @property
    def inflight(self) -> int:
        """Jobs that have not ended."""
        alive = [job_id for job_id in self._jobs if job_id not in self.forgets]
        return sum(self.record(job_id).state is not JobState.DONE for job_id in alive)

    def submit(self, job: SubmitJob) -> JobRecord:
        """Accept."""
        assert job.job_id is not None
        known = self._ended.get(job.job_id)
        if known is not None:
            return known
        refusal = self.refuses.get(str(job.instance.get("x")))
        if refusal is not None:
            raise refusal
        if job.job_id not in self._jobs:
            if self.inflight >= self.inflight_max:
                raise ClientError("full", code="overloaded", retryable=True, status=503, retry_after_s=0.01)
            self._jobs[job.job_id] = (job, self.calls)
            self.submitted.append(job)
        self.most_inflight = max(self.most_inflight, self.inflight)
        return self.record(job.job_id)

    def of_group(self, group_id: str) -> list[str]:
        """Ids of a group's jobs."""
        return [job_id for job_id, (job, _) in self._jobs.items() if job.group_id == group_id]

    def cancel(self, job_ids: Sequence[str]) -> int:
        """All at once."""
        gone = Outcome(kind=OutcomeKind.CANCELLED, code="cancelled")
        chosen = [job_id for job_id in job_ids if self.record(job_id).state is not JobState.DONE]
        for job_id in chosen:
            self._ended[job_id] = msgspec.structs.replace(
                self.record(job_id), state=JobState.DONE, outcome=gone, verdict=Verdict.DROP, reward=None
            )
        self.cancelled += chosen
        return len(chosen)

    def records(self, state: str | None = None, group_id: str | None = None) -> list[JobRecord]:
        """Newest first."""
        found = [self.record(job_id) for job_id in reversed(self._jobs) if job_id not in self.forgets]
        return [
            record
            for record in found
            if (state is None or record.state == state) and (group_id is None or record.group_id == group_id)
        ]


class FakeClient:
    """What ``prorld run`` calls."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self._daemon = daemon

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is held."""

    def ready(self) -> Ready:
        return Ready(ready=not self._daemon.missing, missing=self._daemon.missing)

    def submit(self, job: SubmitJob) -> JobRecord:
        self._daemon.tick()
        return self._daemon.submit(job)

    def wait(self, job_id: str, *, within_s: float | None = None) -> JobRecord:
        self._daemon.tick()
        self._daemon.waited.append(job_id)
        return self._daemon.record(job_id)

    def get(self, job_id: str) -> JobRecord:
        self._daemon.tick()
        return self._daemon.record(job_id)

    def cancel(self, job_id: str, *, reason: str | None = None) -> JobRecord:
        self._daemon.tick()
        self._daemon.cancel([job_id])
        return self._daemon.record(job_id)

    def list(
        self,
        *,
        state: str | None = None,
        handler: str | None = None,
        group_id: str | None = None,
        limit: int = 50,
        after: str | None = None,
    ) -> JobPage:
        self._daemon.tick()
        start = int(after or 0)
        assert limit <= 500, "the daemon refuses larger pages"
        found = self._daemon.records(state, group_id)
        more = str(start + limit) if len(found) > start + limit else None
        return JobPage(items=found[start : start + limit], next=more)

    def cancel_many(
        self, *, job_ids: Sequence[str] | None = None, group_id: str | None = None, reason: str | None = None
    ) -> int:
        self._daemon.tick()
        return self._daemon.cancel(job_ids or ([] if group_id is None else self._daemon.of_group(group_id)))
