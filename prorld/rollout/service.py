"""What the rooms above (HTTP, the daemon) may ask of the rollout room; ``supervisor.Supervisor`` answers it.

Every method answers with wire types or raises a ``RequestError``. A tenant of ``None`` means an admin: all tenants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from prorld.domain.job import JobState
from prorld.wire.batches import (
    AckAnswer,
    AckBatch,
    AppendAnswer,
    AppendInstances,
    BatchEvent,
    BatchGroupPage,
    BatchPage,
    BatchRecord,
    PackedBatchGroupPage,
    SubmitBatch,
)
from prorld.wire.events import Event, JobEvent
from prorld.wire.jobs import JobPage, JobRecord, SubmitJob
from prorld.wire.looks import ReevaluateJob, Reevaluation, ReevaluationPage, VerifyAnswer
from prorld.wire.ops import Stages, StagesPatch
from prorld.wire.trajectory import PackedTrajectory, Trajectory

__all__ = ["BatchService", "FeedService", "JobEventService", "LooksService", "RolloutService"]


class FeedService(Protocol):
    """The events of everything that a tenant may see."""

    @property
    def last(self) -> int:
        """The highest sequence number so far; 0 before the first event."""
        ...

    def after(self, seq: int, limit: int, tenant: str | None) -> tuple[Sequence[Event], int]:
        """What may be seen after a number, and the number up to which that is everything."""
        ...

    async def wait_after(self, seq: int, tenant: str | None) -> None:
        """Wait until ``after`` has something to give. The caller's scope bounds the wait."""
        ...


class JobEventService(Protocol):
    """The events of one job. None is seen before it is on the disk."""

    @property
    def last(self) -> int:
        """The highest sequence number so far."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether there will be no other one."""
        ...

    def after(self, seq: int, limit: int) -> Sequence[JobEvent]:
        """Events with a higher number, oldest first; a gap in the place of those that are gone."""
        ...

    async def wait_after(self, seq: int) -> None:
        """Wait until there is one with a higher number, or there will be none. The caller's scope bounds the wait."""
        ...


class LooksService(Protocol):
    """Second looks at ended jobs."""

    async def verify(
        self,
        job_id: str,
        tenant: str | None,
        *,
        rescore: bool = False,
        tolerance: float | None = None,
        tolerance_max: float | None = None,
    ) -> VerifyAnswer:
        """Whether a stored rollout is sound; ``Conflict`` while the job runs.

        With ``rescore`` engines score its tokens again, within these tolerances or the configured ones; ``Overloaded``.
        """
        ...

    async def reevaluate(self, job_id: str, tenant: str | None, request: ReevaluateJob) -> Reevaluation:
        """Score a stored rollout again, into a record of its own; ``Conflict`` where nothing can be scored."""
        ...

    async def reevaluations(self, job_id: str, tenant: str | None) -> ReevaluationPage:
        """All that are kept of a job, newest first."""
        ...

    async def reevaluation(self, job_id: str, tenant: str | None, n: int) -> Reevaluation:
        """One of them now; ``NotFound`` or ``Forgotten``."""
        ...

    async def wait_reevaluation(self, job_id: str, tenant: str | None, n: int) -> Reevaluation:
        """The record once it has ended. The caller's scope bounds the wait."""
        ...

    async def cancel_reevaluation(self, job_id: str, tenant: str | None, n: int, reason: str) -> Reevaluation:
        """Begin its end; one that has ended stays as it is."""
        ...


class RolloutService(Protocol):
    """Jobs and stages."""

    async def submit(
        self, request: SubmitJob, tenant: str, *, digest: str | None = None, size_bytes: int | None = None
    ) -> tuple[JobRecord, bool]:
        """Accept a job; the flag says whether it is new (201) or the same one again (200).

        ``digest`` is a hash over the canonical form of the body as it was sent, before defaults; ``size_bytes`` its
        length. Raises ``Overloaded`` (full, draining, or a disk that refuses: nothing accepted), ``Conflict``,
        ``Forgotten``, ``Impossible``, ``BadRequest``.
        """
        ...

    async def requeue(self, job_id: str, tenant: str | None, new_id: str | None) -> tuple[JobRecord, bool]:
        """Accept the same job once more, as ``submit``; ``Conflict`` where it lives or its group has ended."""
        ...

    async def get(self, job_id: str, tenant: str | None) -> JobRecord:
        """A job's record now; ``NotFound`` or ``Forgotten``."""
        ...

    async def wait_done(self, job_id: str, tenant: str | None) -> JobRecord:
        """The record once the job is done. The caller's scope bounds the wait and may be cancelled at any time."""
        ...

    async def list(
        self,
        tenant: str | None,
        *,
        state: JobState | None = None,
        handler: str | None = None,
        group_id: str | None = None,
        limit: int = 50,
        after: str | None = None,
    ) -> JobPage:
        """Jobs, newest first."""
        ...

    async def cancel(self, job_id: str, tenant: str | None, reason: str) -> JobRecord:
        """Begin the end of a job at once, and return when that is on the disk. A job that is done stays as it is."""
        ...

    async def cancel_many(
        self, tenant: str | None, *, job_ids: Sequence[str] | None, group_id: str | None, reason: str
    ) -> int:
        """The same for many in one sweep; how many are on their way out."""
        ...

    async def trajectory(self, job_id: str, tenant: str | None) -> Trajectory:
        """The trajectory of a job that is done; ``Conflict`` while it runs."""
        ...

    async def packed_trajectory(self, job_id: str, tenant: str | None) -> PackedTrajectory:
        """The same with packed arrays."""
        ...

    async def follow(self, job_id: str, tenant: str | None) -> JobEventService:
        """The job's events, those to come as well; good for as long as the caller holds it."""
        ...

    @property
    def feed(self) -> FeedService:
        """The events of all jobs, and of the daemon."""
        ...

    def owns_sandbox(self, sandbox_id: str, tenant: str) -> bool:
        """Whether a live job of this tenant has this sandbox."""
        ...

    def stages(self) -> Stages:
        """The three gates."""
        ...

    def set_stages(self, patch: StagesPatch) -> Stages:
        """Resize gates; takes effect at once."""
        ...

    def counts(self) -> dict[str, int]:
        """Jobs by state."""
        ...

    def outcomes(self) -> dict[str, int]:
        """Ended jobs by outcome since the start."""
        ...

    @property
    def draining(self) -> bool:
        """Whether new jobs are refused because the daemon is on its way out."""
        ...

    def drain(self) -> None:
        """Refuse new jobs from now on; those accepted go on."""
        ...

    async def wait_idle(self) -> None:
        """Wait until no accepted job is left."""
        ...


class BatchService(Protocol):
    """Batches of groups. Every method answers with wire types or raises a ``RequestError``."""

    async def submit(self, request: SubmitBatch, tenant: str, *, digest: str) -> tuple[BatchRecord, bool]:
        """Accept a batch; same id and same digest is the same batch. The flag: whether it is new."""
        ...

    async def append(self, batch_id: str, tenant: str | None, request: AppendInstances) -> AppendAnswer:
        """More prompts."""
        ...

    async def get(self, batch_id: str, tenant: str | None) -> BatchRecord:
        """What is known of it now; ``NotFound`` or ``Forgotten``."""
        ...

    async def list(self, tenant: str | None, *, limit: int = 50, after: str | None = None) -> BatchPage:
        """Batches, newest first."""
        ...

    async def events(self, batch_id: str, tenant: str | None, *, after: int, limit: int) -> Sequence[BatchEvent]:
        """Events with a higher number, as far as they are on the disk."""
        ...

    async def groups(
        self,
        batch_id: str,
        tenant: str | None,
        *,
        after: int,
        limit: int,
        max_bytes: int | None = None,
        trajectories: bool = False,
        instances: bool = False,
        packed: bool = False,
    ) -> BatchGroupPage | PackedBatchGroupPage:
        """Accepted groups with a higher number, in order; at least one where there is one."""
        ...

    async def wait_news(self, batch_id: str, tenant: str | None, *, after: int, groups: bool = False) -> None:
        """Wait for an event (or an accepted group) with a higher number, or the end. The caller's scope bounds it."""
        ...

    async def acknowledge(self, batch_id: str, tenant: str | None, request: AckBatch) -> AckAnswer:
        """The trainer is done with what came up to a number."""
        ...

    async def cancel(self, batch_id: str, tenant: str | None, reason: str) -> BatchRecord:
        """Begin its end; a batch that has ended stays as it is, and its leftovers go."""
        ...

    async def cancel_jobs(self, batch_id: str, tenant: str | None, reason: str) -> int:
        """Begin the end of the jobs that a batch has now, and of those that it left; how many. The batch goes on."""
        ...
