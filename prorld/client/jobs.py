"""Jobs: handed in, waited for, looked at, scored again."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from prorld.client.caller import AWAY_S, LONG_POLL_S, REQUEST_S, Calls, part, query
from prorld.client.errors import CONNECTION_LOST, ClientError
from prorld.client.flows import Feed, Flow, Item, both, each
from prorld.client.http import MSGPACK
from prorld.domain.job import JobState
from prorld.wire.events import EventPage, JobEvent, JobEventPage
from prorld.wire.jobs import CancelAnswer, CancelJob, CancelJobs, JobPage, JobRecord, RequeueJob, SubmitJob
from prorld.wire.looks import ReevaluateJob, Reevaluation, ReevaluationPage, ReevaluationState, VerifyAnswer
from prorld.wire.trajectory import PackedTrajectory, Trajectory

__all__ = ["JobCalls", "Rollout"]

# The daemon gives up scoring a rollout before this, and says what it has.
RESCORE_S = 240.0
# Short enough to be read, long enough never to meet another one.
_ID_BYTES = 10


class Rollout(NamedTuple):
    """A job that is done, with its trajectory where that was asked for."""

    record: JobRecord
    trajectory: PackedTrajectory | None


class JobCalls(Calls):
    """The part of the client that is about jobs."""

    @both
    def submit(self, job: SubmitJob) -> Flow[JobRecord]:
        """Hand in a job. Without an id it gets one here, so that a repeat after a lost reply is the same job."""
        if job.job_id is None:
            job = msgspec.structs.replace(job, job_id=_new_id())
        return self._call("POST", "/v1/jobs", JobRecord, body=job)

    @both
    def get(self, job_id: str) -> Flow[JobRecord]:
        """A job's record now."""
        return self._call("GET", f"/v1/jobs/{part(job_id)}", JobRecord)

    @both
    def wait(self, job_id: str, *, within_s: float | None = None) -> Flow[JobRecord]:
        """The record once the job is done, or as it is after ``within_s``."""
        path = f"/v1/jobs/{part(job_id)}"
        return self._caller.poll(path, JobRecord, _is_done, within_s)

    @both
    def cancel(self, job_id: str, *, reason: str | None = None) -> Flow[JobRecord]:
        """Begin the end of a job; it is over when ``wait`` says so."""
        body = CancelJob() if reason is None else CancelJob(reason=reason)
        return self._call("POST", f"/v1/jobs/{part(job_id)}/cancel", JobRecord, body=body)

    @both
    def cancel_many(
        self, *, job_ids: Sequence[str] | None = None, group_id: str | None = None, reason: str | None = None
    ) -> Flow[int]:
        """The same for many; how many are on their way out."""
        chosen = {"job_ids": None if job_ids is None else [*job_ids], "group_id": group_id, "reason": reason}
        body = msgspec.convert({name: value for name, value in chosen.items() if value is not None}, CancelJobs)
        return (yield from self._call("POST", "/v1/jobs/cancel", CancelAnswer, body=body)).cancelling

    @both
    def trajectory(self, job_id: str) -> Flow[Trajectory]:
        """The trajectory of a job that is done."""
        return self._call("GET", f"/v1/jobs/{part(job_id)}/trajectory", Trajectory)

    @both
    def packed_trajectory(self, job_id: str) -> Flow[PackedTrajectory]:
        """The same with packed arrays, bit for bit what the engine returned, and several times as fast."""
        return self._call("GET", f"/v1/jobs/{part(job_id)}/trajectory", PackedTrajectory, accept=MSGPACK)

    @both
    def verify(
        self, job_id: str, *, rescore: bool = False, tolerance: float | None = None, tolerance_max: float | None = None
    ) -> Flow[VerifyAnswer]:
        """Whether the stored rollout of a job is what it says; with ``rescore`` by what engines say of it now, too."""
        path = f"/v1/jobs/{part(job_id)}/verify"
        if not rescore:
            return self._call("GET", path, VerifyAnswer)
        path += query(rescore="true", tolerance=tolerance, tolerance_max=tolerance_max)
        return self._call("GET", path, VerifyAnswer, within_s=RESCORE_S + REQUEST_S)

    @both
    def requeue(self, job_id: str, *, new_id: str | None = None) -> Flow[JobRecord]:
        """Run an ended job again as a new one. Without an id it gets one here, so that a repeat is the same job."""
        body = RequeueJob(job_id=new_id or _new_id())
        return self._call("POST", f"/v1/jobs/{part(job_id)}/requeue", JobRecord, body=body)

    @both
    def reevaluate(self, job_id: str, *, eval_s: float | None = None, reason: str = "") -> Flow[Reevaluation]:
        """Score the stored rollout again, into a record of its own. Told at once; ``wait_reevaluation`` has its end.

        It has no name that a repeat could be known by, so where the answer is lost the records tell what was begun.
        """
        before = yield from self._newest_reevaluation(job_id)
        path = f"/v1/jobs/{part(job_id)}/reevaluate"
        body = ReevaluateJob(eval_s=eval_s, reason=reason)
        try:
            return (yield from self._call("POST", path, Reevaluation, body=body, is_repeatable=False))
        except ClientError as exc:
            if exc.stable_code != CONNECTION_LOST:
                raise
            found = yield from self._newest_reevaluation(job_id)
            if found is None or (before is not None and found.n <= before.n):
                raise
            return found

    def _newest_reevaluation(self, job_id: str) -> Flow[Reevaluation | None]:
        page = yield from self._call("GET", f"/v1/jobs/{part(job_id)}/reevaluations", ReevaluationPage)
        return page.items[0] if page.items else None

    @both
    def reevaluations(self, job_id: str) -> Flow[Sequence[Reevaluation]]:
        """All that are kept of a job, newest first."""
        return (yield from self._call("GET", f"/v1/jobs/{part(job_id)}/reevaluations", ReevaluationPage)).items

    @both
    def wait_reevaluation(self, job_id: str, n: int, *, within_s: float = LONG_POLL_S) -> Flow[Reevaluation]:
        """One of them once it has ended, or as it is after ``within_s``."""
        path = f"/v1/jobs/{part(job_id)}/reevaluations/{n}"
        return self._caller.poll(path, Reevaluation, lambda found: found.state is ReevaluationState.DONE, within_s)

    @both
    def events(self, job_id: str, *, after: int = 0, wait_s: float = 0.0) -> Flow[Sequence[JobEvent]]:
        """The job's events with a higher number than ``after``, waiting up to ``wait_s`` for the first."""
        path = f"/v1/jobs/{part(job_id)}/events{query(after=after, wait_s=wait_s)}"
        return (yield from self._call("GET", path, JobEventPage, within_s=wait_s + REQUEST_S)).items

    @both
    def all_events(self, *, after: int = 0, wait_s: float = 0.0, limit: int = 1000) -> Flow[EventPage]:
        """What happened in the daemon after a number; go on after the page's ``last``."""
        path = f"/v1/events{query(after=after, wait_s=wait_s, limit=limit)}"
        return self._call("GET", path, EventPage, within_s=wait_s + REQUEST_S)

    @each
    def rollouts(
        self, jobs: Sequence[SubmitJob], *, trajectories: bool = True, away_s: float = AWAY_S
    ) -> Feed[Rollout]:
        """Run these jobs, all at once; each when it is done, in the order given.

        ``away_s`` is how long each call may go on trying while the daemon is away or has no room. Whoever stops in the
        middle leaves the rest running: `cancel_many` ends them, by their group for one.
        """
        named = [job if job.job_id else msgspec.structs.replace(job, job_id=_new_id()) for job in jobs]
        for job in named:
            yield from self._call("POST", "/v1/jobs", JobRecord, body=job, patience_s=away_s)
        for job in named:
            path = f"/v1/jobs/{part(job.job_id or '')}"
            record = yield from self._caller.poll(path, JobRecord, _is_done, None, patience_s=away_s)
            if not trajectories:
                yield Item(Rollout(record, None))
                continue
            whole = f"{path}/trajectory"
            found = yield from self._call("GET", whole, PackedTrajectory, accept=MSGPACK, patience_s=away_s)
            yield Item(Rollout(record, found))

    # Last, because the name hides the builtin in the annotations that follow it.
    @both
    def list(
        self,
        *,
        state: str | None = None,
        handler: str | None = None,
        group_id: str | None = None,
        limit: int = 50,
        after: str | None = None,
    ) -> Flow[JobPage]:
        """One page of jobs, newest first; ``after`` is the ``next`` of the page before."""
        wanted = query(state=state, handler=handler, group_id=group_id, limit=limit, next=after)
        return self._call("GET", f"/v1/jobs{wanted}", JobPage)


def _is_done(record: JobRecord) -> bool:
    return record.state is JobState.DONE


def _new_id() -> str:
    return f"job-{secrets.token_hex(_ID_BYTES)}"
