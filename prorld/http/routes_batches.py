"""The routes of batches: submit, append, look, follow, collect, acknowledge, cancel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType
from quart import Response

from prorld.domain.batch import BatchState
from prorld.errors import RequestError
from prorld.http.encode import answer, wants_msgpack
from prorld.http.holds import Holds
from prorld.http.incoming import NoParameters, digest, given
from prorld.http.routing import Call, NoBody, Route
from prorld.http.sse import EventQuery, bounded, resume_after, stream, wants_stream
from prorld.rollout.service import BatchService
from prorld.wire.batches import (
    AckAnswer,
    AckBatch,
    AppendAnswer,
    AppendInstances,
    BatchEvent,
    BatchEventPage,
    BatchGroupPage,
    BatchPage,
    BatchRecord,
    CancelBatch,
    PackedBatchGroupPage,
    SubmitBatch,
)

__all__ = ["BatchRoutes"]

PAGE_MAX: Final = 1000
GROUPS_MAX: Final = 500
_SEQ_MAX: Final = 2**62


class BatchQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of a list."""

    limit: Annotated[int, Meta(ge=1, le=500)] = 50
    next: Annotated[str, Meta(pattern="^[0-9]{1,18}$")] | UnsetType = UNSET


class GroupQuery(msgspec.Struct, frozen=True, kw_only=True):
    """What is wanted of accepted groups. The two bounds end an answer after at least one group."""

    after: Annotated[int, Meta(ge=0, le=_SEQ_MAX)] = 0
    wait_s: Annotated[float, Meta(ge=0, le=60)] = 0.0
    trajectories: bool = False
    instances: bool = False
    limit: Annotated[int, Meta(ge=1, le=GROUPS_MAX)] = 100
    max_bytes: Annotated[int, Meta(ge=1, le=1 << 30)] | UnsetType = UNSET


class _OfBatch:
    """The events of one batch as a source: a page at a time, read before it is asked for."""

    def __init__(self, service: BatchService, record: BatchRecord) -> None:
        self._service = service
        self._record = record
        self._page: Sequence[BatchEvent] = ()
        self._read_to = 0

    @property
    def last(self) -> int:
        return self._record.last_seq

    @property
    def is_over(self) -> bool:
        return self._record.state is not BatchState.RUNNING and self._read_to >= self._record.last_seq

    def after(self, seq: int, limit: int) -> tuple[Sequence[BatchEvent], int]:
        found = [event for event in self._page if event.seq > seq][:limit]
        return found, found[-1].seq if found else seq

    async def wait_after(self, seq: int) -> None:
        # Named by its own tenant: an admin's look may not change its meaning half way.
        try:
            await self._service.wait_news(self._record.batch_id, self._record.tenant, after=seq)
            await self.read(seq)
        except RequestError:
            # Forgotten while somebody follows it, or the journal can't be read: the reader comes back, and is told.
            self._page = ()
            self._read_to = self._record.last_seq
            self._record = msgspec.structs.replace(self._record, state=BatchState.CANCELLED)

    async def read(self, seq: int) -> None:
        """Have what comes after a number. Raises what the service does."""
        batch_id, tenant = self._record.batch_id, self._record.tenant
        self._record = await self._service.get(batch_id, tenant)
        self._page = await self._service.events(batch_id, tenant, after=seq, limit=PAGE_MAX)
        self._read_to = max(seq, self._page[-1].seq if self._page else 0)


class BatchRoutes:
    """Batches over HTTP. What a caller may see is the service's to say; the routes tell it who asks."""

    def __init__(self, service: BatchService, holds: Holds) -> None:
        self._service = service
        self._holds = holds

    def routes(self) -> list[Route[Any, Any]]:
        """The rows."""
        one = "/v1/batches/<batch_id>"
        return [
            Route(
                method="POST", path="/v1/batches", name="submit_batch",
                summary="Ask for groups of rollouts, as many as a training step needs",
                handler=self._submit, query=NoParameters, body=SubmitBatch,
                answers={201: BatchRecord, 200: BatchRecord}, errors=(404, 409, 410, 422, 429, 503),
            ),
            Route(
                method="GET", path="/v1/batches", name="list_batches", summary="Batches, newest first",
                handler=self._list, query=BatchQuery, body=NoBody, answers={200: BatchPage}, errors=(503,),
            ),
            Route(
                method="GET", path=one, name="get_batch", summary="What is known of a batch",
                handler=self._get, query=NoParameters, body=NoBody, answers={200: BatchRecord},
                errors=(404, 409, 410, 503),
            ),
            Route(
                method="POST", path=f"{one}/instances", name="append_instances",
                summary="Append prompts to a batch that runs", handler=self._append, query=NoParameters,
                body=AppendInstances, answers={200: AppendAnswer}, errors=(404, 409, 410, 422, 429, 503),
            ),
            Route(
                method="GET", path=f"{one}/events", name="get_batch_events",
                summary="The numbered events of a batch", handler=self._events, query=EventQuery, body=NoBody,
                answers={200: BatchEventPage, 204: None}, errors=(404, 409, 410, 503), streams=BatchEvent,
            ),
            Route(
                method="GET", path=f"{one}/groups", name="get_batch_groups",
                summary="The groups to train on, in order of acceptance", handler=self._groups, query=GroupQuery,
                body=NoBody, answers={200: BatchGroupPage}, packed=PackedBatchGroupPage, errors=(404, 409, 410, 503),
            ),
            Route(
                method="POST", path=f"{one}/ack", name="acknowledge_batch",
                summary="Say which groups are safe with the trainer", handler=self._acknowledge, query=NoParameters,
                body=AckBatch, answers={200: AckAnswer}, errors=(404, 409, 410, 422, 503),
            ),
            Route(
                method="POST", path=f"{one}/cancel", name="cancel_batch",
                summary="Begin the end of a batch, or of what an ended one left", handler=self._cancel,
                query=NoParameters, body=CancelBatch, optional_body=True, answers={202: BatchRecord},
                errors=(404, 409, 410, 503),
            ),
        ]  # fmt: skip

    async def _submit(self, call: Call[NoParameters, SubmitBatch]) -> Response:
        words, _ = await digest()
        record, is_new = await self._service.submit(call.body, call.caller.tenant, digest=words)
        return answer(record, 201 if is_new else 200)

    async def _list(self, call: Call[BatchQuery, NoBody]) -> Response:
        asked = call.query
        return answer(await self._service.list(call.tenant, limit=asked.limit, after=given(asked.next)))

    async def _get(self, call: Call[NoParameters, NoBody]) -> Response:
        return answer(await self._service.get(call.path["batch_id"], call.tenant))

    async def _append(self, call: Call[NoParameters, AppendInstances]) -> Response:
        return answer(await self._service.append(call.path["batch_id"], call.tenant, call.body))

    async def _events(self, call: Call[EventQuery, NoBody]) -> Response:
        asked = call.query
        # Told now, while there is a status to tell it with.
        source = _OfBatch(self._service, await self._service.get(call.path["batch_id"], call.tenant))
        after = resume_after(asked, source.last)
        await source.read(after)
        if wants_stream():
            return stream(source, after, self._holds, limit=given(asked.limit), max_bytes=given(asked.max_bytes))
        limit = given(asked.limit) or PAGE_MAX
        found, _ = source.after(after, limit)
        if asked.wait_s and not found and not source.is_over:
            await self._holds.hold(asked.wait_s, partial(source.wait_after, after))
            found, _ = source.after(after, limit)
        items = bounded(found, given(asked.max_bytes))
        more = len(items) < len(found) or len(items) == limit
        return answer(BatchEventPage(items=items, next=str(items[-1].seq) if more else None))

    async def _groups(self, call: Call[GroupQuery, NoBody]) -> Response:
        batch_id, asked = call.path["batch_id"], call.query
        fetch = partial(
            self._service.groups, batch_id, call.tenant, after=asked.after, limit=asked.limit,
            max_bytes=given(asked.max_bytes), trajectories=asked.trajectories, instances=asked.instances,
            packed=wants_msgpack(),
        )  # fmt: skip
        page = await fetch()
        if asked.wait_s and not page.items and not page.is_over:
            wait = partial(self._service.wait_news, batch_id, call.tenant, after=asked.after, groups=True)
            await self._holds.hold(asked.wait_s, wait)
            page = await fetch()
        return answer(page)

    async def _acknowledge(self, call: Call[NoParameters, AckBatch]) -> Response:
        return answer(await self._service.acknowledge(call.path["batch_id"], call.tenant, call.body))

    async def _cancel(self, call: Call[NoParameters, CancelBatch]) -> Response:
        return answer(await self._service.cancel(call.path["batch_id"], call.tenant, call.body.reason), 202)
