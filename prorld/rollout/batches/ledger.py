"""What a batch has told, and what is known of it: its numbers, its events on their way to the disk, its record.

Events get their number right before they are written, and are shown when they are. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import trio

from prorld.domain.batch import BatchBook, BatchState, End, Settle
from prorld.domain.group import GroupEnd
from prorld.rollout.batches.members import Group
from prorld.rollout.batches.room import Room
from prorld.rollout.batches.tally import Tally
from prorld.rollout.batches.telling import READY, terminal
from prorld.store.batches import BatchEnded, BatchSpec, EventsTold, GroupEnded
from prorld.store.journal import Change
from prorld.wire.batches import BatchEvent, BatchRecord

__all__ = ["Ledger", "Progress"]


class Progress(msgspec.Struct, kw_only=True):
    """What a later life has to know beside the events themselves. ``ready_seq``: the newest accepted group's number."""

    tally: Tally = msgspec.field(default_factory=Tally)
    wants: int = 0
    ready_seq: int = 0


class Ledger:
    """The papers of one batch."""

    def __init__(
        self,
        room: Room,
        spec: BatchSpec,
        serial: int,
        created_at: str,
        book: BatchBook,
        *,
        progress: Progress | None = None,
    ) -> None:
        self.spec = spec
        self.serial = serial
        self.created_at = created_at
        self.next_offset = 0
        self.is_last = False
        self.is_fed = False
        self.acknowledged = 0
        self.carried_in: int | None = 0
        self.carried_to: str | None = None
        self.last_seq = 0
        self.wants = 0
        self.final: BatchRecord | None = None
        self._room = room
        self._book = book
        self._progress = progress or Progress()
        self._news = trio.Event()
        self.wants = self._progress.wants

    @property
    def closes(self) -> bool:
        """Whether it ends when its prompts have run out, though nobody said that there will be no others."""
        return self.is_last or (self.spec.closes and not self.is_fed)

    @property
    def has_news(self) -> bool:
        """Whether there is something to tell beside the ends of groups."""
        return self.wants > self._progress.wants

    @property
    def ready_seq(self) -> int:
        """The number of the newest accepted group."""
        return self._progress.ready_seq

    # --- telling ------------------------------------------------------------------------------------------------------

    async def tell(self, settled: Sequence[tuple[Settle, Group]], *, ran_s: float) -> list[int]:
        """Write the terminal events of these groups, and what is wanted; the numbers of the former."""
        at = self._room.clock.wall()
        events, ends = self._settled(settled, at)
        seqs = [event.seq for event in events]
        if events:
            self._progress.ready_seq = max(
                [event.seq for event in events if event.event == READY], default=self._progress.ready_seq
            )
        if self.has_news:
            # The sampler counts what it sends, and what was carried it did not send.
            total = max(0, self.wants - (self.carried_in or 0))
            self._progress.wants = self.wants
            events.append(BatchEvent(seq=self.last_seq + len(events) + 1, event="batch.wants", at=at, total=total))
        await self._room.journal.owe(self._told(events, ends, ran_s))
        self._show(events)
        return seqs

    async def end(self, end: End, carried: Sequence[tuple[Settle, Group]], *changes: Change, ran_s: float) -> None:
        """Write the last events, and that it is over, in one commit with ``changes``."""
        at = self._room.clock.wall()
        events, ends = self._settled(carried, at)
        tally = self._progress.tally
        seq = self.last_seq + len(events) + 1
        counts = tally.end_counts()
        events.append(BatchEvent(seq=seq, event="batch.end", at=at, reason=end.reason, state=end.state, counts=counts))
        record = msgspec.structs.replace(
            self.record(), state=end.state, reason=end.reason, ended_at=at, last_seq=seq, leftovers=len(carried),
            groups=tally.counts(),
        )  # fmt: skip
        over = BatchEnded(serial=self.serial, tenant=self.spec.tenant, state=end.state, record=record)
        await self._room.journal.owe(self._told(events, ends, ran_s), over, *changes)
        self.final = record
        self._show(events)

    def _settled(self, settled: Sequence[tuple[Settle, Group]], at: str) -> tuple[list[BatchEvent], list[GroupEnded]]:
        """The terminal events of groups with the next numbers, and how their rows change. They are counted."""
        for settle, group in settled:
            self._count(settle, group)
        events = [
            terminal(settle, group, seq=self.last_seq + n, at=at) for n, (settle, group) in enumerate(settled, start=1)
        ]
        ends = [
            GroupEnded(is_own=group.row.is_own, place=group.row.place, end=settle.end.value)
            for settle, group in settled
        ]
        return events, ends

    def _told(self, events: Sequence[BatchEvent], ends: Sequence[GroupEnded], ran_s: float) -> EventsTold:
        return EventsTold(
            serial=self.serial, events=events, ends=ends,
            progress=msgspec.msgpack.encode(self._progress), ran_s=ran_s,
        )  # fmt: skip

    def _count(self, settle: Settle, group: Group) -> None:
        samples = [group.samples[n] for n in sorted(group.samples)]
        self._progress.tally.settle(settle, samples, self.spec.rules)
        if settle.end is not GroupEnd.CARRIED:
            self._room.metrics.group_ended(self.spec.purpose, settle.end.value)
        if settle.end not in (GroupEnd.DONE, GroupEnd.CARRIED) and self.spec.purpose == "train":
            tokens = sum(sample.sampled_tokens for sample in samples)
            self._room.metrics.wasted(len(samples), tokens, sum(sample.duration_s for sample in samples))

    def _show(self, events: Sequence[BatchEvent]) -> None:
        for event in events:
            self.last_seq = event.seq
            data = {
                name: value
                for name in ("group_id", "index", "reason", "total", "state")
                if (value := getattr(event, name)) is not msgspec.UNSET
            }
            self._room.feed.of_batch(
                self.spec.tenant, event.event, batch_id=self.spec.batch_id, batch_seq=event.seq, **data
            )
        self.note_news()

    def note_news(self) -> None:
        """Whoever waits may look again."""
        news, self._news = self._news, trio.Event()
        news.set()

    async def wait_news(self, after: int, *, groups: bool) -> None:
        """Wait for an event, or an accepted group, with a higher number, or the end. The caller's scope bounds it."""
        await trio.lowlevel.checkpoint()
        while self.final is None and (self.ready_seq if groups else self.last_seq) <= after:
            await self._news.wait()

    # --- what is read -------------------------------------------------------------------------------------------------

    @property
    def state(self) -> BatchState:
        """Where it is, as far as it is on the disk."""
        return BatchState.RUNNING if self.final is None else self.final.state

    def record(self) -> BatchRecord:
        """What is known of it now."""
        if self.final is not None:
            return msgspec.structs.replace(
                self.final, acknowledged=self.acknowledged, carried_to=self.carried_to, next_offset=self.next_offset
            )
        spec, book, tally = self.spec, self._book, self._progress.tally
        return BatchRecord(
            batch_id=spec.batch_id, tenant=spec.tenant, handler=spec.handler, policy=spec.policy, purpose=spec.purpose,
            state=BatchState.RUNNING, samples_per_group=spec.rules.samples_per_group,
            target_groups=spec.rules.target_groups, priority=spec.priority, next_offset=self.next_offset,
            is_last=self.is_last, wants=max(0, self._progress.wants - (self.carried_in or 0)),
            acknowledged=self.acknowledged, last_seq=self.last_seq, carry_from=spec.carry_from,
            carried_to=self.carried_to, groups=tally.counts(waiting=book.waiting, running=book.running + book.held),
            before_filter=tally.before_filter(), durations=tally.durations(), waste=tally.waste(),
            staleness=tally.staleness_seen(), metadata=spec.metadata, created_at=self.created_at,
        )  # fmt: skip
