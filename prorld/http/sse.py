"""Numbered events as a response: a page, a long poll, or a stream of Server-Sent Events.

A reader has no buffer here. It asks for what comes after its number, so one that is slow holds nothing up, and the
connection's own bound on sending cuts one that has stopped. Streams end with what they tell of, and when the room
closes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence
from functools import partial
from types import TracebackType
from typing import Annotated, Final, Generic, Protocol, Self, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType
from quart import Response, request
from quart.wrappers.response import ResponseBody
from quart_trio.wrappers import TrioResponse

from prorld.errors import BadRequest, Overloaded
from prorld.http.encode import empty, wants_msgpack
from prorld.http.holds import Holds
from prorld.http.negotiate import EVENT_STREAM, JSON, MSGPACK, preferred
from prorld.wire.codec import encode, encode_msgpack

__all__ = ["EventQuery", "Source", "bounded", "resume_after", "stream", "wants_stream"]

HEARTBEAT_S: Final = 15.0
# What one turn of the loop writes; the peer's window bounds what is on its way.
BATCH_MAX: Final = 256
_SEQ_MAX: Final = 2**63 - 1
_HEARTBEAT: Final = b": still there\n\n"


class Numbered(Protocol):
    """What has a place in a sequence, and a name."""

    @property
    def seq(self) -> int:
        """Its number."""
        ...

    @property
    def event(self) -> str:
        """What happened."""
        ...


NumberedT = TypeVar("NumberedT", bound=Numbered)
NumberedT_co = TypeVar("NumberedT_co", bound=Numbered, covariant=True)


class EventQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of every ``/events``. The two bounds end an answer, and a stream, after at least one event."""

    after: Annotated[int, Meta(ge=-1, le=_SEQ_MAX)] = 0
    wait_s: Annotated[float, Meta(ge=0, le=60)] = 0.0
    limit: Annotated[int, Meta(ge=1, le=1000)] | UnsetType = UNSET
    max_bytes: Annotated[int, Meta(ge=1, le=1 << 30)] | UnsetType = UNSET


class Source(Protocol, Generic[NumberedT_co]):
    """One sequence, as one reader sees it."""

    @property
    def last(self) -> int:
        """The highest number so far."""
        ...

    def after(self, seq: int, limit: int) -> tuple[Sequence[NumberedT_co], int]:
        """Events after a number, and the number up to which that is everything."""
        ...

    async def wait_after(self, seq: int) -> None:
        """Wait until there is one, or there will be none."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether there will be no other one."""
        ...


def wants_stream() -> bool:
    """Whether the client asks for Server-Sent Events."""
    return preferred(request.headers.get("Accept"), (JSON, MSGPACK, EVENT_STREAM)) == EVENT_STREAM


def resume_after(asked: EventQuery, last: int) -> int:
    """The number to go on after: what a reconnecting stream saw last, else the parameter; -1 is now."""
    seen = request.headers.get("Last-Event-ID")
    if seen is None or not seen.strip():
        return last if asked.after == -1 else asked.after
    if not (seen.isascii() and seen.isdigit() and int(seen) <= _SEQ_MAX):
        raise BadRequest("Last-Event-ID is no number of ours", code="invalid_field", details={"path": "Last-Event-ID"})
    return int(seen)


def bounded(events: Sequence[NumberedT], max_bytes: int | None) -> list[NumberedT]:
    """As many from the front as fit, and at least one. Sizes are those of the form that is sent."""
    if max_bytes is None:
        return list(events)
    write = encode_msgpack if wants_msgpack() else encode
    taken: list[NumberedT] = []
    for event in events:
        max_bytes -= len(write(event)) + 1
        if taken and max_bytes < 0:
            break
        taken.append(event)
    return taken


def stream(source: Source[NumberedT], after: int, hold: Holds, *, limit: int | None, max_bytes: int | None) -> Response:
    """Everything after a number, as it happens. One that is over and has nothing left is 204: do not come back."""
    if source.is_over and not source.after(after, 1)[0]:
        return empty()
    response = TrioResponse(
        _Written(source, after, hold, limit=limit, max_bytes=max_bytes),
        content_type=EVENT_STREAM,
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )
    response.timeout = None
    return response


class _Written(ResponseBody, Generic[NumberedT]):
    """The bytes of a stream, piece by piece. Nothing is held between two pieces, so it may be left at any of them."""

    def __init__(
        self, source: Source[NumberedT], after: int, holds: Holds, *, limit: int | None, max_bytes: int | None
    ) -> None:
        self._source = source
        self._seq = after
        self._holds = holds
        self._limit = limit
        self._max_bytes = max_bytes
        self._ready: deque[bytes] = deque()
        self._sent = 0
        self._size = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """There is nothing to close."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        while not self._ready:
            if self._sent == self._limit:
                raise StopAsyncIteration
            # Asked before the events are read: what comes between the two is seen in the next round.
            is_over = self._source.is_over
            events, self._seq = self._source.after(self._seq, BATCH_MAX)
            self._ready.extend(_text(event) for event in events)
            if not events and (is_over or not await self._news()):
                raise StopAsyncIteration
        return self._within_bounds(self._ready.popleft())

    def _within_bounds(self, text: bytes) -> bytes:
        self._size += len(text)
        if self._sent and self._max_bytes is not None and self._size > self._max_bytes:
            raise StopAsyncIteration
        self._sent += text is not _HEARTBEAT
        if self._sent == self._limit:
            self._ready.clear()
        return text

    async def _news(self) -> bool:
        """Wait for news or the next heartbeat; whether the stream goes on."""
        try:
            await self._holds.hold(HEARTBEAT_S, partial(self._source.wait_after, self._seq))
        except Overloaded:
            # The head of the answer is long gone. The client comes back with the last number it saw.
            return False
        if not self._source.is_over and not self._source.after(self._seq, 1)[0]:
            self._ready.append(_HEARTBEAT)
        return True


def _text(event: Numbered) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event.seq, event.event.encode(), encode(event))
