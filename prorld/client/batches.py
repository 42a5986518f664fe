"""Batches and their groups: every wait ends when the caller says, and none notices that the daemon was started again.

What is read is numbered, and the number of the last one is where reading goes on: after a lost connection, after a
restart of the daemon, after one of the trainer. So nothing is missed and nothing comes twice.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from prorld.client.caller import LONG_POLL_S, REQUEST_S, Caller, part, query
from prorld.client.errors import BAD_REPLY, NOTHING_NEW, ClientError
from prorld.client.http import JSON, MSGPACK
from prorld.domain.batch import BatchState
from prorld.wire.batches import (
    AckAnswer,
    AckBatch,
    AppendAnswer,
    AppendInstances,
    BatchEvent,
    BatchEventPage,
    BatchPage,
    BatchRecord,
    CancelBatch,
    PackedBatchGroup,
    PackedBatchGroupPage,
    SubmitBatch,
)

__all__ = ["APPEND_S", "AWAY_S", "BatchCalls"]

# How long a daemon may stay away, one that is started again or a window that is full, before a wait gives up.
AWAY_S = 300.0
APPEND_S = 600.0
# What one request carries; the daemon's own bound (``limits.body_bytes_max``) is several times that.
APPEND_COUNT_MAX = 1000
APPEND_BYTES_MAX = 8 << 20
# One answer with trajectories: large enough to be quick, small enough to be held twice.
GROUPS_BYTES_MAX = 64 << 20
END = "batch.end"
OFFSET_TAKEN = "offset_taken"
_ID_BYTES = 10


class _Page(Protocol):
    @property
    def items(self) -> Sequence[Any]: ...


PageT = TypeVar("PageT", bound=_Page)


class BatchCalls:
    """The part of the client that is about batches."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._call = caller.call

    def submit_batch(self, batch: SubmitBatch) -> BatchRecord:
        """Ask for groups. Without an id it gets one here, so that a repeat after a lost reply is the same batch."""
        if batch.batch_id is None:
            batch = msgspec.structs.replace(batch, batch_id=f"batch-{secrets.token_hex(_ID_BYTES)}")
        return self._call("POST", "/v1/batches", BatchRecord, body=batch)

    def batch(self, batch_id: str) -> BatchRecord:
        """What is known of a batch now."""
        return self._call("GET", _path(batch_id), BatchRecord)

    def batches(self, *, limit: int = 50, after: str | None = None) -> BatchPage:
        """One page of batches, newest first; ``after`` is the ``next`` of the page before."""
        return self._call("GET", f"/v1/batches{query(limit=limit, next=after)}", BatchPage)

    def cancel_batch(self, batch_id: str, *, reason: str | None = None) -> BatchRecord:
        """End a batch and whatever runs for it, or what an ended one left; groups that were accepted stay."""
        body = CancelBatch() if reason is None else CancelBatch(reason=reason)
        return self._call("POST", _path(batch_id, "cancel"), BatchRecord, body=body)

    def append_instances(
        self,
        batch_id: str,
        instances: Sequence[dict[str, Any]],
        *,
        offset: int | None = None,
        last: bool = False,
        within_s: float = APPEND_S,
    ) -> int:
        """Give a batch more prompts, in as many requests as it takes; where the next ones begin.

        ``offset`` is how many it got before. Whoever counts itself may repeat a call, after a crash, too: what is in
        already is not taken twice. ``None`` is the end of what the daemon has. ``within_s`` is how long all of it may
        wait while the window is full or the daemon is away; with ``last`` there will be no more.
        """
        until = time.monotonic() + within_s
        at = self.batch(batch_id).next_offset if offset is None else offset
        parts = deque(_parts(instances) or [[]])
        while parts:
            some = parts.popleft()
            body = AppendInstances(offset=at, instances=some, last=last and not parts)
            left = max(0.0, until - time.monotonic())
            try:
                answer = self._call("POST", _path(batch_id, "instances"), AppendAnswer, body=body, patience_s=left)
            except ClientError as exc:
                known = _known_of(exc, at, len(some))
                if known is None:
                    raise
                # An earlier call ended in the middle of these. What it brought is sent again, to be compared.
                parts.extendleft([some[known:], some[:known]])
                continue
            at += len(some)
            if answer.next_offset < at:
                message = f"batch {batch_id} has {answer.next_offset} instances where {at} were sent"
                raise ClientError(message, code=BAD_REPLY)
        return at

    def ack(self, batch_id: str, through: int, *, discard: Sequence[str] = (), away_s: float = AWAY_S) -> AckAnswer:
        """Everything up to this number is safe with the trainer: the daemon may forget it. A repeat does no harm."""
        body = AckBatch(through=through, discard=[*discard])
        return self._call("POST", _path(batch_id, "ack"), AckAnswer, body=body, patience_s=away_s)

    def groups(
        self,
        batch_id: str,
        *,
        after: int | None = None,
        trajectories: bool = False,
        instances: bool = False,
        ack: bool = False,
        within_s: float | None = None,
        away_s: float = AWAY_S,
        limit: int | None = None,
        max_bytes: int = GROUPS_BYTES_MAX,
    ) -> Generator[PackedBatchGroup, None, None]:
        """The groups to train on, in order of acceptance, each once; ends when the batch has no more.

        ``after`` is the ``seq`` of the last one that the caller has; ``None`` goes on after what is acknowledged. With
        ``ack`` a group is acknowledged when the next one is asked for. ``within_s`` bounds the wait of a daemon that
        answers for one group (``ClientError`` ``nothing_new``, and the same call goes on later; 0 waits for nothing),
        ``away_s`` how long the daemon may be gone.
        """
        if after is None:
            after = self._call("GET", _path(batch_id), BatchRecord, patience_s=away_s).acknowledged
        fields: dict[str, Any] = {"limit": limit, "max_bytes": max_bytes}
        fields |= {"trajectories": "true"} if trajectories else {}
        fields |= {"instances": "true"} if instances else {}
        pages = self._pages(batch_id, "groups", PackedBatchGroupPage, after, fields, within_s, away_s, accept=MSGPACK)
        for page, new in pages:
            for group in new:
                yield group
                if ack:
                    self.ack(batch_id, group.seq, away_s=away_s)
            if page.is_over and page.next is None:
                return

    def batch_events(
        self, batch_id: str, *, after: int = 0, within_s: float | None = None, away_s: float = AWAY_S
    ) -> Generator[BatchEvent, None, None]:
        """Everything that happens in a batch after a number, each once and in order; ``batch.end`` is the last.

        ``within_s`` and ``away_s`` are those of ``groups``.
        """
        for _, new in self._pages(batch_id, "events", BatchEventPage, after, {}, within_s, away_s):
            for event in new:
                yield event
                if event.event == END:
                    return
            if not new and self._is_over(batch_id, after, away_s):
                return
            after = new[-1].seq if new else after

    def _is_over(self, batch_id: str, after: int, away_s: float) -> bool:
        """Whether a caller that had the end already asks for what comes after it."""
        record = self._call("GET", _path(batch_id), BatchRecord, patience_s=away_s)
        return record.state is not BatchState.RUNNING and record.last_seq <= after

    def _pages(
        self,
        batch_id: str,
        what: str,
        kind: type[PageT],
        after: int,
        fields: dict[str, Any],
        within_s: float | None,
        away_s: float,
        *,
        accept: str = JSON,
    ) -> Iterator[tuple[PageT, list[Any]]]:
        """Long-polls from where it is; each page with what is new of it."""
        since = time.monotonic()
        # One that is started again takes its time, however little of the wait for something new is left.
        patience_s = 0.0 if within_s == 0 else away_s
        while True:
            left = float("inf") if within_s is None else max(0.0, since + within_s - time.monotonic())
            wait_s = min(LONG_POLL_S, left)
            path = _path(batch_id, what) + query(after=after, wait_s=f"{wait_s:.3f}", **fields)
            page = self._call("GET", path, kind, within_s=wait_s + REQUEST_S, accept=accept, patience_s=patience_s)
            new = [item for item in page.items if item.seq > after]
            if new:
                after = new[-1].seq
            yield page, new
            if new:
                # What the caller did with these is no wait of ours.
                since = time.monotonic()
            elif within_s is not None and time.monotonic() - since >= within_s:
                message = f"nothing new of batch {batch_id} within {within_s:g} s"
                raise ClientError(message, code=NOTHING_NEW, retryable=True)


def _path(batch_id: str, *more: str) -> str:
    return "/".join(["/v1/batches", part(batch_id), *more])


def _known_of(refusal: ClientError, at: int, count: int) -> int | None:
    """How many of these prompts the batch has, where it is some of them."""
    expected = (refusal.details or {}).get("expected_offset")
    if refusal.stable_code != OFFSET_TAKEN or not isinstance(expected, int) or not at < expected < at + count:
        return None
    return expected - at


def _parts(instances: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    parts: list[list[dict[str, Any]]] = []
    size = 0
    for instance in instances:
        more = len(msgspec.json.encode(instance))
        if not parts or len(parts[-1]) >= APPEND_COUNT_MAX or size + more > APPEND_BYTES_MAX:
            parts.append([])
            size = 0
        parts[-1].append(instance)
        size += more
    return parts
