"""Which job a row of NeMo Gym has, so that a row that is sent again is not run again.

A Gym's client sends the same bytes again half a second after its connection broke, for as long as that takes, and says
nothing by which a server could tell that from another row. Rows that are alike to the byte stand for each other,
though: a job that nobody waits for any more is as good an answer to the one as to the other. Where a row has an id of
its own, that of Gym's newer clients, there is one job for it in any case.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import trio

__all__ = ["LEFT_S", "Run", "Runs", "digest_of", "is_named"]

# A client that comes again comes at once; what was left for longer than that would be of older weights.
LEFT_S: Final = 60.0
LEFT_MAX: Final = 10_000
ROW_ID: Final = "_ng_rollout_id"


def digest_of(row: Mapping[str, Any]) -> str:
    """The same for rows that are alike, in whatever order their fields stand."""
    return hashlib.sha256(msgspec.json.encode(row, order="deterministic")).hexdigest()


def is_named(row: Mapping[str, Any]) -> bool:
    """Whether the caller has given the row an id of its own."""
    named = row.get(ROW_ID)
    return isinstance(named, str) and bool(named)


class Run:
    """The job of a row, and how many calls wait for it. Its id is known before it is accepted."""

    def __init__(self, row: str, job_id: str | None = None) -> None:
        self.row = row
        self.job_id = job_id or f"gym-{secrets.token_hex(8)}"
        self.waiting = 0
        self.left_at = 0.0


class Runs:
    """Those that a call waits for, and for a while those that were left."""

    def __init__(self) -> None:
        self._runs: dict[str, list[Run]] = {}
        self._left: OrderedDict[str, Run] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._runs.values()))

    def join(self, row: str, *, named: bool) -> Run | None:
        """Wait for a job that this row has already: one that was left, or where the row is ``named`` any."""
        self._expire()
        found = next((run for run in self._runs.get(row, ()) if named or not run.waiting), None)
        if found is not None:
            self._left.pop(found.job_id, None)
            found.waiting += 1
        return found

    def begin(self, row: str) -> Run:
        """Wait for a new one."""
        run = Run(row)
        run.waiting = 1
        self._runs.setdefault(row, []).append(run)
        return run

    def restore(self, row: str, job_id: str, left_at: float) -> None:
        """One that the last life of the daemon left; before any other is left."""
        run = Run(row, job_id)
        self._runs.setdefault(row, []).append(run)
        self._leave(run, left_at)

    def leave(self, run: Run, *, keep: bool) -> None:
        """A call waits no longer. ``keep``: another one like it may have the job when nobody waits for it."""
        run.waiting -= 1
        if not keep:
            self._forget(run)
        elif not run.waiting:
            self._leave(run, trio.current_time())

    def forget_left(self) -> None:
        """What nobody waits for is of older weights by now."""
        for run in [*self._left.values()]:
            self._forget(run)

    def _leave(self, run: Run, at: float) -> None:
        run.left_at = at
        self._left[run.job_id] = run
        self._expire()

    def _expire(self) -> None:
        now = trio.current_time()
        while self._left:
            run = next(iter(self._left.values()))
            if len(self._left) <= LEFT_MAX and now - run.left_at <= LEFT_S:
                break
            self._forget(run)

    def _forget(self, run: Run) -> None:
        self._left.pop(run.job_id, None)
        alike = self._runs.get(run.row, [])
        if run in alike:
            alike.remove(run)
            if not alike:
                del self._runs[run.row]
