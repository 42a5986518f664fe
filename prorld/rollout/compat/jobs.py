"""The jobs that old trainers asked for: each has a task that follows it to its end, whether anybody waits or not.

It owns what is known of them by the trainers' names, and how they are submitted, ended, counted, and found again after
a restart. Whether jobs are taken at all, and what is written down, is the service's.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Callable, Collection
from typing import Final, Protocol

import msgspec
import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.domain.ids import COMPAT_TENANT
from prorld.domain.job import JobState
from prorld.domain.outcome import OutcomeKind
from prorld.errors import Conflict, Forgotten, NotFound, Overloaded, RequestError
from prorld.rollout.compat.earlier import live_records, unfetched_tries
from prorld.rollout.compat.request import Mark, mark_of, usable_id
from prorld.rollout.compat.tries import Tries, Try
from prorld.rollout.service import RolloutService
from prorld.store.jobs import StoredJob
from prorld.wire.jobs import JobRecord, SubmitJob

__all__ = ["STOP_S", "CompatJobs", "Rollouts"]

log: FilteringBoundLogger = structlog.get_logger("prorld.compat")

# A job whose end takes longer than this is still ending, and the trainer hears so.
STOP_S: Final = 60.0


class Rollouts(RolloutService, Protocol):
    """What is asked of the supervisor; beside what HTTP asks, all of a job that is done."""

    async def stored(self, job_id: str, tenant: str | None, otherwise: str) -> StoredJob:
        """All of a job that is done; ``Conflict`` with these words where it is not."""
        ...


class CompatJobs:
    """All of them. ``is_open`` says whether jobs are taken now: one that ends while they are not keeps no result."""

    def __init__(self, rollouts: Rollouts, is_open: Callable[[], bool]) -> None:
        self._rollouts = rollouts
        self._is_open = is_open
        self.tries = Tries()
        # Jobs of this tenant that lived again when this life began, and that no call of `process` asked for.
        self.others: list[JobRecord] = []

    def begin(self, mark: Mark, job: SubmitJob, room: trio.Nursery) -> Try:
        """Have a task submit and follow it."""
        one = Try(mark)
        self.tries.begin(one)
        room.start_soon(self._follow, one, job, name=f"compat {mark.job_id[:64]}")
        return one

    async def stored(self, one: Try) -> StoredJob:
        """All of a job once it has ended; raises what it was refused with."""
        job_id = await one.wait()
        try:
            return await self._rollouts.stored(job_id, COMPAT_TENANT, "its result is there when it is done")
        except (Forgotten, NotFound):
            # Nobody will ever get this one: the next call of that name starts anew.
            self.tries.fetch(one)
            raise

    async def cancel(self, name: str) -> None:
        """End the job of this name; returns when it is gone. ``NotFound`` where none runs, or its end came first."""
        one = self.tries.live(name)
        if one is None:
            raise NotFound(f"Job {name} is not running here", code="unknown_job")
        one.cancel_reason = one.cancel_reason or "cancelled by the trainer"
        if one.job_id is not None:
            await self._cancel(one.job_id, one.cancel_reason)
        with trio.move_on_after(STOP_S):
            job_id = await one.wait()
            record = await self._rollouts.get(job_id, COMPAT_TENANT)
            if record.outcome is not None and record.outcome.kind is not OutcomeKind.CANCELLED:
                raise NotFound(f"Job {name} had come to its end", code="unknown_job")
            return
        raise Overloaded(f"Job {name} is still ending", code="still_stopping", retry_after_s=2.0)

    async def end_all(self, reason: str) -> None:
        """End all; returns when they are gone."""
        for one in self.tries:
            one.cancel_reason = one.cancel_reason or reason
        accepted = [one.job_id for one in self.tries if one.job_id is not None]
        try:
            await self._rollouts.cancel_many(COMPAT_TENANT, job_ids=accepted, group_id=None, reason=reason)
        except Overloaded as exc:
            log.warning("compat.unwritten", reason=exc.message)
        for one in self.tries:
            await one.done.wait()

    async def places(self) -> Counter[str]:
        """How many there are, and how many in each place, by the counters of ``/status``."""
        count: Counter[str] = Counter()
        for one in self.tries:
            count["total"] += 1
            count["pending_jobs"] += 1
            place = "init_queue" if one.job_id is None else _place(await self._record(one.job_id))
            if place is not None:
                count[place] += 1
        return count

    async def _record(self, job_id: str) -> JobRecord | None:
        try:
            return await self._rollouts.get(job_id, COMPAT_TENANT)
        except RequestError:
            return None

    async def restore(self, room: trio.Nursery, *, since: str | None, fetched: Collection[str], now: str) -> None:
        """Follow the jobs that live again; those of a server that was being stopped are ended, and keep no result.

        Results of the time after ``since`` that nobody has got are kept on.
        """
        records = await live_records(self._rollouts)
        if self._is_open() and since is not None:
            marks = [mark_of(record.metadata) for record in records]
            left = await unfetched_tries(
                self._rollouts,
                since=since,
                fetched=frozenset(fetched),
                live={mark.job_id for mark in marks if mark is not None},
                now=now,
            )
            self.tries.restore(left, fetched)
        for record in records:
            mark = mark_of(record.metadata)
            if mark is None:
                self.others.append(record)
                continue
            if self.tries.live(mark.job_id) is not None:
                continue
            one = Try(mark)
            one.job_id = record.job_id
            one.cancel_reason = None if self._is_open() else "the server was stopped"
            self.tries.begin(one)
            room.start_soon(self._follow, one, None, name=f"compat {mark.job_id[:64]}")

    async def _follow(self, one: Try, job: SubmitJob | None) -> None:
        """From the request to the end of its job, whether anybody waits or not. Without a job: a restored one."""
        try:
            if job is not None:
                one.job_id = await self._submit(one.mark.job_id, job)
            assert one.job_id is not None
            if one.cancel_reason is not None:
                await self._cancel(one.job_id, one.cancel_reason)
            record = await self._rollouts.wait_done(one.job_id, COMPAT_TENANT)
        except RequestError as exc:
            self.tries.end(one, keep=False, refusal=exc)
        except Exception as exc:
            log.exception("compat.crashed", job_id=one.job_id)
            self.tries.end(one, keep=False, refusal=exc)
        else:
            self.tries.end(one, keep=record.reward is not None and self._is_open())

    async def _submit(self, name: str, job: SubmitJob) -> str:
        """Accept it as a new job: under the trainer's name where that is free, else under one that is like it."""
        stem = name if usable_id(name) else f"c-{hashlib.sha256(name.encode('utf-8', 'replace')).hexdigest()[:16]}"
        for job_id in (stem, f"{stem[:100]}.{secrets.token_hex(6)}"):
            request = msgspec.structs.replace(job, job_id=job_id)
            try:
                # No two bodies have this digest, so an id that is taken is never mistaken for a repetition.
                record, _ = await self._rollouts.submit(request, COMPAT_TENANT, digest=secrets.token_hex(16))
            except (Conflict, Forgotten):
                continue
            return record.job_id
        raise Overloaded("no free id was found", code="overloaded")

    async def _cancel(self, job_id: str, reason: str) -> None:
        try:
            await self._rollouts.cancel(job_id, COMPAT_TENANT, reason)
        except Overloaded as exc:
            # It ends now; that it was to end is not on the disk.
            log.warning("compat.unwritten", reason=exc.message)


def _place(record: JobRecord | None) -> str | None:
    """The counter of ``/status`` that a job counts for."""
    if record is None or record.state is JobState.DONE:
        return None
    if record.waiting_for in ("init", "run", "eval"):
        return f"{record.waiting_for}_queue"
    active = {JobState.QUEUED: "init_queue", JobState.INITIALISING: "active_init", JobState.RUNNING: "active_run"}
    return active.get(record.state, "active_eval")
