"""What a job grows by while it lives, on its way into the journal: its events, and what became of its attempts.

Numbers are given when something happens, and nothing is seen before it is written: a reader that was told of an event
finds the same one under its number whatever happens to the daemon. Many things share one row, since most of them happen
within the moment that the journal leaves for company.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from prorld.rollout.events import EventLog
from prorld.store.jobs import AttemptBegan, AttemptEnded, JobGrew
from prorld.store.journal import Change, Journal
from prorld.wire.events import JobEvent

__all__ = ["JobTrail"]

AttemptChange: TypeAlias = AttemptBegan | AttemptEnded


class Grown(msgspec.Struct, frozen=True, kw_only=True):
    """What a live job has grown by, in one piece."""

    serial: int
    events: list[JobEvent]
    attempts: list[AttemptChange]

    def apply(self, db: sqlite3.Connection) -> None:
        """Write it."""
        if self.events:
            JobGrew(serial=self.serial, events=self.events).apply(db)
        for attempt in self.attempts:
            attempt.apply(db)

    def disown(self, db: sqlite3.Connection) -> None:
        """What has happened is never taken back."""


class JobTrail:
    """The ``Trail`` of one job. Without a journal everything is seen at once.

    It is shut until the job is accepted, so that nothing is written of one that is not, and again from its end on: the
    end is written whole.
    """

    def __init__(
        self,
        journal: Journal | None,
        *,
        tell: Callable[[JobEvent], None] | None = None,
        past: Sequence[JobEvent] = (),
    ) -> None:
        self.serial = 0
        self.events = EventLog(tell=tell, grew=None if journal is None else self._grew, past=past)
        # How many attempts may be told of: those whose end is written.
        self.attempts_seen = 0
        self._journal = journal
        self._is_open = False
        self._attempts: list[AttemptChange] = []
        self._taken = (0, 0)

    def open(self, serial: int) -> None:
        """The job is accepted under this number: what has happened, and what will happen, is written."""
        self.serial = serial
        self._is_open = True

    def shut(self) -> None:
        """The job's end is written instead of anything more of this."""
        self._is_open = False

    def ended(self) -> None:
        """That end is on the disk."""
        self.events.show(self.events.newest, is_end=True)

    def tried(self, change: AttemptChange) -> None:
        """An attempt began or ended. To be called before the event that says so."""
        if self._journal is None:
            self._see([change])
        else:
            self._attempts.append(change)

    def _grew(self) -> None:
        if self._is_open and self._journal is not None:
            self._journal.soon(self)

    def take(self) -> Change | None:
        """What is not written yet."""
        events = self.events.unseen
        if not self._is_open or not (events or self._attempts):
            return None
        self._taken = (self.events.newest, len(self._attempts))
        return Grown(serial=self.serial, events=events, attempts=list(self._attempts))

    def written(self) -> None:
        """What was taken is on the disk."""
        upto, attempts = self._taken
        self._see(self._attempts[:attempts])
        del self._attempts[:attempts]
        self.events.show(upto)

    def _see(self, written: Sequence[AttemptChange]) -> None:
        self.attempts_seen += sum(isinstance(change, AttemptEnded) for change in written)
