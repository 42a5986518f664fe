"""The audit: an actor that lets engines score a share of the ended jobs again, and raises its voice when they drift.

Which jobs is a matter of their ids, so that it can be said afterwards whether one was chosen. It works on one job at a
time and only after that job has ended; it delays no job and no shutdown, and it alarms without changing anything.
"""

from __future__ import annotations

import hashlib
from collections import deque
from typing import Literal

import msgspec
import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.errors import ProrldError, RequestError
from prorld.metrics import Metrics
from prorld.rollout.events import Feed
from prorld.rollout.service import LooksService
from prorld.rollout.verification import DRIFT
from prorld.store.jobs import StoredJob
from prorld.wire.looks import VerifyAnswer

__all__ = ["WAITING_MAX", "Auditor", "DriftSeen", "is_chosen"]

log: FilteringBoundLogger = structlog.get_logger("prorld.rollout")

# Jobs that wait to be audited, by name. More end faster than engines score: the newest are left out and counted.
WAITING_MAX = 256
# Drifts that are remembered, and for how long health shows them.
DRIFTS_KEPT_MAX = 16
DRIFT_SHOWN_S = 900.0
# Between two audits, so that a burst of ended jobs is no burst of prefill.
PAUSE_S = 1.0

AuditResult = Literal["ok", "unverifiable", "drifted", "broken", "forgotten", "dropped", "failed"]


class DriftSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A job that did not pass."""

    job_id: str
    tenant: str
    words: str
    at: float


class Auditor:
    """``ended`` hears of jobs, ``run`` is the actor, ``drifts`` is for health."""

    def __init__(self, *, share: float, metrics: Metrics) -> None:
        self._share = share
        self._metrics = metrics
        self._waiting: deque[tuple[str, str]] = deque()
        self._wake = trio.Event()
        self._drifts: deque[DriftSeen] = deque(maxlen=DRIFTS_KEPT_MAX)

    def ended(self, stored: StoredJob) -> None:
        """A job has ended; it is audited later where it was chosen and something was sampled. Never blocks."""
        spec = stored.spec
        if not is_chosen(spec.tenant, spec.job_id, self._share) or not stored.trajectory.calls:
            return
        if len(self._waiting) >= WAITING_MAX:
            self._metrics.audited("dropped")
            return
        # By name, so that what of ended jobs is in memory stays bounded by its cache alone.
        self._waiting.append((spec.job_id, spec.tenant))
        self._wake.set()

    @property
    def waiting(self) -> int:
        """Jobs that are chosen and not audited yet."""
        return len(self._waiting)

    def drifts(self) -> list[DriftSeen]:
        """What did not pass lately, oldest first."""
        since = trio.current_time() - DRIFT_SHOWN_S
        return [seen for seen in self._drifts if seen.at >= since]

    async def run(
        self, looks: LooksService, feed: Feed, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Audit until cancelled; ``looks`` verify, ``feed`` is told of drift."""
        task_status.started()
        while True:
            while self._waiting:
                job_id, tenant = self._waiting.popleft()
                self._metrics.audited(await self._audit(looks, feed, job_id, tenant))
                await trio.sleep(PAUSE_S)
            self._wake = trio.Event()
            await self._wake.wait()

    async def _audit(self, looks: LooksService, feed: Feed, job_id: str, tenant: str) -> AuditResult:
        try:
            answer = await looks.verify(job_id, tenant, rescore=True)
        except RequestError as exc:
            # Forgotten before its turn came, or too many people ask for scores: an audit can wait for another job.
            log.debug("audit.skipped", job_id=job_id, code=exc.stable_code)
            return "forgotten" if exc.stable_code == "forgotten" else "failed"
        except Exception as exc:
            # What an engine or a plugin's client of one does must not end the audit of all others.
            log.exception("audit.crashed", job_id=job_id, expected=isinstance(exc, ProrldError))
            return "failed"
        return self._conclude(answer, tenant, feed)

    def _conclude(self, answer: VerifyAnswer, tenant: str, feed: Feed) -> AuditResult:
        score = answer.rescore
        if score is not None and score.mean is not None:
            self._metrics.audit_compared(score.tokens, gap=score.mean)
        if answer.result != "broken":
            return answer.result
        found = next((v for v in answer.violations if v.code == DRIFT), answer.violations[0])
        seen = DriftSeen(job_id=answer.job_id, tenant=tenant, words=found.message, at=trio.current_time())
        self._drifts.append(seen)
        numbers = {} if score is None else {"tokens": score.tokens, "mean": score.mean, "max": score.max}
        said = {"job_id": answer.job_id, "tenant": tenant, "code": found.code, "message": found.message, **numbers}
        log.warning("audit.drifted", **said)
        feed.of_daemon("audit.drifted", **said)
        return "drifted" if found.code == DRIFT else "broken"


def is_chosen(tenant: str, job_id: str, share: float) -> bool:
    """Whether a job is audited: the same answer on every machine and at any time."""
    drawn = int.from_bytes(hashlib.sha256(f"{tenant}/{job_id}".encode()).digest()[:8])
    return drawn < share * 2**64
