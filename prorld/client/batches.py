"""Batches and their groups: every wait ends when the caller says, and none notices that the daemon was started again.

What is read is numbered, and the number of the last one is where reading goes on: after a lost connection, after a
restart of the daemon, after one of the trainer. So nothing is missed and nothing comes twice.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from prorld.client.caller import AWAY_S, LONG_POLL_S, REQUEST_S, Caller, Calls, part, query
from prorld.client.errors import BAD_REPLY, NOTHING_NEW, ClientError
from prorld.client.flows import Feed, Flow, Item, both, each
from prorld.client.http import JSON, MSGPACK
from prorld.client.progress import progress_of
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


class BatchCalls(Calls):
    """The part of the client that is about batches."""

    @both
    def submit_batch(self, batch: SubmitBatch) -> Flow[BatchRecord]:
        """Ask for groups. Without an id it gets one here, so that a repeat after a lost reply is the same batch."""
        if batch.batch_id is None:
            batch = msgspec.structs.replace(batch, batch_id=f"batch-{secrets.token_hex(_ID_BYTES)}")
        return self._call("POST", "/v1/batches", BatchRecord, body=batch)

    @both
    def batch(self, batch_id: str) -> Flow[BatchRecord]:
        """What is known of a batch now."""
        return self._call("GET", _path(batch_id), BatchRecord)

    @both
    def batches(self, *, limit: int = 50, after: str | None = None) -> Flow[BatchPage]:
        """One page of batches, newest first; ``after`` is the ``next`` of the page before."""
        return self._call("GET", f"/v1/batches{query(limit=limit, next=after)}", BatchPage)

    @both
    def cancel_batch(self, batch_id: str, *, reason: str | None = None) -> Flow[BatchRecord]:
        """End a batch and whatever runs for it, or what an ended one left; groups that were accepted stay."""
        body = CancelBatch() if reason is None else CancelBatch(reason=reason)
        return self._call("POST", _path(batch_id, "cancel"), BatchRecord, body=body)

    @both
    def append_instances(
        self,
        batch_id: str,
        instances: Sequence[dict[str, Any]],
        *,
        offset: int | None = None,
        last: bool = False,
        within_s: float = APPEND_S,
    ) -> Flow[int]:
        """Give a batch more prompts, in as many requests as it takes; where the next ones begin.

        ``offset`` is how many it got before. Whoever counts itself may repeat a call, after a crash, too: what is in
        already is not taken twice. ``None`` is the end of what the daemon has. ``within_s`` is how long all of it may
        wait while the window is full or the daemon is away; with ``last`` there will be no more.
        """
        until = time.monotonic() + within_s
        if offset is None:
            offset = (yield from self._call("GET", _path(batch_id), BatchRecord)).next_offset
        at = offset
        parts = deque(_parts(instances) or [[]])
        while parts:
            some = parts.popleft()
            body = AppendInstances(offset=at, instances=some, last=last and not parts)
            left = max(0.0, until - time.monotonic())
            try:
                path = _path(batch_id, "instances")
                answer = yield from self._call("POST", path, AppendAnswer, body=body, patience_s=left)
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

    @both
    def ack(
        self, batch_id: str, through: int, *, discard: Sequence[str] = (), away_s: float = AWAY_S
    ) -> Flow[AckAnswer]:
        """Everything up to this number is safe with the trainer: the daemon may forget it. A repeat does no harm."""
        return self._acked(batch_id, through, discard, away_s)

    def _acked(self, batch_id: str, through: int, discard: Sequence[str], away_s: float) -> Flow[AckAnswer]:
        body = AckBatch(through=through, discard=[*discard])
        return self._call("POST", _path(batch_id, "ack"), AckAnswer, body=body, patience_s=away_s)

    @each
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
    ) -> Feed[PackedBatchGroup]:
        """The groups to train on, in order of acceptance, each once; ends when the batch has no more.

        ``after`` is the ``seq`` of the last one that the caller has; ``None`` goes on after what is acknowledged. With
        ``ack`` a group is acknowledged when the next one is asked for. ``within_s`` bounds the wait of a daemon that
        answers for one group (``ClientError`` ``nothing_new``, and the same call goes on later; 0 waits for nothing),
        ``away_s`` how long the daemon may be gone.
        """
        if after is None:
            after = (yield from self._call("GET", _path(batch_id), BatchRecord, patience_s=away_s)).acknowledged
        fields: dict[str, Any] = {"limit": limit, "max_bytes": max_bytes}
        fields |= {"trajectories": "true"} if trajectories else {}
        fields |= {"instances": "true"} if instances else {}
        pages = _Pages(self._caller, batch_id, "groups", PackedBatchGroupPage, after, fields, within_s, away_s, MSGPACK)
        with progress_of(batch_id, wanted=self._progress) as progress:
            while True:
                if progress.is_due:
                    progress.show((yield from self._call("GET", _path(batch_id), BatchRecord, patience_s=away_s)))
                page, new = yield from pages.next(progress.look_s)
                for group in new:
                    progress.clear()
                    yield Item(group)
                    if ack:
                        yield from self._acked(batch_id, group.seq, (), away_s)
                if page.is_over and page.next is None:
                    return

    @each
    def batch_events(
        self, batch_id: str, *, after: int = 0, within_s: float | None = None, away_s: float = AWAY_S
    ) -> Feed[BatchEvent]:
        """Everything that happens in a batch after a number, each once and in order; ``batch.end`` is the last.

        ``within_s`` and ``away_s`` are those of ``groups``.
        """
        pages = _Pages(self._caller, batch_id, "events", BatchEventPage, after, {}, within_s, away_s, JSON)
        while True:
            _, new = yield from pages.next()
            for event in new:
                yield Item(event)
                if event.event == END:
                    return
            if not new:
                # A caller that had the end already may ask for what comes after it.
                record = yield from self._call("GET", _path(batch_id), BatchRecord, patience_s=away_s)
                if record.state is not BatchState.RUNNING and record.last_seq <= pages.after:
                    return


class _Pages(Generic[PageT]):
    """Long-polls from where it is; each page with what is new of it."""

    def __init__(
        self,
        caller: Caller,
        batch_id: str,
        what: str,
        kind: type[PageT],
        after: int,
        fields: dict[str, Any],
        within_s: float | None,
        away_s: float,
        accept: str,
    ) -> None:
        self.after = after
        self._caller, self._batch_id, self._path, self._kind = caller, batch_id, _path(batch_id, what), kind
        self._fields, self._within_s, self._accept = fields, within_s, accept
        # One that is started again takes its time, however little of the wait for something new is left.
        self._patience_s = 0.0 if within_s == 0 else away_s
        self._since: float | None = None
        # Told when more is asked for: what came last may have been the end.
        self._is_late = False

    def next(self, look_s: float = LONG_POLL_S) -> Flow[tuple[PageT, list[Any]]]:
        """The next page, empty after ``look_s``. Raises ``ClientError`` when nothing new came for too long."""
        if self._is_late:
            message = f"nothing new of batch {self._batch_id} within {self._within_s:g} s"
            raise ClientError(message, code=NOTHING_NEW, retryable=True)
        # What the caller did with what was new is no wait of ours.
        since = self._since = time.monotonic() if self._since is None else self._since
        left = float("inf") if self._within_s is None else max(0.0, since + self._within_s - time.monotonic())
        wait_s = min(LONG_POLL_S, look_s, left)
        path = self._path + query(after=self.after, wait_s=f"{wait_s:.3f}", **self._fields)
        page = yield from self._caller.call(
            "GET", path, self._kind, within_s=wait_s + REQUEST_S, accept=self._accept, patience_s=self._patience_s
        )
        new = [item for item in page.items if item.seq > self.after]
        if new:
            self.after = new[-1].seq
            self._since = None
        self._is_late = not new and self._within_s is not None and time.monotonic() - since >= self._within_s
        return page, new


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
