"""Waits for the jobs that ``prorld submit`` handed in: each as it ends, and what a person has to know meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from itertools import islice

from prorld.cli.jobs import each
from prorld.cli.output import clean, count, note, program, typed
from prorld.client import Client, ClientError
from prorld.domain.job import JobState
from prorld.wire.jobs import JobRecord
from prorld.wire.ops import Condition

__all__ = ["Waiting", "cancel_hint", "handed_in"]

POLL_S = 0.5
# A job that has no engine for so long is told of; an engine that is being loaded is not news before.
QUIET_S = 3.0
# Of a daemon that is busy otherwise, the jobs that ended last are the newest: no look has to read them all.
SWEEP_MAX = 2000
# Ids that fit on one line.
SHOWN_MAX = 4
_GONE = frozenset({"no_daemon", "connection_lost", "unknown_job"})


def handed_in(records: Sequence[JobRecord]) -> str:
    """The groups that were handed in, or the jobs where they have none, with their number."""
    groups = {record.group_id for record in records}
    if len(groups) == 1 and (group := records[0].group_id) is not None:
        return f"group {group} ({count(len(records), 'job')})"
    names = _groups(records)
    if len(records) == 1:
        return f"job {records[0].job_id}"
    if names and None not in groups:
        return f"{count(len(names), 'group')} ({count(len(records), 'job')}): {_shortened(names)}"
    return f"{count(len(records), 'job')}: {_shortened([record.job_id for record in records])}"


def cancel_hint(records: Sequence[JobRecord]) -> str:
    """What to type to end these jobs."""
    groups = _groups(records)
    lone = [record.job_id for record in records if record.group_id is None]
    words = [f"`{program()} cancel --group {group}`" for group in groups[:SHOWN_MAX]]
    if lone and len(lone) <= SHOWN_MAX:
        words.append(f"`{program()} cancel {' '.join(lone)}`")
    elif lone:
        words.append(f"`{program()} cancel JOB ...`, ids from `{program()} jobs`")
    return "the jobs go on; cancel with " + " and ".join(words)


def _groups(records: Sequence[JobRecord]) -> list[str]:
    return list(dict.fromkeys(record.group_id for record in records if record.group_id is not None))


def _shortened(names: Sequence[str]) -> str:
    more = len(names) - SHOWN_MAX
    return ", ".join(names[:SHOWN_MAX]) + (f", {more} more" if more > 0 else "")


def _concerns(item: Condition, policies: Collection[str]) -> bool:
    """Whether it can be what these jobs wait for: what drains goes on with its jobs, and policies are apart."""
    return item.code != "draining" and (item.policy is None or item.policy in policies)


class Waiting:
    """One wait for many jobs. ``tell`` gets each record as it ends."""

    def __init__(self, client: Client, records: Sequence[JobRecord], tell: Callable[[JobRecord], None]) -> None:
        self._client = client
        self._open = {record.job_id: record for record in records}
        self._tell = tell
        self._ended: dict[str, JobRecord] = {}
        self._news_at = time.monotonic() + QUIET_S
        self._told = ""

    @property
    def left(self) -> list[JobRecord]:
        """Jobs that have not ended, as they were handed in."""
        return list(self._open.values())

    def run(self) -> dict[str, JobRecord]:
        """The records by id, once all have ended."""
        try:
            while self._open:
                self._look()
                self._say_what_is_missing()
        except ClientError as exc:
            if exc.stable_code not in _GONE:
                raise
            lost = len(self._open)
            message = f"the daemon ended; {count(lost, 'result')} {'is' if lost == 1 else 'are'} lost"
            raise ClientError(message, code=exc.stable_code, status=exc.status) from exc
        return self._ended

    def _look(self) -> None:
        first = next(iter(self._open))
        self._take(self._client.wait(first, within_s=POLL_S))
        if first in self._open:
            # To the end of the line, so that the next look is at another one.
            self._open[first] = self._open.pop(first)
        if len(self._open) > 1:
            groups = {record.group_id for record in self._open.values()}
            group = next(iter(groups)) if len(groups) == 1 else None
            for record in islice(each(self._client, state="done", group_id=group), SWEEP_MAX):
                self._take(record)
                if not self._open:
                    return

    def _take(self, record: JobRecord) -> None:
        if record.state is JobState.DONE and self._open.pop(record.job_id, None) is not None:
            self._ended[record.job_id] = record
            self._tell(record)

    def _say_what_is_missing(self) -> None:
        if not self._open or time.monotonic() < self._news_at:
            return
        self._news_at = time.monotonic() + QUIET_S
        policies = {record.policy for record in self._open.values()}
        missing = [item for item in self._client.ready().missing if _concerns(item, policies)]
        words = "; ".join(f"{clean(item.message)}; {clean(typed(item.cure))}" for item in missing)
        if words and words != self._told:
            note(f"waiting: {words}")
        self._told = words
