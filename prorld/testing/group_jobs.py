"""Jobs of groups that end when the test says so, over a real journal: a ``prorld.rollout.members.Jobs`` in miniature.

Below the room that uses it, so it knows no supervisor; ``tests/rollout/batches`` hold both to the same contract.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from prorld.domain.branch import VersionSpan
from prorld.domain.job import JobSpec, JobState, Timing, TokenCounts
from prorld.domain.outcome import DEFAULT_VERDICTS, Outcome, OutcomeKind, Verdict, verdict_of
from prorld.errors import Conflict, Overloaded
from prorld.store.jobs import JobAccepted, JobEnded, LiveJob, StoredJob, live_jobs, newest_serial
from prorld.store.journal import Change, Journal
from prorld.wire.jobs import Drift, JobRecord
from prorld.wire.trajectory import PackedBranch, PackedTrajectory, TrajectoryJob

__all__ = ["AT", "GroupJobs", "ended_job"]

AT = "2026-01-01T00:00:00.000Z"


def ended_job(
    spec: JobSpec,
    *,
    reward: float | None = 1.0,
    kind: OutcomeKind = OutcomeKind.OK,
    code: str = "",
    seconds: float = 1.0,
    sampled: int = 10,
    versions: Sequence[int] = (0,),
    parts: dict[str, float] | None = None,
) -> StoredJob:
    """An ended job as the journal keeps it."""
    outcome = Outcome(kind=kind, stage=None if kind is OutcomeKind.OK else "run", code=code or kind.value)
    graded = reward is not None and kind in (OutcomeKind.OK, OutcomeKind.POLICY_LIMIT)
    verdict = verdict_of(outcome, graded=graded, table=DEFAULT_VERDICTS)
    record = JobRecord(
        job_id=spec.job_id, handler=spec.handler, policy=spec.policy, tenant=spec.tenant, state=JobState.DONE,
        outcome=outcome, verdict=verdict, reward=reward if graded else None, reward_parts=parts or {},
        timing=Timing(run_s=seconds), tokens=TokenCounts(sampled=sampled), policy_versions=list(versions),
        group_id=spec.group_id, sample_index=spec.sample_index, created_at=AT, ended_at=AT,
    )  # fmt: skip
    fields = {name: getattr(record, name) for name in JobRecord.__struct_fields__}
    branch = PackedBranch(
        branch=0, parent=None, fork_at=None, reason=None, token_ids=b"\1\0\0\0" * 2, mask=b"\0\1",
        logprobs=b"\0\0\0\0" * 2,
        policy_versions=[VersionSpan(start=n, end=n + 1, version=version) for n, version in enumerate(versions, 1)],
        segments=[],
    )  # fmt: skip
    document = PackedTrajectory(
        job=TrajectoryJob(**fields, instance=spec.instance), tokenizer="bytes", tools=[], branches=[branch], calls=[],
        drift=Drift(), reward=record.reward, step_rewards=[], verdict=record.verdict or Verdict.DROP, outcome=outcome,
    )  # fmt: skip
    return StoredJob(spec=spec, trajectory=document)


class GroupJobs:
    """Jobs that do nothing. ``live`` are those that have not ended; ``told_to_end`` says why for those that should.

    With ``ends_at_once`` a job that is told to end does so before ``end`` returns; else ``go`` ends it.
    """

    def __init__(self, journal: Journal, *, room: int = 10_000, ends_at_once: bool = True) -> None:
        self.live: dict[tuple[str, str], tuple[int, JobSpec]] = {}
        self.told_to_end: dict[str, str] = {}
        self.started: list[str] = []
        self.most = room
        self.refuses: Exception | None = None
        self.ends_at_once = ends_at_once
        self._journal = journal
        self._listeners: list[Callable[[StoredJob], None]] = []
        self._serial = 0
        self._tasks: trio.Nursery | None = None

    async def restore(self) -> None:
        """Know what an earlier life left."""
        self._serial = await self._journal.read(newest_serial)
        found: list[LiveJob] = await self._journal.read(live_jobs)
        for job in found:
            self.live[job.spec.tenant, job.spec.job_id] = job.serial, job.spec

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """End what is told to end, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._tasks = nursery
            task_status.started()
            await trio.sleep_forever()

    async def start(self, specs: Sequence[JobSpec], *changes: Change) -> None:
        """Accept these jobs, together with the changes."""
        if self.refuses is not None:
            raise self.refuses
        if len(specs) > self.room():
            raise Overloaded("no room", retry_after_s=1.0)
        if any((spec.tenant, spec.job_id) in self.live for spec in specs):
            raise Conflict("taken", code="job_exists")
        made: list[tuple[int, JobSpec]] = []
        for spec in specs:
            self._serial += 1
            made.append((self._serial, spec))
        accepted = [
            JobAccepted(serial=serial, spec=spec, digest="", request_bytes=0, created_at=AT, held=True)
            for serial, spec in made
        ]
        await self._journal.commit(*accepted, *changes)
        for serial, spec in made:
            self.live[spec.tenant, spec.job_id] = serial, spec
            self.started.append(spec.job_id)

    def end(self, tenant: str, job_ids: Sequence[str], reason: str) -> None:
        """Begin the end of these."""
        for job_id in job_ids:
            if (tenant, job_id) in self.live:
                self.told_to_end[job_id] = reason
                if self.ends_at_once:
                    assert self._tasks is not None
                    self._tasks.start_soon(self.go, job_id, tenant)

    def room(self) -> int:
        """How many more there may be."""
        return max(0, self.most - len(self.live))

    def listen(self, listener: Callable[[StoredJob], None]) -> None:
        """Call it for every job that ends from now on."""
        self._listeners.append(listener)

    async def go(self, job_id: str, tenant: str = "default") -> None:
        """A job that was told to end is gone."""
        if (tenant, job_id) in self.live:
            await self.finish(job_id, reward=None, kind=OutcomeKind.CANCELLED, tenant=tenant, sampled=3)

    async def finish(
        self,
        job_id: str,
        *,
        reward: float | None = 1.0,
        kind: OutcomeKind = OutcomeKind.OK,
        tenant: str = "default",
        seconds: float = 1.0,
        sampled: int = 10,
        versions: Sequence[int] = (0,),
        code: str = "",
    ) -> None:
        """A job ends: written first, then told."""
        serial, spec = self.live.pop((tenant, job_id))
        job = ended_job(spec, reward=reward, kind=kind, seconds=seconds, sampled=sampled, versions=versions, code=code)
        await self._journal.owe(JobEnded(serial=serial, record=job.trajectory.job, stored=job))
        for listener in self._listeners:
            listener(job)
