"""Where batches live: the nursery of their actors, what ended ones left, and who gets that.

It is an actor: batches are admitted one after the other, so that an id or a claim is taken by one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar

import msgspec
import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.domain.batch import BatchBook
from prorld.errors import Conflict, Forgotten, Impossible, NotFound, Overloaded
from prorld.kit.mailbox import Mailbox, MailboxClosed, Reply
from prorld.rollout.batches.actor import BatchActor
from prorld.rollout.batches.breakers import Key
from prorld.rollout.batches.ledger import Ledger
from prorld.rollout.batches.leftovers import Leftovers
from prorld.rollout.batches.members import Group
from prorld.rollout.batches.restore import Restorer
from prorld.rollout.batches.room import Room
from prorld.store import batch_lookups as lookups
from prorld.store.batch_keeping import BatchesForgotten, EventsForgotten
from prorld.store.batch_lookups import BatchRow
from prorld.store.batches import BatchAccepted, BatchSpec, Claimed, GroupRow, LeftoversMoved

__all__ = ["Floor"]

log: FilteringBoundLogger = structlog.get_logger("prorld.rollout")

T = TypeVar("T")

MAILBOX_SIZE = 256
FORGET_EVERY_S = 300.0
# A few milliseconds of the writer, unless one of them was a stream of weeks.
FORGOTTEN_PER_COMMIT = 8
EVENTS_PER_COMMIT = 256
RETRY_AFTER_FULL_S = 2.0


@dataclass
class _Errand:
    work: Callable[[], Awaitable[Any]]
    reply: Reply[Any]


class Floor:
    """All batches that run, and all leftovers. ``restore`` first, then ``run``."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.actors: dict[int, BatchActor] = {}
        self.leftovers: dict[int, Leftovers] = {}
        self.unpinned = trio.Event()
        self._claimants: dict[int, BatchActor] = {}
        self._restored: list[BatchActor] = []
        self._serial = 0
        self._mailbox: Mailbox[_Errand] = Mailbox("batches", MAILBOX_SIZE)
        self._nursery: trio.Nursery | None = None
        room.jobs.listen(room.members.ended)
        room.jobs.listen(room.breakers.ended)
        room.policies.listen(self._moved)
        room.breakers.opened = self._fail_all
        room.breakers.closed = self._poke_all

    def _moved(self, policy: str) -> None:
        for actor in self.actors.values():
            if actor.ledger.spec.policy == policy:
                actor.poke()

    def _fail_all(self, key: Key, cause: str) -> None:
        """A breaker opened: rather end its training batches than burn their prompts."""
        for actor in self._training(key):
            actor.fail(cause)

    def _poke_all(self, key: Key) -> None:
        for actor in self._training(key):
            actor.poke()

    def _training(self, key: Key) -> list[BatchActor]:
        return [
            actor
            for actor in self.actors.values()
            if (spec := actor.ledger.spec).purpose == "train" and (spec.tenant, spec.handler, spec.policy) == key
        ]

    # --- its life -----------------------------------------------------------------------------------------------------

    async def restore(self) -> None:
        """Read what an earlier life left; nothing of it runs before ``run``."""
        restorer = Restorer(self.room)
        self._serial = await self.room.journal.read(lookups.newest_batch)
        for left in await restorer.lingering():
            self.leftovers[left.serial] = left
        for row, actor in await restorer.running():
            self.actors[row.serial] = actor
            if row.source is not None and row.carried_in is None:
                self._expect(actor, row.source)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Let batches live until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for left in self.leftovers.values():
                nursery.start_soon(self._keep, left, name=f"leftovers of {left.spec.batch_id}")
            for actor in list(self.actors.values()):
                self._start(actor)
            for source in list(self._claimants):
                await self._hand_over(source)
            nursery.start_soon(self._keep_forgetting, name="forgetting batches")
            with self._mailbox.receive() as inbox:
                task_status.started()
                async for errand in inbox:
                    try:
                        errand.reply.answer(await errand.work())
                    except Exception as exc:  # noqa: BLE001  (every error belongs to the asker; the actor goes on)
                        errand.reply.fail(exc)

    async def forget(self, *, before: str) -> int:
        """Forget ended batches that nobody needs, that are too old, too many or too large; how many."""
        settings, total = self.room.settings, 0
        count, size = await self.room.reader.ask(lookups.forgettable)
        count, size = max(0, count - settings.ended_max), max(0, size - settings.ended_bytes_max)
        while True:
            change = BatchesForgotten(before=before, most=FORGOTTEN_PER_COMMIT, count=count, bytes=size)
            gone: list[int]
            (gone,) = await self.room.journal.owe(change)
            count, size, total = max(0, count - len(gone)), max(0, size - sum(gone)), total + len(gone)
            if len(gone) < FORGOTTEN_PER_COMMIT:
                return total

    async def forget_events(self) -> int:
        """Forget old events of batches that run, which are acknowledged; how many."""
        total = 0
        for serial in list(self.actors):
            gone = EVENTS_PER_COMMIT
            while gone == EVENTS_PER_COMMIT:
                change = EventsForgotten(serial=serial, keep=self.room.settings.events_kept, most=EVENTS_PER_COMMIT)
                (gone,) = await self.room.journal.owe(change)
                total += gone
        return total

    async def _keep_forgetting(self) -> None:
        while True:
            await trio.sleep(FORGET_EVERY_S)
            now = datetime.fromisoformat(self.room.clock.wall())
            before = now - timedelta(seconds=self.room.settings.forget_after_s)
            try:
                await self.forget(before=f"{before:%Y-%m-%dT%H:%M:%S}.000Z")
                await self.forget_events()
            except Overloaded as exc:
                # The journal has told of it already.
                log.debug("journal.failing", error=exc.message)

    async def ask(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do it in the actor's task; a client that goes away interrupts nothing."""
        try:
            return await self._mailbox.ask(partial(_Errand, work))
        except MailboxClosed as exc:
            raise Overloaded("the daemon is going away", code="closing") from exc

    def _start(self, actor: BatchActor) -> None:
        assert self._nursery is not None
        self._nursery.start_soon(self._live, actor, name=f"batch {actor.ledger.spec.batch_id}")

    async def _live(self, actor: BatchActor) -> None:
        ledger = actor.ledger
        try:
            await actor.run()
        except Exception as exc:
            log.exception("batch.crashed", exc_info=exc, batch_id=ledger.spec.batch_id, tenant=ledger.spec.tenant)
            await actor.give_up()
        # Without an await: whoever looks finds it running, or what it left.
        del self.actors[ledger.serial]
        if actor.groups:
            self._linger(Leftovers(self.room, ledger.spec, ledger.serial, list(actor.groups.values())))
        self._note_unpinned()
        record = ledger.record()
        log.info("batch.ended", batch_id=ledger.spec.batch_id, tenant=ledger.spec.tenant, state=record.state.value,
                 reason=record.reason, **msgspec.structs.asdict(record.groups))  # fmt: skip
        if actor.awaited is not None:
            # Written with its end: what it waited for is free again.
            del self._claimants[actor.awaited]
        await self._hand_over(ledger.serial)

    def _linger(self, left: Leftovers) -> None:
        assert self._nursery is not None
        self.leftovers[left.serial] = left
        self._nursery.start_soon(self._keep, left, name=f"leftovers of {left.spec.batch_id}")

    async def _keep(self, left: Leftovers) -> None:
        await left.keep()
        if self.leftovers.get(left.serial) is left:
            del self.leftovers[left.serial]

    def _note_unpinned(self) -> None:
        news, self.unpinned = self.unpinned, trio.Event()
        news.set()

    # --- admission ----------------------------------------------------------------------------------------------------

    async def accept(
        self,
        spec: BatchSpec,
        digest: str,
        rows: Callable[[int], Awaitable[list[GroupRow]]],
        known: Callable[[], Awaitable[bool]],
        *,
        is_last: bool,
    ) -> tuple[int, bool]:
        """Take a batch in; its serial number, and whether it is new. ``rows`` makes its groups."""
        if await known():
            return 0, False
        if len(self.actors) >= self.room.settings.running_max:
            raise Overloaded(f"{len(self.actors)} batches run already", retry_after_s=RETRY_AFTER_FULL_S)
        source = None if spec.carry_from is None else await self._claimable(spec)
        self._serial += 1
        serial = self._serial
        made = await rows(serial)
        created_at = self.room.clock.wall()
        accepted = BatchAccepted(
            serial=serial, spec=spec, digest=digest, created_at=created_at, groups=made, is_last=is_last,
            source=None if source is None else source.serial,
        )  # fmt: skip
        claims = [] if source is None else [Claimed(serial=serial, source=source.serial, source_id=source.batch_id)]
        left = None if source is None else self.leftovers.get(source.serial)
        book = BatchBook(spec.rules)
        ledger = Ledger(self.room, spec, serial, created_at, book)
        ledger.next_offset, ledger.is_last = len(made), is_last
        ledger.carried_in = 0 if source is None else None
        actor = BatchActor(self.room, ledger, book)
        # Known before it is on the disk: whoever finds it there finds it here, too.
        self.actors[serial] = actor
        with nullcontext() if left is None else left.held():
            try:
                await self.room.journal.commit(accepted, *claims)
            except BaseException:
                del self.actors[serial]
                raise
            groups = [Group(row, spec) for row in made]
            for group in groups:
                self.room.members.add(group)
            if source is None:
                actor.take(groups, at=0)
            else:
                actor.held_back = groups
                self._expect(actor, source.serial)
            self._start(actor)
            if source is not None:
                await self._hand_over(source.serial)
        log.info("batch.accepted", batch_id=spec.batch_id, tenant=spec.tenant, handler=spec.handler, groups=len(made))
        return serial, True

    # --- leftovers ----------------------------------------------------------------------------------------------------

    async def _claimable(self, spec: BatchSpec) -> BatchRow:
        """The batch that another one wants to carry on from."""
        assert spec.carry_from is not None
        found = await self.room.reader.ask(lookups.candidates, spec.carry_from, spec.tenant)
        if not found:
            raise NotFound(f"there is no batch {spec.carry_from}", code="unknown_batch")
        source, theirs = found[0], found[0].spec
        if theirs is None:
            raise Forgotten(f"batch {spec.carry_from} has ended and is forgotten")
        if source.carried_to is not None:
            message = f"what batch {source.batch_id} leaves is taken by another batch"
            raise Conflict(message, code="carry_taken", details={"batch_id": source.batch_id})
        if source.is_expired or (source.serial in self.leftovers and not self.leftovers[source.serial].groups):
            raise Forgotten(f"nobody claimed what batch {source.batch_id} left in time", code="leftovers_expired")
        mine = (spec.handler, spec.policy, spec.rules.samples_per_group)
        for name, here, there in zip(
            ("handler", "policy", "samples_per_group"),
            mine,
            (theirs.handler, theirs.policy, theirs.rules.samples_per_group),
            strict=True,
        ):
            if here != there:
                words = f"batch {source.batch_id} has {name} {there}, and this one {here}"
                raise Impossible(words, code="carry_mismatch", details={"path": name})
        return source

    def _expect(self, actor: BatchActor, source: int) -> None:
        self._claimants[source] = actor
        actor.awaited = source

    async def _hand_over(self, source: int) -> None:
        """Give what a batch left to its claimant, as soon as both are there."""
        actor = self._claimants.get(source)
        # One that is about to end without it has let go already.
        if actor is None or source in self.actors or actor.ledger.carried_in is not None:
            return
        del self._claimants[source]
        actor.awaited = None
        left = self.leftovers.pop(source, None)
        groups = () if left is None else left.claim()
        await self.room.journal.owe(LeftoversMoved(source=source, serial=actor.ledger.serial))
        for place, group in enumerate(groups):
            group.change(is_own=False, place=place, end=None)
        actor.arrive(groups)

    # --- what others ask ----------------------------------------------------------------------------------------------

    def pinned(self, policy: str) -> list[tuple[str, str]]:
        """Batches that want a policy to stay as it is, each with its tenant."""
        specs = (actor.ledger.spec for actor in self.actors.values())
        return [(spec.tenant, spec.batch_id) for spec in specs if spec.policy == policy and spec.pin_version]

    async def wait_unpinned(self, policy: str) -> None:
        """Wait until none does. The caller's scope bounds the wait."""
        await trio.lowlevel.checkpoint()
        while self.pinned(policy):
            await self.unpinned.wait()

    def of(self, row: BatchRow) -> BatchActor | None:
        """The actor of a batch, while it runs."""
        return self.actors.get(row.serial)

    def running(self) -> Iterator[BatchActor]:
        """All that run, oldest first."""
        return iter(list(self.actors.values()))
