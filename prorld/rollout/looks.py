"""Second looks at ended jobs, as the rooms above ask for them: verification and reevaluation.

It joins the two and owns the thread in which long rollouts are verified. Nothing that it does changes a job.
"""

from __future__ import annotations

import trio

from prorld.domain.job import JobState
from prorld.errors import Conflict
from prorld.kit.lanes import Lane
from prorld.rollout.life import World
from prorld.rollout.reevaluation import Reevaluator
from prorld.rollout.supervisor import Supervisor
from prorld.rollout.verification import verify_rollout
from prorld.wire.looks import ReevaluateJob, Reevaluation, ReevaluationPage, VerifyAnswer

__all__ = ["Looks"]

# One at a time: verification is Python, and a second thread of it would only slow the event loop down.
VERIFY_THREADS = 1
# Up to here (2 ms) a thread costs more than it saves the loop.
INLINE_TOKENS_MAX = 2048


class Looks:
    """Implements ``prorld.rollout.service.LooksService``; ``run`` is the actor of the reevaluations."""

    def __init__(self, world: World, supervisor: Supervisor) -> None:
        self._models = world.models
        self._find = supervisor.find
        self._reevaluator = Reevaluator(world, supervisor.find, lambda: supervisor.draining)
        self._lane = Lane("verify", VERIFY_THREADS)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Reevaluate until cancelled."""
        await self._reevaluator.run(task_status=task_status)

    async def verify(self, job_id: str, tenant: str | None) -> VerifyAnswer:
        """Whether a stored rollout is sound; ``Conflict`` while the job runs."""
        entry = self._find(job_id, tenant)
        if entry.state is not JobState.DONE:
            raise Conflict(f"job {job_id} is {entry.state}; it can be verified when it is done", code="not_done")
        served = self._models.served(entry.spec.policy)
        branches = () if entry.session is None else entry.session.branches
        if sum(len(branch) for branch in branches) <= INLINE_TOKENS_MAX:
            await trio.lowlevel.checkpoint()
            return verify_rollout(entry, served)
        # It only reads what no longer changes, so a caller that leaves need not wait for it.
        return await self._lane.run(verify_rollout, entry, served, abandon_on_cancel=True)

    async def reevaluate(self, job_id: str, tenant: str | None, request: ReevaluateJob) -> Reevaluation:
        """Score a stored rollout again, into a record of its own."""
        return await self._reevaluator.begin(job_id, tenant, request)

    def reevaluations(self, job_id: str, tenant: str | None) -> ReevaluationPage:
        """All that are kept of a job, newest first."""
        return self._reevaluator.page(job_id, tenant)

    def reevaluation(self, job_id: str, tenant: str | None, n: int) -> Reevaluation:
        """One of them now."""
        return self._reevaluator.get(job_id, tenant, n)

    async def wait_reevaluation(self, job_id: str, tenant: str | None, n: int) -> Reevaluation:
        """The record once it has ended. The caller's scope bounds the wait."""
        return await self._reevaluator.wait_done(job_id, tenant, n)

    def cancel_reevaluation(self, job_id: str, tenant: str | None, n: int, reason: str) -> Reevaluation:
        """Begin its end; one that has ended stays as it is."""
        return self._reevaluator.cancel(job_id, tenant, n, reason)
