"""From the journal to batches in memory: what ran when the daemon ended goes on where it was.

The book is built anew from what was written. What was decided and not written is decided again, and the same way.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence

import msgspec
import trio

from prorld.domain.batch import BatchBook
from prorld.domain.group import GroupEnd
from prorld.rollout.batches.actor import BatchActor
from prorld.rollout.batches.ledger import Ledger, Progress
from prorld.rollout.batches.leftovers import Leftovers
from prorld.rollout.batches.members import Group, lost, sample_end
from prorld.rollout.batches.room import Room
from prorld.rollout.batches.telling import as_settle
from prorld.store import batch_lookups as lookups
from prorld.store.batch_lookups import BatchRow
from prorld.store.batches import BatchSpec, GroupRow
from prorld.store.jobs import StoredJob
from prorld.wire.batches import BatchEvent

__all__ = ["Restorer"]


class _Found(msgspec.Struct, frozen=True, kw_only=True):
    row: BatchRow
    groups: list[GroupRow]
    unacknowledged: list[BatchEvent]
    last_seq: int


def _read(db: sqlite3.Connection, row: BatchRow) -> _Found:
    is_running = row.state == "running"
    return _Found(
        row=row,
        groups=lookups.open_rows(db, row.serial) if is_running else lookups.carried_rows(db, row.serial),
        unacknowledged=lookups.unacknowledged(db, row.serial, row.acknowledged) if is_running else [],
        last_seq=lookups.last_seq(db, row.serial),
    )


class Restorer:
    """Reads all batches that a new life has to know."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._makers: dict[int, BatchSpec] = {}

    async def running(self) -> list[tuple[BatchRow, BatchActor]]:
        """The batches that ran, oldest first; none of them is started."""
        return [(found.row, await self._actor(found)) for found in await self._all(lookups.running)]

    async def lingering(self) -> list[Leftovers]:
        """What ended batches left, and nobody has got yet."""
        left: list[Leftovers] = []
        for found in await self._all(lookups.lingering):
            assert found.row.spec is not None
            groups = await self._groups(found.groups)
            is_condemned = found.row.is_expired and found.row.carried_to is None
            left.append(Leftovers(self._room, found.row.spec, found.row.serial, groups, is_condemned=is_condemned))
        return left

    async def _all(self, query: Callable[[sqlite3.Connection], list[BatchRow]]) -> list[_Found]:
        rows = await self._room.journal.read(query)
        return [await self._room.journal.read(_read, row) for row in rows]

    async def _groups(self, rows: Sequence[GroupRow]) -> list[Group]:
        """Known first and then looked up: what ends between the two is heard of, and hearing twice does no harm."""
        groups = [Group(row, await self._maker(row.origin)) for row in rows]
        for group in groups:
            self._room.members.add(group)
        for group in groups:
            if group.row.is_started:
                ended: list[tuple[int, StoredJob | None]] = await self._room.journal.read(
                    lookups.samples, group.maker.tenant, group.job_ids()
                )
                for sample, job in ended:
                    group.note(lost(sample) if job is None else sample_end(job))
            await trio.lowlevel.checkpoint()
        return groups

    async def _maker(self, serial: int) -> BatchSpec:
        if serial not in self._makers:
            row: BatchRow | None = await self._room.journal.read(lookups.row, serial)
            assert row is not None
            assert row.spec is not None
            self._makers[serial] = row.spec
        return self._makers[serial]

    async def _actor(self, found: _Found) -> BatchActor:
        row, spec = found.row, found.row.spec
        assert spec is not None
        progress = msgspec.msgpack.decode(row.progress, type=Progress) if row.progress else Progress()
        past = {GroupEnd(name): count for name, count in progress.tally.ends.items()}
        if found.unacknowledged:
            past[GroupEnd.DONE] -= len(found.unacknowledged)
        book = BatchBook(spec.rules, past=past)
        ledger = Ledger(self._room, spec, row.serial, row.created_at, book, progress=progress)
        ledger.next_offset, ledger.is_last, ledger.is_fed = row.next_offset, row.is_last, row.is_fed
        ledger.acknowledged, ledger.carried_in, ledger.last_seq = row.acknowledged, row.carried_in, found.last_seq
        ledger.carried_to = row.claimant_id
        actor = BatchActor(self._room, ledger, book, ran_s=row.ran_s)
        for event in found.unacknowledged:
            settle = as_settle(event)
            book.append([settle.group_id], at=settle.index)
            book.settled(settle)
            actor.unacknowledged[settle.group_id] = event.seq
        book.wanted(progress.wants)
        groups = await self._groups(found.groups)
        if row.carried_in is None:
            actor.held_back = groups
        else:
            for group in groups:
                actor.take([group], at=group.row.place + (row.carried_in if group.row.is_own else 0))
        if row.ending is not None:
            actor.end_with(row.ending)
        return actor
