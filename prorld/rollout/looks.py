"""Second looks at ended jobs, as the rooms above ask for them: verification, scoring by engines, reevaluation.

It joins the two and owns the thread in which long rollouts are verified. Nothing that it does changes a job.
"""

from __future__ import annotations

from collections.abc import Collection

import trio

from prorld.domain.scoring import Tolerance
from prorld.domain.versions import PolicyVersion
from prorld.errors import Overloaded
from prorld.handlers.registry import Registry
from prorld.inference.rescoring import Scorer
from prorld.kit.lanes import Lane
from prorld.rollout.life import World
from prorld.rollout.reevaluation import Reevaluator
from prorld.rollout.supervisor import Supervisor
from prorld.rollout.verification import INLINE_TOKENS_MAX, Rescorer, verify_rollout
from prorld.store.jobs import StoredJob
from prorld.wire.looks import ReevaluateJob, Reevaluation, ReevaluationPage, VerifyAnswer

__all__ = ["TOLERANCE", "Looks"]

# One at a time: verification is Python, and a second thread of it would only slow the event loop down.
VERIFY_THREADS = 1
# Requests for another score, those that wait for an engine included.
RESCORES_ASKED_MAX = 64
RETRY_AFTER_S = 10.0
TOLERANCE = Tolerance(mean=0.02, max=1.0, varying=0.07)


class Looks:
    """Implements ``prorld.rollout.service.LooksService``; ``run`` is the actor of the reevaluations."""

    def __init__(
        self,
        world: World,
        supervisor: Supervisor,
        handlers: Registry,
        scorer: Scorer,
        *,
        tolerance: Tolerance = TOLERANCE,
    ) -> None:
        self._scorer = scorer
        self._tolerance = tolerance
        self._stored = supervisor.stored
        self._rescoring = 0
        self._reevaluator = Reevaluator(world, supervisor, handlers, lambda: supervisor.draining)
        self._lane = Lane("verify", VERIFY_THREADS)
        self._rescorer = Rescorer(scorer, self._lane)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Reevaluate until cancelled."""
        await self._reevaluator.run(task_status=task_status)

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

        With ``rescore`` engines say again what every sampled token scores. Slow, and bounded by a deadline of its own.
        """
        stored = await self._stored(job_id, tenant, "it can be verified when it is done")
        served = self._scorer.served(stored.spec.policy)
        answer = await self._verified(stored, served)
        if not rescore:
            return answer
        if self._rescoring >= RESCORES_ASKED_MAX:
            raise Overloaded(f"{self._rescoring} rollouts are being scored again", retry_after_s=RETRY_AFTER_S)
        allowed = Tolerance(
            mean=self._tolerance.mean if tolerance is None else tolerance,
            max=self._tolerance.max if tolerance_max is None else tolerance_max,
            varying=self._tolerance.varying if tolerance is None else 0.0,
        )
        self._rescoring += 1
        try:
            return await self._rescorer.rescored(stored, answer, allowed)
        finally:
            self._rescoring -= 1

    async def _verified(self, stored: StoredJob, served: Collection[PolicyVersion | None]) -> VerifyAnswer:
        if sum(len(branch.mask) for branch in stored.trajectory.branches) <= INLINE_TOKENS_MAX:
            await trio.lowlevel.checkpoint()
            return verify_rollout(stored, served)
        # It only reads what no longer changes, so a caller that leaves need not wait for it.
        return await self._lane.run(verify_rollout, stored, served, abandon_on_cancel=True)

    async def reevaluate(self, job_id: str, tenant: str | None, request: ReevaluateJob) -> Reevaluation:
        """Score a stored rollout again, into a record of its own."""
        return await self._reevaluator.begin(job_id, tenant, request)

    async def reevaluations(self, job_id: str, tenant: str | None) -> ReevaluationPage:
        """All that are kept of a job, newest first."""
        return await self._reevaluator.page(job_id, tenant)

    async def reevaluation(self, job_id: str, tenant: str | None, n: int) -> Reevaluation:
        """One of them now."""
        return await self._reevaluator.get(job_id, tenant, n)

    async def wait_reevaluation(self, job_id: str, tenant: str | None, n: int) -> Reevaluation:
        """The record once it has ended. The caller's scope bounds the wait."""
        return await self._reevaluator.wait_done(job_id, tenant, n)

    async def cancel_reevaluation(self, job_id: str, tenant: str | None, n: int, reason: str) -> Reevaluation:
        """Begin its end; one that has ended stays as it is."""
        return await self._reevaluator.cancel(job_id, tenant, n, reason)
