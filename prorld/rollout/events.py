"""Numbered events, gapless and bounded, with a wake-up for whoever follows them: of one job, and of all of them.

Emitting never blocks and no reader has a buffer of its own. Who falls so far behind that events are gone is told with
a gap event in their place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import trio

from prorld.rollout.clock import Clock
from prorld.wire.events import GAP, Event, JobEvent

__all__ = ["EVENTS_KEPT_MAX", "FEED_KEPT_MAX", "EventLog", "Feed"]

# A rollout of 500 turns makes about 510 events; what is older than the last of these is in the log.
EVENTS_KEPT_MAX = 1024
# About 12 events a rollout and 400 bytes an event: the last thousands of rollouts, in 25 MB.
FEED_KEPT_MAX = 65_536


class EventLog:
    """The events of one job. ``tell`` hears of each of them, and must not block."""

    def __init__(self, *, kept_max: int = EVENTS_KEPT_MAX, tell: Callable[[JobEvent], None] | None = None) -> None:
        self._kept: deque[JobEvent] = deque(maxlen=kept_max)
        self._last = 0
        self._changed: trio.Event | None = None
        self._tell = tell

    @property
    def last(self) -> int:
        """The highest sequence number so far; 0 before the first event."""
        return self._last

    @property
    def kept(self) -> int:
        """How many events are still there."""
        return len(self._kept)

    def emit(self, event: str, at: str, **data: Any) -> None:
        """Number and keep an event. Never blocks."""
        self._last += 1
        made = JobEvent(seq=self._last, event=event, at=at, data=data)
        self._kept.append(made)
        if self._changed is not None:
            self._changed.set()
            self._changed = None
        if self._tell is not None:
            self._tell(made)

    def after(self, seq: int, limit: int) -> Sequence[JobEvent]:
        """Events with a higher number, oldest first; a gap in the place of those that are gone."""
        gone = self._last - len(self._kept)
        if seq >= gone:
            skipped = min(seq, self._last) - gone
            return list(islice(self._kept, skipped, skipped + limit))
        gap = JobEvent(seq=gone, event=GAP, at=self._kept[0].at, data=_missed(seq, gone))
        return [gap, *islice(self._kept, limit - 1)]

    async def wait_after(self, seq: int) -> None:
        """Wait until there is an event with a higher number. The caller's scope bounds the wait."""
        while self._last <= seq:
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
