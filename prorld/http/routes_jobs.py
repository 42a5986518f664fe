"""The routes of jobs: submit, look, wait, cancel, trajectory, events."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta
from quart import Quart, Response

from prorld.domain.job import JobState
from prorld.errors import BadRequest, NotFound
from prorld.http.encode import answer
from prorld.http.holds import Holds
from prorld.http.incoming import NoParameters, body, caller, digest, query
from prorld.rollout.service import RolloutService
from prorld.wire.jobs import CancelAnswer, CancelJob, CancelJobs, JobEvent, JobEventPage, SubmitJob

__all__ = ["JobRoutes"]

WaitSeconds = Annotated[float, Meta(ge=0, le=60)]


class _Wait(msgspec.Struct, frozen=True, kw_only=True):
    wait_s: WaitSeconds = 0.0


class _Jobs(msgspec.Struct, frozen=True, kw_only=True):
    state: JobState | None = None
    handler: str | None = None
    group_id: str | None = None
    limit: Annotated[int, Meta(ge=1, le=500)] = 50
    next: Annotated[str, Meta(max_length=512)] | None = None


class _Events(msgspec.Struct, frozen=True, kw_only=True):
    after: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    wait_s: WaitSeconds = 0.0
    limit: Annotated[int, Meta(ge=1, le=1000)] = 1000


class JobRoutes:
    """Jobs over HTTP. What a caller may see is the service's to say; the routes tell it who asks."""

    def __init__(self, service: RolloutService, holds: Holds) -> None:
        self._service = service
        self._holds = holds

    def add_to(self, app: Quart) -> None:
        """Register the routes."""
        add = app.add_url_rule
        add("/v1/jobs", "submit_job", self._submit, methods=["POST"])
        add("/v1/jobs", "list_jobs", self._list, methods=["GET"])
        add("/v1/jobs/cancel", "cancel_jobs", self._cancel_many, methods=["POST"])
        add("/v1/jobs/<job_id>", "get_job", self._get, methods=["GET"])
        add("/v1/jobs/<job_id>/cancel", "cancel_job", self._cancel, methods=["POST"])
        add("/v1/jobs/<job_id>/trajectory", "get_trajectory", self._trajectory, methods=["GET"])
        add("/v1/jobs/<job_id>/events", "get_events", self._events, methods=["GET"])

    async def _submit(self) -> Response:
        query(NoParameters)
        request = await body(SubmitJob)
        record, is_new = await self._service.submit(request, caller().tenant, digest=await digest())
        return answer(record, 201 if is_new else 200)

    async def _list(self) -> Response:
        asked = query(_Jobs)
        page = self._service.list(
            caller().sees,
            state=asked.state,
            handler=asked.handler,
            group_id=asked.group_id,
            limit=asked.limit,
            after=asked.next,
        )
        return answer(page)

    async def _get(self, job_id: str) -> Response:
        asked, tenant = query(_Wait), caller().sees
        record = self._service.get(job_id, tenant)
        if asked.wait_s and record.state is not JobState.DONE:
            done = await self._holds.hold(asked.wait_s, partial(self._service.wait_done, job_id, tenant))
            record = done or self._service.get(job_id, tenant)
        return answer(record)

    async def _cancel(self, job_id: str) -> Response:
        query(NoParameters)
        asked = await body(CancelJob, optional=True)
        return answer(self._service.cancel(job_id, caller().sees, asked.reason), 202)

    async def _cancel_many(self) -> Response:
        query(NoParameters)
        asked = await body(CancelJobs)
        selectors = (asked.job_ids, asked.group_id, asked.batch_id)
        if sum(selector is not None for selector in selectors) != 1:
            message = "give exactly one of job_ids, group_id and batch_id"
            raise BadRequest(message, code="invalid_field", details={"path": "$"})
        if asked.batch_id is not None:
            raise NotFound("there is no such batch", code="unknown_batch")
        cancelling = await self._service.cancel_many(
            caller().sees, job_ids=asked.job_ids, group_id=asked.group_id, reason=asked.reason
        )
        return answer(CancelAnswer(cancelling=cancelling), 202)

    async def _trajectory(self, job_id: str) -> Response:
        query(NoParameters)
        return answer(self._service.trajectory(job_id, caller().sees))

    async def _events(self, job_id: str) -> Response:
        asked, tenant = query(_Events), caller().sees
        found = self._service.events(job_id, tenant, after=asked.after, limit=asked.limit)
        if asked.wait_s and not found:
            wait = partial(self._service.wait_event, job_id, tenant, after=asked.after)
            await self._holds.hold(asked.wait_s, wait)
            found = self._service.events(job_id, tenant, after=asked.after, limit=asked.limit)
        return answer(_page(list(found), asked.limit))


def _page(events: list[JobEvent], limit: int) -> JobEventPage:
    full = len(events) == limit
    return JobEventPage(items=events, next=str(events[-1].seq) if full else None)
