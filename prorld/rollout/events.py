"""Numbered events of one job: gapless, bounded, with a wake-up for whoever follows them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import trio

from prorld.wire.jobs import JobEvent

# A rollout of 500 turns makes about 510 events; what is older than the last of these is in the log.
EVENTS_KEPT_MAX = 1024


class EventLog:
    """The events of one job."""

    def __init__(self, *, kept_max: int = EVENTS_KEPT_MAX) -> None:
        self._kept: deque[JobEvent] = deque(maxlen=kept_max)
        self._last = 0
        self._changed = trio.Event()

    @property
    def last(self) -> int:
        """The highest sequence number so far; 0 before the first event."""
        return self._last

    def emit(self, event: str, at: str, **data: Any) -> None:
        """Number and keep an event. Never blocks."""
        self._last += 1
        self._kept.append(JobEvent(seq=self._last, event=event, at=at, data=data))
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    def after(self, seq: int, limit: int) -> Sequence[JobEvent]:
        """Events with a higher number, oldest first."""
        skip = max(0, len(self._kept) - max(0, self._last - seq))
        return [event for i, event in enumerate(self._kept) if i >= skip][:limit]

    async def wait_after(self, seq: int) -> None:
        """Wait until there is an event with a higher number. The caller's scope bounds the wait."""
        while self._last <= seq:
            await self._changed.wait()
        await trio.lowlevel.checkpoint()
