"""Everything that a client was ever told, and whether it is still true.

The trainers of the crash bench tell it each answer. What was told once is final in parts: a job that is done stays as
it is, an event keeps its number, an acknowledgement counts. An answer that takes any of it back is a lie, whenever it
comes. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["ENDS", "Before", "Oracle", "counts_of"]

LIES_MAX = 100
# Terminal events of a group, and the count of the record that each belongs to.
ENDS: Mapping[str, str] = {
    "group.done": "informative",
    "group.filtered": "uninformative",
    "group.failed": "failed",
    "group.stale": "stale",
    "group.cancelled": "cancelled",
    "group.carried": "carried",
}

Told = Mapping[str, Any]


class Before(NamedTuple):
    """What had been told of a batch when a question was asked: an answer must know of that, and of nothing later."""

    record: Told | None
    acknowledged: int
    next_offset: int


class Oracle:
    """``lies`` are what was told and was not true later; at most so many are kept, and all are counted."""

    def __init__(self) -> None:
        self.lies: list[str] = []
        self.lies_total = 0
        self.accepted: set[str] = set()
        self.done: dict[str, Told] = {}
        self.batches: dict[str, Told] = {}
        self.events: dict[str, dict[int, Told]] = {}
        self.groups: dict[str, dict[int, Told]] = {}
        self.acknowledged: dict[str, int] = {}
        self._attempts: dict[str, list[Any]] = {}
        self._offsets: dict[str, int] = {}
        self._delivered: dict[str, str] = {}

    def lie(self, what: str) -> None:
        """Something told was not true."""
        self.lies_total += 1
        if len(self.lies) < LIES_MAX:
            self.lies.append(what)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def job(self, record: Told) -> None:
        """A job's record was seen; it is accepted then, and what is done stays."""
        job_id = record["job_id"]
        self.accepted.add(job_id)
        before = self._attempts.get(job_id, [])
        now = record["attempts"]
        if now[: len(before)] != before:
            self.lie(f"{job_id}: had the attempts {before}, and then {now}")
        self._attempts[job_id] = now
        known = self.done.get(job_id)
        if known is not None and known != record:
            self.lie(f"{job_id}: was done as {known}, and then {record}")
        if record["state"] == "done":
            self.done.setdefault(job_id, record)

    def lost(self, what: str) -> None:
        """Something that was accepted is not there any more."""
        self.lie(f"{what} was accepted and is gone")

    # --- batches ------------------------------------------------------------------------------------------------------

    def before(self, batch_id: str) -> Before:
        """What is known of a batch now. To be taken before its record is asked for."""
        return Before(self.batches.get(batch_id), self.acknowledged.get(batch_id, 0), self._offsets.get(batch_id, 0))

    def batch(self, record: Told, before: Before | None = None) -> None:
        """A batch's record was seen. Without a ``before`` nothing else was asked of it meanwhile."""
        batch_id = record["batch_id"]
        known, acknowledged, next_offset = self.before(batch_id) if before is None else before
        if known is not None and known["state"] != "running":
            same = ("state", "reason", "ended_at", "last_seq", "created_at")
            changed = [name for name in same if known[name] != record[name]]
            if changed:
                self.lie(f"{batch_id}: ended with {_some(known, changed)}, and then {_some(record, changed)}")
        for name, told in (("acknowledged", acknowledged), ("next_offset", next_offset)):
            if record[name] < told:
                self.lie(f"{batch_id}: {name} was {told}, and then {record[name]}")
        seen = self.events.get(batch_id)
        if seen and record["last_seq"] < max(seen):
            self.lie(f"{batch_id}: had shown the event {max(seen)}, and then knows {record['last_seq']}")
        newest = self.batches.get(batch_id)
        if newest is None or newest["state"] == "running" or record["state"] != "running":
            self.batches[batch_id] = record

    def appended(self, batch_id: str, next_offset: int) -> None:
        """So many prompts are in."""
        if next_offset < self._offsets.get(batch_id, 0):
            self.lie(f"{batch_id}: {self._offsets[batch_id]} prompts were in, and then {next_offset}")
        self._offsets[batch_id] = next_offset

    def acked(self, batch_id: str, through: int) -> None:
        """It is acknowledged up to there."""
        if through < self.acknowledged.get(batch_id, 0):
            self.lie(f"{batch_id}: was acknowledged through {self.acknowledged[batch_id]}, and then {through}")
        self.acknowledged[batch_id] = max(through, self.acknowledged.get(batch_id, 0))

    def batch_events(self, batch_id: str, items: Iterable[Told]) -> None:
        """Events were seen: each number is one event for ever, and none is left out."""
        known = self.events.setdefault(batch_id, {})
        for item in items:
            seq = item["seq"]
            if known.setdefault(seq, item) != item:
                self.lie(f"{batch_id}: the event {seq} was {known[seq]}, and then {item}")

    def batch_groups(self, batch_id: str, items: Iterable[Told]) -> None:
        """Groups to train on were seen: each once, in one batch only, by the number of its event."""
        known = self.groups.setdefault(batch_id, {})
        for item in items:
            seq, group_id = item["seq"], item["group_id"]
            if known.setdefault(seq, item) != item:
                self.lie(f"{batch_id}: the group {seq} was {known[seq]}, and then {item}")
            where = self._delivered.setdefault(group_id, f"{batch_id}/{seq}")
            if where != f"{batch_id}/{seq}":
                self.lie(f"{group_id} was delivered as {where} and as {batch_id}/{seq}")

    # --- at the end ---------------------------------------------------------------------------------------------------

    def replayed(self, batch_id: str, items: Sequence[Told]) -> None:
        """All events of an ended batch from the first one on: gapless, with what was seen, and each group's one end."""
        self.batch_events(batch_id, items)
        seqs = [item["seq"] for item in items]
        if seqs != list(range(1, len(seqs) + 1)):
            self.lie(f"{batch_id}: the events are numbered {_gaps(seqs)}")
        missing = set(self.events[batch_id]) - set(seqs)
        if missing:
            self.lie(f"{batch_id}: shown were also the events {sorted(missing)[:10]}")
        ends = Counter(item["group_id"] for item in items if item["event"] in ENDS)
        for group_id, times in ends.items():
            if times != 1:
                self.lie(f"{batch_id}: {group_id} ended {times} times")
        delivered = [item["seq"] for item in items if item["event"] == "group.done"]
        if sorted(self.groups.get(batch_id, {})) != delivered:
            shown = sorted(self.groups.get(batch_id, {}))
            self.lie(f"{batch_id}: the groups {shown} were delivered, and done are {delivered}")

    def counted(self, record: Told, items: Sequence[Told], submitted: int) -> None:
        """The counts of an ended batch are those of its events, and all of what was submitted is in them."""
        batch_id = record["batch_id"]
        counts = counts_of(items)
        shown = {name: record["groups"][name] for name in ENDS.values()}
        if counts != shown:
            self.lie(f"{batch_id}: the record counts {shown}, the events {counts}")
        if sum(counts.values()) != submitted:
            self.lie(f"{batch_id}: {submitted} groups were submitted, and {sum(counts.values())} ended: {counts}")
        if record["groups"]["waiting"] or record["groups"]["running"]:
            self.lie(f"{batch_id}: has ended and still counts {record['groups']}")

    def trail(self, job_id: str, items: Sequence[Told]) -> None:
        """The events of an ended job: gapless, and one end."""
        seqs = [item["seq"] for item in items]
        if seqs != list(range(1, len(seqs) + 1)):
            self.lie(f"{job_id}: the events are numbered {_gaps(seqs)}")
        ends = [item for item in items if item["event"] == "job.done"]
        if len(ends) != 1 or items[-1]["event"] != "job.done":
            self.lie(f"{job_id}: ended {len(ends)} times, the last event is {items[-1]['event'] if items else None}")


def counts_of(items: Iterable[Told]) -> dict[str, int]:
    """Ends of groups by the name of their count."""
    found = dict.fromkeys(ENDS.values(), 0)
    for item in items:
        if item["event"] in ENDS:
            found[ENDS[item["event"]]] += 1
    return found


def _some(record: Told, names: Iterable[str]) -> dict[str, Any]:
    return {name: record[name] for name in names}


def _gaps(seqs: list[int]) -> str:
    wrong = next((at for at, seq in enumerate(seqs) if seq != at + 1), len(seqs))
    return f"{seqs[max(0, wrong - 2) : wrong + 3]} around place {wrong + 1}"
