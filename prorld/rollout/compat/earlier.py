"""What the last life of the daemon left of these jobs: those that live again, and results that nobody has got."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Final

from prorld.domain.ids import COMPAT_TENANT
from prorld.domain.job import JobState
from prorld.rollout.compat.request import mark_of
from prorld.rollout.compat.tries import UNFETCHED_MAX, UNFETCHED_S, Try
from prorld.rollout.service import RolloutService
from prorld.wire.jobs import JobRecord

__all__ = ["live_records", "unfetched_tries"]

PAGE: Final = 200
_LIVE: Final = tuple(state for state in JobState if state is not JobState.DONE)


async def live_records(rollouts: RolloutService) -> list[JobRecord]:
    """The jobs that have not ended."""
    found: list[JobRecord] = []
    for state in _LIVE:
        found += await _newest(rollouts, state, most=None)
    return found


async def unfetched_tries(
    rollouts: RolloutService, *, since: str, fetched: Collection[str], live: Collection[str], now: str
) -> list[tuple[Try, float]]:
    """Graded results of the time after ``since`` that nobody has got, oldest first, with their ages in seconds.

    Of each name the newest job counts alone, and none where a job of that name is ``live``.
    """
    seen = set(live)
    found: list[tuple[Try, float]] = []
    for record in await _newest(rollouts, JobState.DONE, most=UNFETCHED_MAX):
        mark = mark_of(record.metadata)
        if mark is None or mark.job_id in seen:
            continue
        seen.add(mark.job_id)
        if record.reward is None or record.ended_at is None or record.ended_at <= since or record.job_id in fetched:
            continue
        age_s = (datetime.fromisoformat(now) - datetime.fromisoformat(record.ended_at)).total_seconds()
        if age_s <= UNFETCHED_S:
            one = Try(mark)
            one.job_id = record.job_id
            found.append((one, max(0.0, age_s)))
    return sorted(found, key=lambda each: -each[1])


async def _newest(rollouts: RolloutService, state: JobState, *, most: int | None) -> list[JobRecord]:
    found: list[JobRecord] = []
    after: str | None = None
    while most is None or len(found) < most:
        page = await rollouts.list(COMPAT_TENANT, state=state, limit=PAGE, after=after)
        found += page.items
        after = page.next
        if after is None:
            break
    return found
