"""Numbered events, gapless and bounded, with a wake-up for whoever follows them: of one job, and of all of them.

Emitting never blocks and no reader has a buffer of its own. Who falls so far behind that events are gone is told with
a gap event in their place. What a job's log shows is on the disk, so a number never means two things.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, takewhile
from typing import Any

import msgspec
import trio

from prorld.rollout.clock import Clock
from prorld.wire.events import GAP, Event, JobEvent

__all__ = ["EVENTS_KEPT_MAX", "FEED_KEPT_MAX", "EventLog", "Feed"]

# A rollout of 500 turns makes about 510 events; what is older than the last of these is in the log.
EVENTS_KEPT_MAX = 1024
# About 12 events a rollout and 400 bytes an event: the last thousands of rollouts, in 25 MB.
FEED_KEPT_MAX = 65_536


class EventLog:
    """The events of one job. An event has its number when it happens, and is seen once it is written.

    ``grew`` is told that there is something to write, and whoever writes it calls ``show``; without one, what happens
    is seen at once. ``tell`` hears of each event as it is shown. Neither may block.
    """

    def __init__(
        self,
        *,
        kept_max: int = EVENTS_KEPT_MAX,
        tell: Callable[[JobEvent], None] | None = None,
        grew: Callable[[], None] | None = None,
        past: Sequence[JobEvent] = (),
    ) -> None:
        """``past`` are events of earlier lives of the daemon; they were written, and told to whoever listened."""
        self._kept: deque[JobEvent] = deque(past, maxlen=kept_max)
        self._newest = self._kept[-1].seq if self._kept else 0
        self._last = self._newest
        self._changed: trio.Event | None = None
        self._tell = tell
        self._grew = grew
        self._over = False

    @property
    def last(self) -> int:
        """The highest sequence number that is seen so far; 0 before the first event."""
        return self._last

    @property
    def newest(self) -> int:
        """The highest sequence number that was given."""
        return self._newest

    @property
    def is_over(self) -> bool:
        """Whether no other event will be seen."""
        return self._over

    @property
    def kept(self) -> list[JobEvent]:
        """The events that are still there, those that are not seen yet as well."""
        return list(self._kept)

    @property
    def unseen(self) -> list[JobEvent]:
        """The events that are still to be written."""
        return self._since(self._last)

    def emit(self, event: str, at: str, **data: Any) -> None:
        """Number and keep an event. Never blocks."""
        self._newest += 1
        self._kept.append(JobEvent(seq=self._newest, event=event, at=at, data=data))
        if self._grew is None:
            self.show(self._newest)
        else:
            self._grew()

    def amend(self, **data: Any) -> None:
        """The newest event, which nobody has seen, says this instead."""
        assert self._newest > self._last
        self._kept[-1] = msgspec.structs.replace(self._kept[-1], data=data)

    def show(self, upto: int, *, is_end: bool = False) -> None:
        """What has happened up to this number is written, and seen from now on. Never blocks."""
        fresh, self._last = self.unseen, max(self._last, upto)
        self._over = self._over or is_end
        if self._changed is not None:
            self._changed.set()
            self._changed = None
        if self._tell is not None:
            for event in fresh:
                if event.seq <= upto:
                    self._tell(event)

    def after(self, seq: int, limit: int) -> Sequence[JobEvent]:
        """Events with a higher number, oldest first; a gap in the place of those that are gone."""
        seen = [event for event in self._since(seq) if event.seq <= self._last]
        gone = min(self._kept[0].seq - 1 if self._kept else self._newest, self._last)
        if seq >= gone:
            return seen[:limit]
        gap = JobEvent(seq=gone, event=GAP, at=self._kept[0].at, data=_missed(seq, gone))
        return [gap, *seen[: limit - 1]]

    def _since(self, seq: int) -> list[JobEvent]:
        """Kept events after a number. From the new end, since whoever keeps up asks for the last few."""
        found = list(takewhile(lambda event: event.seq > seq, reversed(self._kept)))
        found.reverse()
        return found

    async def wait_after(self, seq: int) -> None:
        """Wait until an event with a higher number is seen, or none will be. The caller's scope bounds the wait."""
        while self._last <= seq and not self._over:
            # Made by the first who waits: most jobs are followed by nobody.
            self._changed = trio.Event() if self._changed is None else self._changed
            await self._changed.wait()
        await trio.lowlevel.checkpoint()


class Feed:
    """The latest events of the whole daemon, numbered from its start."""

    def __init__(self, clock: Clock, *, kept_max: int = FEED_KEPT_MAX) -> None:
        self._clock = clock
        self._kept: deque[Event] = deque(maxlen=kept_max)
        self._last = 0
        self._changed: trio.Event | None = None

    @property
    def last(self) -> int:
        """The highest sequence number so far; 0 before the first event."""
        return self._last

    def of_job(self, tenant: str, job_id: str, event: JobEvent) -> None:
        """A job has an event."""
        self._add(Event(
            seq=self._last + 1, event=event.event, at=event.at, job_id=job_id, job_seq=event.seq, tenant=tenant,
            data=event.data,
        ))  # fmt: skip

    def of_batch(self, tenant: str, event: str, **data: Any) -> None:
        """A batch has an event; ``data`` says which batch."""
        self._add(Event(seq=self._last + 1, event=event, at=self._clock.wall(), tenant=tenant, data=data))

    def of_daemon(self, event: str, **data: Any) -> None:
        """Something that is nobody's alone; admins see it."""
        self._add(Event(seq=self._last + 1, event=event, at=self._clock.wall(), data=data))

    def _add(self, event: Event) -> None:
        self._last = event.seq
        self._kept.append(event)
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def after(self, seq: int, limit: int, tenant: str | None) -> tuple[Sequence[Event], int]:
        """What a tenant (``None``: an admin) may see after a number, and the number up to which that is everything.

        A number that was never given belongs to an earlier life of the daemon: its reader starts again from the first.
        """
        found: list[Event] = []
        gone = self._last - len(self._kept)
        if seq > self._last:
            found.append(self._gap(gone, {"reason": "restarted"}))
            seq = gone
        elif seq < gone:
            found.append(self._gap(gone, _missed(seq, gone)))
            seq = gone
        for event in self._from(seq):
            if len(found) >= limit:
                break
            seq = event.seq
            if tenant is None or event.tenant == tenant:
                found.append(event)
        return found, seq

    def _from(self, seq: int) -> Iterator[Event]:
        """Kept events after a number. From the new end, since a reader that keeps up asks for the last few."""
        missing = self._last - seq
        if missing <= len(self._kept) // 2:
            return reversed(list(islice(reversed(self._kept), missing)))
        return islice(self._kept, len(self._kept) - missing, None)

    def _gap(self, seq: int, data: dict[str, Any]) -> Event:
        return Event(seq=seq, event=GAP, at=self._clock.wall(), data=data)

    async def wait_after(self, seq: int, tenant: str | None) -> None:
        """Wait until ``after`` has something to give. The caller's scope bounds the wait."""
        await trio.lowlevel.checkpoint()
        while True:
            found, seq = self.after(seq, 1, tenant)
            if found:
                return
            self._changed = trio.Event() if self._changed is None else self._changed
            await self._changed.wait()


def _missed(seq: int, gone: int) -> dict[str, Any]:
    return {"reason": "overrun", "first": seq + 1, "last": gone}
