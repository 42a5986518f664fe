"""What the rooms above (HTTP, the daemon) may ask of the rollout room; ``supervisor.Supervisor`` answers it.

Every method answers with wire types or raises a ``RequestError``. A tenant of ``None`` means an admin: all tenants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from prorld.domain.job import JobState
from prorld.wire.events import Event, JobEvent
from prorld.wire.jobs import JobPage, JobRecord, SubmitJob
from prorld.wire.looks import ReevaluateJob, Reevaluation, ReevaluationPage, VerifyAnswer
from prorld.wire.ops import Stages, StagesPatch
from prorld.wire.trajectory import PackedTrajectory, Trajectory

__all__ = ["FeedService", "LooksService", "RolloutService"]


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

    def reevaluations(self, job_id: str, tenant: str | None) -> ReevaluationPage:
        """All that are kept of a job, newest first."""
        ...

    def reevaluation(self, job_id: str, tenant: str | None, n: int) -> Reevaluation:
        """One of them now; ``NotFound`` or ``Forgotten``."""
        ...

    async def wait_reevaluation(self, job_id: str, tenant: str | None, n: int) -> Reevaluation:
        """The record once it has ended. The caller's scope bounds the wait."""
        ...

    def cancel_reevaluation(self, job_id: str, tenant: str | None, n: int, reason: str) -> Reevaluation:
        """Begin its end; one that has ended stays as it is."""
        ...


class RolloutService(Protocol):
    """Jobs and stages."""

    async def submit(self, request: SubmitJob, tenant: str, *, digest: str | None = None) -> tuple[JobRecord, bool]:
        """Accept a job; the flag says whether it is new (201) or the same one again (200).

        ``digest`` is a hash over the canonical form of the body as it was sent, before defaults.
        Raises ``Overloaded`` (full or draining, nothing accepted), ``Conflict``, ``Forgotten``, ``Impossible``,
        ``BadRequest``.
        """
        ...

    async def requeue(self, job_id: str, tenant: str | None, new_id: str | None) -> tuple[JobRecord, bool]:
        """Accept the same job once more, as ``submit``; ``Conflict`` where it lives or its group has ended."""
        ...

    def get(self, job_id: str, tenant: str | None) -> JobRecord:
        """A job's record now; ``NotFound`` or ``Forgotten``."""
        ...

    async def wait_done(self, job_id: str, tenant: str | None) -> JobRecord:
        """The record once the job is done. The caller's scope bounds the wait and may be cancelled at any time."""
        ...

    def list(
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

    def cancel(self, job_id: str, tenant: str | None, reason: str) -> JobRecord:
        """Begin the end of a job; answers at once. A job that is done stays as it is."""
        ...

    async def cancel_many(
        self, tenant: str | None, *, job_ids: Sequence[str] | None, group_id: str | None, reason: str
    ) -> int:
        """The same for many in one sweep; how many are on their way out."""
        ...

    def trajectory(self, job_id: str, tenant: str | None) -> Trajectory:
        """The trajectory of a job that is done; ``Conflict`` while it runs."""
        ...

    def packed_trajectory(self, job_id: str, tenant: str | None) -> PackedTrajectory:
        """The same with packed arrays."""
        ...

    def events(self, job_id: str, tenant: str | None, *, after: int = 0, limit: int = 1000) -> Sequence[JobEvent]:
        """The job's events with a higher sequence number."""
        ...

    def newest_event(self, job_id: str, tenant: str | None) -> int:
        """The highest sequence number of the job's events so far."""
        ...

    async def wait_event(self, job_id: str, tenant: str | None, *, after: int) -> None:
        """Wait until the job has an event with a higher number, or is done. The caller's scope bounds the wait."""
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
