"""The routes of jobs: submit, look, wait, cancel, requeue, trajectory."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType
from quart import Response

from prorld.domain.job import JobState
from prorld.errors import Overloaded
from prorld.export.formats import export
from prorld.export.names import Format
from prorld.http.encode import answer, wants_msgpack
from prorld.http.holds import Holds
from prorld.http.incoming import NoParameters, digest, given
from prorld.http.routing import Call, NoBody, Route
from prorld.kit.lanes import Lane
from prorld.rollout.service import BatchService, RolloutService
from prorld.wire.jobs import CancelAnswer, CancelJob, CancelJobs, JobPage, JobRecord, RequeueJob, SubmitJob
from prorld.wire.trajectory import ExportedTrajectory, PackedTrajectory, Trajectory

__all__ = ["JobRoutes", "Wait"]

EXPORT_THREADS: Final = 1


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """``wait_s`` holds the request until there is an end to tell of, at most so long."""

    wait_s: Annotated[float, Meta(ge=0, le=60)] = 0.0


class JobQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Filters of a list; all that are given have to fit."""

    state: JobState | UnsetType = UNSET
    handler: Annotated[str, Meta(max_length=128)] | UnsetType = UNSET
    group_id: Annotated[str, Meta(max_length=128)] | UnsetType = UNSET
    limit: Annotated[int, Meta(ge=1, le=500)] = 50
    next: Annotated[str, Meta(pattern="^[0-9]{1,18}$")] | UnsetType = UNSET


class TrajectoryQuery(msgspec.Struct, frozen=True, kw_only=True):
    """``format`` asks for the rows of a trainer in place of the document."""

    format: Format | UnsetType = UNSET


class JobRoutes:
    """Jobs over HTTP. What a caller may see is the service's to say; the routes tell it who asks."""

    def __init__(self, service: RolloutService, batches: BatchService, holds: Holds) -> None:
        self._service = service
        self._batches = batches
        self._holds = holds
        # Rows of long trajectories are made of many small things, between which the loop has its turn.
        self._exports = Lane("export", EXPORT_THREADS)

    def routes(self) -> list[Route[Any, Any]]:
        """The rows."""
        return [
            Route(
                method="POST", path="/v1/jobs", name="submit_job", summary="Hand in one rollout of one instance",
                handler=self._submit, query=Wait, body=SubmitJob,
                answers={201: JobRecord, 200: JobRecord}, errors=(409, 410, 422, 503),
            ),
            Route(
                method="GET", path="/v1/jobs", name="list_jobs", summary="Jobs, newest first",
                handler=self._list, query=JobQuery, body=NoBody, answers={200: JobPage},
            ),
            Route(
                method="POST", path="/v1/jobs/cancel", name="cancel_jobs", summary="Begin the end of many jobs",
                handler=self._cancel_many, query=NoParameters, body=CancelJobs,
                answers={202: CancelAnswer}, errors=(404,),
            ),
            Route(
                method="GET", path="/v1/jobs/<job_id>", name="get_job", summary="A job's record",
                handler=self._get, query=Wait, body=NoBody, answers={200: JobRecord}, errors=(404, 410, 503),
            ),
            Route(
                method="POST", path="/v1/jobs/<job_id>/cancel", name="cancel_job", summary="Begin the end of a job",
                handler=self._cancel, query=NoParameters, body=CancelJob, optional_body=True,
                answers={202: JobRecord}, errors=(404, 410),
            ),
            Route(
                method="POST", path="/v1/jobs/<job_id>/requeue", name="requeue_job",
                summary="Run an ended job again, as a new job", handler=self._requeue,
                query=NoParameters, body=RequeueJob, optional_body=True,
                answers={201: JobRecord, 200: JobRecord}, errors=(404, 409, 410, 422, 503),
            ),
            Route(
                method="GET", path="/v1/jobs/<job_id>/trajectory", name="get_trajectory",
                summary="The trajectory of a job that is done", handler=self._trajectory,
                query=TrajectoryQuery, body=NoBody, answers={200: Trajectory}, packed=PackedTrajectory,
                otherwise=ExportedTrajectory,
                errors=(404, 409, 410),
            ),
        ]  # fmt: skip

    async def _submit(self, call: Call[Wait, SubmitJob]) -> Response:
        words, size_bytes = await digest()
        record, is_new = await self._service.submit(call.body, call.caller.tenant, digest=words, size_bytes=size_bytes)
        wait_s, tenant = call.query.wait_s, call.caller.tenant
        if wait_s and record.state is not JobState.DONE:
            # The daemon may be going away. The job is accepted all the same, and the answer must not say otherwise.
            with suppress(Overloaded):
                done = await self._holds.hold(wait_s, partial(self._service.wait_done, record.job_id, tenant))
                record = done or await self._service.get(record.job_id, tenant)
        return answer(record, 201 if is_new else 200)

    async def _list(self, call: Call[JobQuery, NoBody]) -> Response:
        asked = call.query
        page = await self._service.list(
            call.tenant,
            state=given(asked.state),
            handler=given(asked.handler),
            group_id=given(asked.group_id),
            limit=asked.limit,
            after=given(asked.next),
        )
        return answer(page)

    async def _get(self, call: Call[Wait, NoBody]) -> Response:
        job_id, wait_s = call.path["job_id"], call.query.wait_s
        record = await self._service.get(job_id, call.tenant)
        if wait_s and record.state is not JobState.DONE:
            done = await self._holds.hold(wait_s, partial(self._service.wait_done, job_id, call.tenant))
            record = done or await self._service.get(job_id, call.tenant)
        return answer(record)

    async def _cancel(self, call: Call[NoParameters, CancelJob]) -> Response:
        return answer(await self._service.cancel(call.path["job_id"], call.tenant, call.body.reason), 202)

    async def _cancel_many(self, call: Call[NoParameters, CancelJobs]) -> Response:
        asked = call.body
        if isinstance(asked.batch_id, str):
            cancelling = await self._batches.cancel_jobs(asked.batch_id, call.tenant, asked.reason)
            return answer(CancelAnswer(cancelling=cancelling), 202)
        cancelling = await self._service.cancel_many(
            call.tenant, job_ids=given(asked.job_ids), group_id=given(asked.group_id), reason=asked.reason
        )
        return answer(CancelAnswer(cancelling=cancelling), 202)

    async def _requeue(self, call: Call[NoParameters, RequeueJob]) -> Response:
        record, is_new = await self._service.requeue(call.path["job_id"], call.tenant, call.body.job_id)
        return answer(record, 201 if is_new else 200)

    async def _trajectory(self, call: Call[TrajectoryQuery, NoBody]) -> Response:
        form = call.query.format
        if isinstance(form, str):
            document = await self._service.trajectory(call.path["job_id"], call.tenant)
            rows = await self._exports.run(export, document, form, abandon_on_cancel=True)
            job_id, verdict = document.job.job_id, document.verdict
            return answer(ExportedTrajectory(format=form, job_id=job_id, verdict=verdict, rows=rows))
        fetch = self._service.packed_trajectory if wants_msgpack() else self._service.trajectory
        return answer(await fetch(call.path["job_id"], call.tenant))
