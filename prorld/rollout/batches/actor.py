"""One batch that runs: an actor around its book.

It hears of ended samples, of appended prompts, of acknowledgements, of versions and of the time, asks the book what
follows, and does it in an order in which a kill at any instant loses nothing: a group starts in one commit with its
jobs; its terminal event is written when none of its jobs is left, and is shown when it is written.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.domain.batch import BatchBook, BatchState, CancelSamples, Decision, End, Settle, Start, Wants
from prorld.domain.group import GroupEnd, SampleEnd
from prorld.errors import Conflict, Overloaded, RequestError
from prorld.kit.mailbox import Mailbox
from prorld.rollout.batches.inbox import Ack, Append, Message, Stop, acknowledge, append
from prorld.rollout.batches.ledger import Ledger
from prorld.rollout.batches.members import Group, never_ran
from prorld.rollout.batches.room import Room
from prorld.store.batches import Ending, EndingNoted, GroupsStarted, RanFor, Unclaimed

__all__ = ["BatchActor"]

log: FilteringBoundLogger = structlog.get_logger("prorld.rollout")

MAILBOX_SIZE = 64
# Jobs that are accepted in one commit; more of them would make others wait for it.
STARTS_PER_COMMIT = 128
# Groups whose ends are told in one: some milliseconds of the loop.
SETTLED_PER_COMMIT = 512
# How often it is written how long a batch with a bound on that has run.
RAN_EVERY_S = 5.0
LOOK_AGAIN_S_MIN = 0.001
# How soon it looks again when there is no room for the jobs of one group.
ROOM_RETRY_S = 0.25
# A job's id that is taken by a client's own job is made anew; nobody collides with random ones.
SALTS_MAX = 3


class BatchActor:
    """A batch. ``run`` is the actor; it returns when the batch is over and all of it is written."""

    def __init__(self, room: Room, ledger: Ledger, book: BatchBook, *, ran_s: float = 0.0) -> None:
        self.room = room
        self.ledger = ledger
        self.book = book
        self.groups: dict[str, Group] = {}
        self.unacknowledged: dict[str, int] = {}
        self.ending: Ending | None = None
        self._failing: Ending | None = None
        self.held_back: list[Group] = []
        # The batch whose leftovers it is to get, until they are on their way to it.
        self.awaited: int | None = None
        self._mailbox: Mailbox[Message] = Mailbox(f"batch {ledger.spec.batch_id}", MAILBOX_SIZE)
        self._wake = trio.Event()
        self._heard: deque[tuple[str, SampleEnd]] = deque()
        self._to_start: deque[str] = deque()
        self._to_settle: dict[str, Settle] = {}
        self._end: End | None = None
        self._retry_at = -math.inf
        self._one_by_one = False
        self._ran_before = ran_s
        self._since: float | None = None
        self._ran_told = ran_s

    def __repr__(self) -> str:
        return f"<BatchActor {self.ledger.spec.batch_id}>"

    # --- what it is told ----------------------------------------------------------------------------------------------

    def poke(self) -> None:
        """Something has changed: look again."""
        self._wake.set()

    def hear(self, group: Group, end: SampleEnd) -> None:
        """A sample has ended."""
        self._heard.append((group.group_id, end))
        self.poke()

    def take(self, groups: Sequence[Group], *, at: int) -> None:
        """These groups are its own now, with whatever of them runs or has ended; ``at`` is the index of the first."""
        self.book.append([group.group_id for group in groups], at=at)
        for group in groups:
            group.owner = self
            self.groups[group.group_id] = group
            if group.row.is_started:
                self.book.started(group.group_id)
            for end in group.samples.values():
                self.book.sample_ended(group.group_id, end)
        self.poke()

    def arrive(self, carried: Sequence[Group]) -> None:
        """What it was to get from another batch is there: those groups come first, and now it begins."""
        self.ledger.carried_in = len(carried)
        self.take(carried, at=0)
        own, self.held_back = self.held_back, []
        self.take(own, at=len(carried))

    async def ask(self, message: Message) -> object:
        """Say something to it and wait for the answer. ``MailboxClosed`` when it is over."""
        # It wakes when this task waits, and then the message is there.
        self.poke()
        return await self._mailbox.ask(message.bind)

    def fail(self, cause: str) -> None:
        """The circuit breaker opened."""
        self._failing = Ending(how="failed", reason=cause)
        self.poke()

    @property
    def ran_s(self) -> float:
        """How long it has run, in all lives of the daemon."""
        return self._ran_before + (0.0 if self._since is None else trio.current_time() - self._since)

    # --- its life -----------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Go on until the batch is over."""
        with self._mailbox.receive() as inbox:
            task_status.started()
            while not await self._step(inbox):
                with trio.move_on_at(self._look_again_at()):
                    await self._wake.wait()

    async def _step(self, inbox: trio.MemoryReceiveChannel[Message]) -> bool:
        """Everything that can be done now; whether it is over."""
        self._wake = trio.Event()
        await self._read(inbox)
        if self._failing is not None and self.ending is None:
            await self._stop(self._failing, is_owed=True)
        if self.ledger.carried_in is None:
            # What is on its way to it has to arrive first, also where it has to end.
            if self.ending is None or self.awaited is None:
                return False
            self.arrive([])
        await self._count_time()
        self._decide()
        await self._write_settled()
        if self._end is not None and all(settle.end is GroupEnd.CARRIED for settle in self._to_settle.values()):
            await self._write_end(self._end)
            return True
        await self._start_some()
        return False

    def _look_again_at(self) -> float:
        """When something is due that nobody tells of."""
        if self.ledger.carried_in is None:
            return math.inf
        grace_ends = self.book.next_look_at()
        at = [math.inf if grace_ends is None else grace_ends]
        if self._to_start and self._retry_at > trio.current_time():
            at.append(self._retry_at)
        elif not self.room.breakers.allows(self.ledger.spec):
            at.append(self.room.breakers.next_look_at(self.ledger.spec))
        if self.ledger.spec.max_wall_s is not None and self._end is None:
            left = self.ledger.spec.max_wall_s - self.ran_s
            # Never at once: what is left may be less than the clock can tell.
            at.append(trio.current_time() + max(LOOK_AGAIN_S_MIN, min(left, RAN_EVERY_S)))
        return min(at)

    async def _read(self, inbox: trio.MemoryReceiveChannel[Message]) -> None:
        while True:
            await trio.lowlevel.checkpoint()
            try:
                message = inbox.receive_nowait()
            except (trio.WouldBlock, trio.EndOfChannel):
                return
            try:
                message.reply.answer(await self._answer(message))
            except RequestError as exc:
                message.reply.fail(exc)

    async def _answer(self, message: Message) -> object:
        match message:
            case Append():
                return await append(self, message)
            case Ack():
                return await acknowledge(self, message)
            case Stop():
                await self._stop(message.ending)
                return None
            case _:
                raise AssertionError(message)

    async def _stop(self, ending: Ending, *, is_owed: bool = False) -> None:
        """Written first, so that a later life ends it, too."""
        if self._end is not None or (self.ending is not None and ending.how != "cancelled"):
            return
        change = EndingNoted(serial=self.ledger.serial, ending=ending)
        await (self.room.journal.owe(change) if is_owed else self.room.journal.commit(change, grows=False))
        self.end_with(ending)

    def end_with(self, ending: Ending) -> None:
        """It has to end, and that is written."""
        self.ending = self.ending or ending
        match ending.how:
            case "cancelled":
                self.book.cancel(ending.reason)
            case "failed":
                self.book.fail(ending.reason)
            case "time":
                self.book.time_is_up()
        self.poke()

    async def _count_time(self) -> None:
        """How long it runs counts from its first look, and is written now and then where somebody bounds it."""
        self._since = trio.current_time() if self._since is None else self._since
        most, ran_s = self.ledger.spec.max_wall_s, self.ran_s
        if most is None or self._end is not None:
            return
        if ran_s >= most:
            await self._stop(Ending(how="time", reason="max_wall_s has passed"), is_owed=True)
        elif ran_s - self._ran_told >= RAN_EVERY_S:
            self._ran_told = ran_s
            await self.room.journal.owe(RanFor(serial=self.ledger.serial, ran_s=ran_s))

    async def give_up(self) -> None:
        """After a bug of ours: end what runs, and tell the end of every group and of the batch all the same."""
        while self.ledger.carried_in is None and self.awaited is None:
            self._wake = trio.Event()
            await self._wake.wait()
        if self.ledger.carried_in is None:
            self.arrive([])
        self._end = self.book.end or End(state=BatchState.FAILED, reason="a bug of the service's: see its log")
        for group_id, group in self.groups.items():
            self._end_jobs(group, None, self._end.reason)
            index = group.row.place + (self.ledger.carried_in or 0) * group.row.is_own
            self._to_settle[group_id] = Settle(
                group_id=group_id, index=index, end=GroupEnd.CANCELLED, reason=self._end.reason
            )
        while self._to_settle:
            self._wake = trio.Event()
            await self._write_settled()
            if self._to_settle:
                await self._wake.wait()
        await self._write_end(self._end)

    # --- decisions ----------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        while self._heard:
            group_id, end = self._heard.popleft()
            self.book.sample_ended(group_id, end)
        if self.ledger.is_last:
            self.book.no_more()
        self._follow()
        is_idle = not (self.book.waiting or self.book.running or self.book.held)
        if is_idle and self.ledger.closes and not self.book.is_over:
            self.book.no_more()
            self._follow()

    def _follow(self) -> None:
        policy = self.room.policies.now(self.ledger.spec.policy)
        may_start = not self._to_start and self.room.breakers.allows(self.ledger.spec)
        for decision in self.book.decide(trio.current_time(), policy, may_start=may_start):
            self._act(decision)

    def _act(self, decision: Decision) -> None:
        match decision:
            case Start():
                self._to_start.append(decision.group_id)
            case CancelSamples():
                group = self.groups[decision.group_id]
                self._end_jobs(group, decision.samples, decision.reason)
            case Settle():
                self._to_settle[decision.group_id] = decision
                group = self.groups[decision.group_id]
                if decision.group_id in self._to_start:
                    self._to_start.remove(decision.group_id)
                if decision.end is not GroupEnd.CARRIED:
                    words = f"group {decision.group_id} is {decision.end.value}: {decision.reason}".rstrip(": ")
                    self._end_jobs(group, None, words)
            case Wants():
                self.ledger.wants = decision.total
            case End():
                self._end = decision

    def _end_jobs(self, group: Group, samples: Sequence[int] | None, reason: str) -> None:
        running = group.running_ids(samples)
        if running:
            self.room.jobs.end(self.ledger.spec.tenant, running, reason)

    async def _write_settled(self) -> None:
        """The terminal events of groups that have nothing left that runs, and what else there is to tell."""
        done = [
            settle
            for settle in self._to_settle.values()
            if settle.end is not GroupEnd.CARRIED and not self.groups[settle.group_id].runs
        ][:SETTLED_PER_COMMIT]
        if not done and not self.ledger.has_news:
            return
        told = await self.ledger.tell([(settle, self.groups[settle.group_id]) for settle in done], ran_s=self.ran_s)
        for settle, seq in zip(done, told, strict=True):
            del self._to_settle[settle.group_id]
            if settle.end is GroupEnd.DONE:
                self.unacknowledged[settle.group_id] = seq
            self.room.members.forget(self.groups.pop(settle.group_id))
        if done:
            self.poke()

    async def _write_end(self, end: End) -> None:
        """The end, with all that is carried: a batch that ends has either told all of that or nothing."""
        carried = [(settle, self.groups[group_id]) for group_id, settle in self._to_settle.items()]
        claims = [] if self.awaited is None else [Unclaimed(serial=self.ledger.serial, source=self.awaited)]
        await self.ledger.end(end, carried, *claims, ran_s=self.ran_s)
        self._to_settle.clear()

    # --- starting -----------------------------------------------------------------------------------------------------

    async def _start_some(self) -> None:
        """Start as many groups as there is room for, a bounded number of jobs a commit. The others wait."""
        if trio.current_time() < self._retry_at:
            return
        size = self.ledger.spec.rules.samples_per_group
        while self._to_start and self.room.breakers.allows(self.ledger.spec):
            # A group that is larger than all room is tried, and refused for good.
            if self.room.jobs.room() < size <= self.room.settings.jobs_max:
                self._retry_at = trio.current_time() + ROOM_RETRY_S
                return
            fitting = max(1, min(STARTS_PER_COMMIT, self.room.jobs.room()) // size)
            if self._one_by_one or self.room.breakers.is_careful(self.ledger.spec):
                fitting = 1
            chosen = [self.groups[self._to_start[n]] for n in range(min(fitting, len(self._to_start)))]
            if not await self._start(chosen):
                return
        if not self._to_start:
            self._retry_at = -math.inf

    async def _start(self, chosen: Sequence[Group]) -> bool:
        """Start these in one commit; whether more may follow at once."""
        for group in chosen:
            group.change(is_started=True)
        rows = [(group.row.is_own, group.row.place, group.row.salt) for group in chosen]
        try:
            await self.room.jobs.start(
                [job for group in chosen for job in group.jobs()], GroupsStarted(serial=self.ledger.serial, groups=rows)
            )
        except RequestError as exc:
            for group in chosen:
                group.change(is_started=False)
            return self._not_started(chosen, exc)
        self._one_by_one = False
        for group in chosen:
            self._to_start.popleft()
            self.room.breakers.started(self.ledger.spec, group.size)
        return True

    def _not_started(self, chosen: Sequence[Group], exc: RequestError) -> bool:
        if isinstance(exc, Overloaded):
            self._retry_at = trio.current_time() + exc.retry_after_s
            return False
        if len(chosen) > 1:
            # One of them is the cause: it is found by trying them one by one.
            self._one_by_one = True
            return True
        first = chosen[0]
        if isinstance(exc, Conflict) and first.salts < SALTS_MAX:
            first.new_salt()
            return True
        log.warning("group.unstarted", batch_id=self.ledger.spec.batch_id, group_id=first.group_id, error=exc.message)
        self._to_start.popleft()
        for sample in range(first.size):
            self.hear(first, never_ran(sample, exc.stable_code))
        return True
