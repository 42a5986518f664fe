"""The routes of events: of one job, and of everything that the caller may see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from quart import Response

from prorld.http.encode import answer
from prorld.http.holds import Holds
from prorld.http.incoming import given
from prorld.http.routing import Call, NoBody, Route
from prorld.http.sse import EventQuery, NumberedT, Source, bounded, resume_after, stream, wants_stream
from prorld.rollout.service import FeedService, JobEventService, RolloutService
from prorld.wire.events import Event, EventPage, JobEvent, JobEventPage

__all__ = ["EventRoutes"]

PAGE_MAX: Final = 1000


class _OfJob:
    """The events of one job as a source."""

    def __init__(self, events: JobEventService) -> None:
        self._events = events

    @property
    def last(self) -> int:
        return self._events.last

    @property
    def is_over(self) -> bool:
        return self._events.is_over

    def after(self, seq: int, limit: int) -> tuple[Sequence[JobEvent], int]:
        found = self._events.after(seq, limit)
        return found, found[-1].seq if found else seq

    async def wait_after(self, seq: int) -> None:
        await self._events.wait_after(seq)


class _OfAll:
    """The events of the daemon as a source."""

    is_over = False

    def __init__(self, feed: FeedService, tenant: str | None) -> None:
        self._feed = feed
        self._tenant = tenant

    @property
    def last(self) -> int:
        return self._feed.last

    def after(self, seq: int, limit: int) -> tuple[Sequence[Event], int]:
        return self._feed.after(seq, limit, self._tenant)

    async def wait_after(self, seq: int) -> None:
        await self._feed.wait_after(seq, self._tenant)


class EventRoutes:
    """Events over HTTP."""

    def __init__(self, service: RolloutService, holds: Holds) -> None:
        self._service = service
        self._holds = holds

    def routes(self) -> list[Route[EventQuery, NoBody]]:
        """The rows."""
        return [
            Route(
                method="GET", path="/v1/jobs/<job_id>/events", name="get_job_events",
                summary="The numbered events of a job", handler=self._of_job,
                query=EventQuery, body=NoBody, answers={200: JobEventPage, 204: None}, errors=(404, 410, 503),
                streams=JobEvent,
            ),
            Route(
                method="GET", path="/v1/events", name="get_events",
                summary="The latest events of everything that the caller may see", handler=self._of_all,
                query=EventQuery, body=NoBody, answers={200: EventPage}, errors=(503,), streams=Event,
            ),
        ]  # fmt: skip

    async def _of_job(self, call: Call[EventQuery, NoBody]) -> Response:
        # Found now, while there is a status to say with that it is not there.
        source = _OfJob(await self._service.follow(call.path["job_id"], call.tenant))
        after = resume_after(call.query, source.last)
        if wants_stream():
            return self._stream(source, after, call.query)
        items, _, more = await self._page(source, after, call.query)
        return answer(JobEventPage(items=items, next=str(items[-1].seq) if more else None))

    async def _of_all(self, call: Call[EventQuery, NoBody]) -> Response:
        source = _OfAll(self._service.feed, call.tenant)
        after = resume_after(call.query, source.last)
        if wants_stream():
            return self._stream(source, after, call.query)
        items, upto, more = await self._page(source, after, call.query)
        last = items[-1].seq if more else upto
        return answer(EventPage(items=items, last=last, next=str(last) if more else None))

    def _stream(self, source: Source[NumberedT], after: int, asked: EventQuery) -> Response:
        return stream(source, after, self._holds, limit=given(asked.limit), max_bytes=given(asked.max_bytes))

    async def _page(
        self, source: Source[NumberedT], after: int, asked: EventQuery
    ) -> tuple[list[NumberedT], int, bool]:
        """One page, the number up to which its sequence was read, and whether a bound cut it."""
        limit = given(asked.limit) or PAGE_MAX

        async def wait() -> None:
            await source.wait_after(after)

        found, upto = source.after(after, limit)
        if asked.wait_s and not found and not source.is_over:
            await self._holds.hold(asked.wait_s, wait)
            found, upto = source.after(after, limit)
        items = bounded(found, given(asked.max_bytes))
        return items, upto, len(items) < len(found) or len(items) == limit
