"""What is answered about batches; implements ``prorld.rollout.service.BatchService``.

A tenant of ``None`` means an admin: all tenants.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
import trio

from prorld.domain.batch import BatchState
from prorld.domain.ids import ADMIN_TENANT
from prorld.errors import BadRequest, Conflict, Forgotten, Impossible, NotFound, Overloaded, TooMany
from prorld.handlers.registry import Registry
from prorld.kit.mailbox import MailboxClosed
from prorld.rollout.batches.actor import BatchActor
from prorld.rollout.batches.floor import Floor
from prorld.rollout.batches.inbox import Ack, Append, Message, Stop, check_ack, must_be_known
from prorld.rollout.batches.reading import read_groups
from prorld.rollout.batches.request import check_instance, complete, group_row, select_handler
from prorld.store import batch_lookups as lookups
from prorld.store.batch_keeping import Acknowledged
from prorld.store.batch_lookups import BatchRow
from prorld.store.batches import BatchSpec, Ending, GroupRow, LeftoversCondemned
from prorld.wire.batches import (
    AckAnswer,
    AckBatch,
    AppendAnswer,
    AppendInstances,
    BatchEvent,
    BatchGroupPage,
    BatchPage,
    BatchRecord,
    PackedBatchGroupPage,
    SubmitBatch,
)

__all__ = ["Batches"]

T = TypeVar("T")

# Prompts that are checked between two looks of the loop at others; one takes some ten microseconds.
CHECKED_PER_TICK: Final = 32
# The same of groups that are made of them, which is quicker.
MADE_PER_TICK: Final = 256
RETRY_AFTER_QUOTA_S: Final = 5.0
RETRY_AFTER_DRAIN_S: Final = 10.0
# What a page with trajectories holds where the client names no bound.
PAGE_BYTES: Final = 64 << 20
FOREVER: Final = 2**62


class Batches:
    """The desk before the floor: it checks, finds and reads; what changes a batch is done where the batch lives."""

    def __init__(
        self, floor: Floor, handlers: Registry, *, captures: Container[str], is_draining: Callable[[], bool]
    ) -> None:
        self.floor = floor
        self._room = floor.room
        self._handlers = handlers
        self._captures = captures
        self._is_draining = is_draining

    # --- taking in ----------------------------------------------------------------------------------------------------

    async def submit(self, request: SubmitBatch, tenant: str, *, digest: str) -> tuple[BatchRecord, bool]:
        """Accept a batch, or find that the same one was accepted before."""
        batch_id = request.batch_id or f"b-{secrets.token_hex(8)}"
        if await self._is_known(batch_id, tenant, digest):
            return await self.get(batch_id, tenant), False
        if self._is_draining():
            raise Overloaded("the daemon is draining", retry_after_s=RETRY_AFTER_DRAIN_S, code="draining")
        if request.policy not in self._room.policies:
            raise Impossible(f"there is no policy {request.policy!r}", code="unknown_policy")
        handler = select_handler(self._handlers, request.handler, request.instances)
        spec = complete(request, batch_id, tenant, handler, self._room.settings, self._captures)
        if spec.purpose == "train":
            self._room.breakers.must_admit(tenant, handler, spec.policy)
        await self._must_be_within_quota(tenant)
        await self._check(spec, request.handler, request.instances)
        self._must_fit(request.instances)
        instances = request.instances

        async def rows(serial: int) -> list[GroupRow]:
            return await _group_rows(batch_id, serial, instances)

        known = partial(self._is_known, batch_id, tenant, digest)
        _, is_new = await self.floor.ask(
            partial(self.floor.accept, spec, digest, rows, known, is_last=bool(request.last))
        )
        return await self.get(batch_id, tenant), is_new

    async def append(self, batch_id: str, tenant: str | None, request: AppendInstances) -> AppendAnswer:
        """More prompts of a batch that runs."""
        row = await self._find(batch_id, tenant)
        ended = Conflict(f"batch {row.batch_id} has ended", code="batch_ended", details={"state": row.state})
        actor = self.floor.of(row)
        if actor is None or row.spec is None:
            raise ended
        await self._must_be_within_quota(row.tenant)
        named = row.spec.handler if request.instances and "data_source" not in request.instances[0] else None
        await self._check(row.spec, named, request.instances)
        first = request.offset
        groups = await _group_rows(row.batch_id, row.serial, request.instances, first=first)
        message = Append(offset=first, groups=groups, is_last=request.last)
        try:
            return await self._tell(actor, message, AppendAnswer)
        except MailboxClosed:
            raise ended from None

    async def _check(self, spec: BatchSpec, named: str | None, instances: Sequence[Mapping[str, Any]]) -> None:
        for place, instance in enumerate(instances):
            check_instance(self._handlers, spec, named, instance, place)
            if place % CHECKED_PER_TICK == CHECKED_PER_TICK - 1:
                await trio.lowlevel.checkpoint()

    def _must_fit(self, instances: Sequence[Mapping[str, Any]]) -> None:
        settings = self._room.settings
        if len(instances) > settings.waiting_max:
            words = f"more than {settings.waiting_max} prompts can't wait in a batch; append the others while it runs"
            raise Impossible(words, code="too_many_prompts", details={"path": "instances"})
        if instances and self._room.members.waiting_bytes >= settings.waiting_bytes_max:
            raise TooMany("the prompts of all batches fill the memory set aside for them", code="window_full")

    async def _must_be_within_quota(self, tenant: str) -> None:
        most = self._room.settings.unacknowledged_bytes_max
        kept = await self._room.reader.ask(lookups.held_bytes, tenant)
        if kept >= most:
            words = f"{kept} bytes of rollouts wait to be acknowledged, and at most {most} may"
            raise TooMany(words, code="quota", retry_after_s=RETRY_AFTER_QUOTA_S)

    async def _is_known(self, batch_id: str, tenant: str, digest: str) -> bool:
        found = await self._room.reader.ask(lookups.candidates, batch_id, tenant)
        if not found:
            return False
        if found[0].state == "forgotten":
            raise Forgotten(f"batch {batch_id} has ended and is forgotten")
        if found[0].digest != digest:
            raise Conflict(f"batch {batch_id} exists with another body", code="batch_exists")
        return True

    # --- looking ------------------------------------------------------------------------------------------------------

    async def get(self, batch_id: str, tenant: str | None) -> BatchRecord:
        """What is known of it now."""
        return self._record(await self._find(batch_id, tenant))

    async def list(self, tenant: str | None, *, limit: int = 50, after: str | None = None) -> BatchPage:
        """Batches, newest first."""
        if after is not None and not (after.isascii() and after.isdigit() and len(after) < 19):
            raise BadRequest("next is not one that this daemon gave", code="bad_cursor", details={"path": "next"})
        before = None if after is None else int(after)
        rows = await self._room.reader.ask(lookups.page, tenant, limit + 1, before)
        more = str(rows[limit - 1].serial) if len(rows) > limit else None
        return BatchPage(items=[self._record(await self._fresh(row)) for row in rows[:limit]], next=more)

    def _record(self, row: BatchRow) -> BatchRecord:
        actor = self.floor.of(row)
        if actor is not None:
            return msgspec.structs.replace(actor.ledger.record(), carried_to=row.claimant_id)
        if row.record is None:
            # Refused in doubt, when the disk did not answer: it is about to be taken back.
            raise Overloaded(f"batch {row.batch_id} was refused", code="journal_failing")
        return msgspec.structs.replace(
            row.record,
            acknowledged=row.acknowledged,
            next_offset=row.next_offset,
            carried_to=row.claimant_id,
            leftovers=row.leftovers,
        )

    async def _find(self, batch_id: str, tenant: str | None) -> BatchRow:
        """The batch that a caller means. An admin means that of the admins' own tenant where there is one."""
        found = [await self._fresh(row) for row in await self._room.reader.ask(lookups.candidates, batch_id, tenant)]
        found = [row for row in found if row.tenant == ADMIN_TENANT] or found
        if not found:
            raise NotFound(f"there is no batch {batch_id}", code="unknown_batch")
        if len(found) > 1:
            owners = sorted(row.tenant for row in found)
            message = f"several tenants have a batch {batch_id}: {', '.join(owners)}"
            raise Conflict(message, code="ambiguous_batch", details={"tenants": owners})
        if found[0].state == "forgotten":
            raise Forgotten(f"batch {batch_id} has ended and is forgotten")
        return found[0]

    async def _fresh(self, row: BatchRow) -> BatchRow:
        """The row, or a newer one where the batch has ended since that was read."""
        if row.state != BatchState.RUNNING.value or self.floor.of(row) is not None:
            return row
        return await self._room.reader.ask(lookups.row, row.serial) or row

    async def events(self, batch_id: str, tenant: str | None, *, after: int, limit: int) -> Sequence[BatchEvent]:
        """Events with a higher number; ``Forgotten`` where some of those were acknowledged long ago."""
        row = await self._find(batch_id, tenant)
        found = await self._room.reader.ask(lookups.events_after, row.serial, after, self._upto(row), limit)
        if found and found[0].seq > max(0, after) + 1:
            kept = found[0].seq - 1
            words = f"the events of batch {row.batch_id} up to number {kept} are acknowledged and forgotten"
            raise Forgotten(words, code="events_forgotten", details={"after": kept})
        return found

    async def groups(
        self,
        batch_id: str,
        tenant: str | None,
        *,
        after: int,
        limit: int,
        max_bytes: int | None = None,
        trajectories: bool = False,
        instances: bool = False,
        packed: bool = False,
    ) -> BatchGroupPage | PackedBatchGroupPage:
        """Accepted groups with a higher number, in order."""
        row = await self._find(batch_id, tenant)
        # Asked before the groups are read: none comes after an end.
        actor = self.floor.of(row)
        state = BatchState(row.state) if actor is None else actor.ledger.state
        items, more = await self._room.reader.ask(
            read_groups, row.serial, row.tenant, after, self._upto(row), limit=limit,
            max_bytes=PAGE_BYTES if max_bytes is None else max_bytes, trajectories=trajectories, instances=instances,
            packed=packed,
        )  # fmt: skip
        kind = PackedBatchGroupPage if packed else BatchGroupPage
        is_over = state is not BatchState.RUNNING and not more
        return kind(items=items, next=str(items[-1].seq) if more else None, state=state, is_over=is_over)

    def _upto(self, row: BatchRow) -> int:
        actor = self.floor.of(row)
        return FOREVER if actor is None else actor.ledger.last_seq

    async def wait_news(self, batch_id: str, tenant: str | None, *, after: int, groups: bool = False) -> None:
        """Wait for an event (or an accepted group) with a higher number, or the end."""
        actor = self.floor.of(await self._find(batch_id, tenant))
        if actor is not None:
            await actor.ledger.wait_news(after, groups=groups)

    # --- changing -----------------------------------------------------------------------------------------------------

    async def acknowledge(self, batch_id: str, tenant: str | None, request: AckBatch) -> AckAnswer:
        """The trainer is done with what came up to a number."""
        row = await self._find(batch_id, tenant)
        actor = self.floor.of(row)
        if actor is not None:
            try:
                return await self._tell(actor, Ack(through=request.through, discard=request.discard), AckAnswer)
            except MailboxClosed:
                pass  # it ended meanwhile, and that changes only who writes it
        check_ack(request.through, await self._room.reader.ask(lookups.last_seq, row.serial))
        must_be_known(await self._room.reader.ask(lookups.unknown_groups, row.serial, request.discard))
        done = Acknowledged(
            serial=row.serial, tenant=row.tenant, through=request.through, discard=tuple(request.discard)
        )
        (ready,) = await self._room.journal.commit(done, grows=False)
        return AckAnswer(through=max(row.acknowledged, request.through), ready=ready)

    async def cancel(self, batch_id: str, tenant: str | None, reason: str) -> BatchRecord:
        """Begin its end; of one that has ended, that of what it left."""
        row = await self._find(batch_id, tenant)
        actor = self.floor.of(row)
        if actor is not None:
            try:
                await self._tell(actor, Stop(ending=Ending(how="cancelled", reason=reason)), object)
            except MailboxClosed:
                actor = None
        if actor is None and (left := self.floor.leftovers.get(row.serial)) is not None:
            await self._room.journal.commit(LeftoversCondemned(serial=row.serial), grows=False)
            left.drop()
        return await self.get(batch_id, row.tenant)

    async def cancel_jobs(self, batch_id: str, tenant: str | None, reason: str) -> int:
        """Begin the end of all jobs of a batch, and of what it left; the batch itself goes on."""
        row = await self._find(batch_id, tenant)
        actor, left = self.floor.of(row), self.floor.leftovers.get(row.serial)
        groups = [*(() if actor is None else actor.groups.values()), *(() if left is None else left.groups)]
        running = [job_id for group in groups for job_id in group.running_ids()]
        if running:
            self._room.jobs.end(row.tenant, running, reason)
        return len(running)

    def running_counts(self) -> dict[str, int]:
        """Batches that run, by purpose."""
        purposes = [actor.ledger.spec.purpose for actor in self.floor.actors.values()]
        return {"train": purposes.count("train"), "eval": purposes.count("eval")}

    async def _tell(self, actor: BatchActor, message: Message, kind: type[T]) -> T:
        # Before it waits behind what the batch itself has to write, for as long as that takes.
        self._room.journal.must_take()
        # ``inbox`` answers each message with its own kind.
        return await actor.ask(message)  # type: ignore[return-value]


async def _group_rows(
    batch_id: str, serial: int, instances: Sequence[Mapping[str, Any]], *, first: int = 0
) -> list[GroupRow]:
    """The groups of these prompts; the loop may look at others meanwhile."""
    rows: list[GroupRow] = []
    for place, one in enumerate(instances, first):
        rows.append(group_row(batch_id, serial, place, one))
        if len(rows) % MADE_PER_TICK == 0:
            await trio.lowlevel.checkpoint()
    return rows
