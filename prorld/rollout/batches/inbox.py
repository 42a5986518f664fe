"""What clients say to a batch that runs, and how it answers. The batch's own task does it, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from prorld.errors import Conflict, Impossible, TooMany
from prorld.kit.mailbox import Reply
from prorld.rollout.batches.members import Group
from prorld.store.batch_keeping import Acknowledged
from prorld.store.batch_lookups import own_digests, unknown_groups
from prorld.store.batches import Ending, GroupRow, GroupsAppended
from prorld.wire.batches import AckAnswer, AppendAnswer

if TYPE_CHECKING:
    from prorld.rollout.batches.actor import BatchActor

__all__ = ["Ack", "Append", "Message", "Stop", "acknowledge", "append", "check_ack", "must_be_known"]

RETRY_AFTER_WINDOW_S: Final = 1.0


@dataclass(kw_only=True)
class Message:
    """Something that is answered."""

    reply: Reply[Any] = field(init=False)

    def bind(self, reply: Reply[Any]) -> Message:
        """Where the answer goes."""
        self.reply = reply
        return self


@dataclass(kw_only=True)
class Append(Message):
    """More prompts, as groups with their places."""

    offset: int
    groups: Sequence[GroupRow]
    is_last: bool


@dataclass(kw_only=True)
class Ack(Message):
    """The trainer is done with these."""

    through: int
    discard: Sequence[str]


@dataclass(kw_only=True)
class Stop(Message):
    """End."""

    ending: Ending


async def append(batch: BatchActor, asked: Append) -> AppendAnswer:
    """Take more prompts, or find that they are there already."""
    ledger = batch.ledger
    if batch.ending is not None or batch.book.is_over:
        raise Conflict(f"batch {ledger.spec.batch_id} has ended", code="batch_ended")
    expected = ledger.next_offset
    end = asked.offset + len(asked.groups)
    if asked.offset != expected:
        await _must_be_there(batch, asked, end)
    new = asked.groups if asked.offset == expected else ()
    if new and ledger.is_last:
        raise Conflict("the last prompts were appended before", code="no_more", details={"expected_offset": expected})
    if not new and (not asked.is_last or ledger.is_last):
        return AppendAnswer(accepted=len(asked.groups), next_offset=expected)
    _must_fit(batch, new)
    after = max(expected, end)
    await batch.room.journal.commit(
        GroupsAppended(serial=ledger.serial, groups=new, next_offset=after, is_last=asked.is_last)
    )
    ledger.next_offset, ledger.is_fed, ledger.is_last = after, True, ledger.is_last or asked.is_last
    groups = [Group(row, ledger.spec) for row in new]
    for group in groups:
        batch.room.members.add(group)
    if ledger.carried_in is None:
        batch.held_back += groups
    else:
        batch.take(groups, at=ledger.carried_in + asked.offset)
    return AppendAnswer(accepted=len(asked.groups), next_offset=after)


async def _must_be_there(batch: BatchActor, asked: Append, end: int) -> None:
    """``Conflict`` unless the very same was appended at this offset before."""
    expected = batch.ledger.next_offset
    words = f"the next prompt is number {expected}, not {asked.offset}"
    code = "offset_gap" if asked.offset > expected else "offset_taken"
    if end <= expected:
        known = await batch.room.reader.ask(own_digests, batch.ledger.serial, asked.offset, len(asked.groups))
        if known == [row.digest for row in asked.groups]:
            return
        words = f"other prompts were appended at {asked.offset}; the next one is number {expected}"
    raise Conflict(words, code=code, details={"expected_offset": expected})


def _must_fit(batch: BatchActor, new: Sequence[GroupRow]) -> None:
    settings, waiting = batch.room.settings, batch.book.waiting + len(batch.held_back)
    if len(new) > settings.waiting_max:
        raise Impossible(f"more than {settings.waiting_max} prompts can't wait", code="too_many_prompts")
    if waiting + len(new) > settings.waiting_max:
        raise TooMany(
            f"{waiting} prompts wait already, and at most {settings.waiting_max} may",
            code="window_full", retry_after_s=RETRY_AFTER_WINDOW_S,
        )  # fmt: skip
    size = sum(len(row.instance) for row in new)
    if batch.room.members.waiting_bytes + size > settings.waiting_bytes_max:
        words = "the prompts of all batches fill the memory set aside for them"
        raise TooMany(words, code="window_full", retry_after_s=RETRY_AFTER_WINDOW_S)


async def acknowledge(batch: BatchActor, asked: Ack) -> AckAnswer:
    """The trainer is done with these: they may be forgotten, and there is room for others."""
    ledger = batch.ledger
    check_ack(asked.through, ledger.last_seq)
    unknown = await batch.room.reader.ask(unknown_groups, ledger.serial, asked.discard)
    must_be_known(unknown)
    (ready,) = await batch.room.journal.commit(
        Acknowledged(
            serial=ledger.serial, tenant=ledger.spec.tenant, through=asked.through, discard=tuple(asked.discard)
        ),
        grows=False,
    )
    ledger.acknowledged = max(ledger.acknowledged, asked.through)
    done = [group_id for group_id, seq in batch.unacknowledged.items() if seq <= asked.through]
    done += [group_id for group_id in asked.discard if group_id in batch.unacknowledged]
    for group_id in done:
        batch.unacknowledged.pop(group_id, None)
    batch.book.acknowledged(done)
    return AckAnswer(through=ledger.acknowledged, ready=ready)


def check_ack(through: int, last_seq: int) -> None:
    """``Conflict`` for what was never told."""
    if through > last_seq:
        words = f"the newest event is number {last_seq}, and {through} can't be acknowledged"
        raise Conflict(words, code="beyond_last", details={"last_seq": last_seq})


def must_be_known(unknown: Sequence[str]) -> None:
    """``Impossible`` for groups to discard that were never accepted."""
    if unknown:
        words = f"no accepted groups of this batch: {', '.join(unknown[:8])}"
        raise Impossible(words, code="unknown_group", details={"path": "discard"})
