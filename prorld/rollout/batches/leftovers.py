"""What an ended batch leaves: groups that wait, run or have run, for the next batch to claim, or to be dropped in time.

Their jobs go on meanwhile. One claimant gets all of them at once; after ``carry_ttl_s`` they are ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import trio

from prorld.domain.group import SampleEnd
from prorld.rollout.batches.members import Group
from prorld.rollout.batches.room import Room
from prorld.store.batches import BatchSpec, LeftoversCondemned, LeftoversDropped

__all__ = ["Leftovers"]


class Leftovers:
    """The leftovers of one batch. ``keep`` is the task that drops them when nobody came."""

    def __init__(
        self, room: Room, spec: BatchSpec, serial: int, groups: Sequence[Group], *, is_condemned: bool = False
    ) -> None:
        """``is_condemned``: an earlier life of the daemon had begun to drop them."""
        self.spec = spec
        self.serial = serial
        self._groups = list(groups)
        self._room = room
        self._scope = trio.CancelScope()
        self._give_up = trio.Event()
        self._is_dropped = False
        self._holders = 0
        self._let_go = trio.Event()
        self._wake = trio.Event()
        for group in self._groups:
            group.owner = self
        if is_condemned:
            self.drop()

    def __len__(self) -> int:
        return 0 if self._is_dropped else len(self._groups)

    @property
    def groups(self) -> Sequence[Group]:
        """Those that can still be claimed."""
        return () if self._is_dropped else self._groups

    def hear(self, group: Group, end: SampleEnd) -> None:
        """A sample has ended."""
        self._wake.set()

    @contextmanager
    def held(self) -> Iterator[None]:
        """In the block they are not dropped: somebody is about to claim them."""
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
            let_go, self._let_go = self._let_go, trio.Event()
            let_go.set()

    def claim(self) -> Sequence[Group]:
        """All of them, for good."""
        assert not self._is_dropped
        self._scope.cancel("the leftovers are claimed")
        return self._groups

    def drop(self) -> None:
        """Nobody shall have them, unless somebody has already."""
        self._give_up.set()

    async def keep(self) -> None:
        """Wait for a claim; without one end their jobs, and write that they are gone when they are."""
        with self._scope:
            with trio.move_on_after(self.spec.carry_ttl_s):
                await self._give_up.wait()
            while self._holders:
                await self._let_go.wait()
            # From here on nobody can claim them.
            self._is_dropped = True
        if self._is_dropped:
            await self._drop()

    async def _drop(self) -> None:
        # First of all: a later life must not offer what has begun to end.
        await self._room.journal.owe(LeftoversCondemned(serial=self.serial))
        reason = f"nobody claimed what batch {self.spec.batch_id} left"
        running = [job_id for group in self._groups for job_id in group.running_ids()]
        if running:
            self._room.jobs.end(self.spec.tenant, running, reason)
        while any(group.runs for group in self._groups):
            self._wake = trio.Event()
            await self._wake.wait()
        await self._room.journal.owe(LeftoversDropped(serial=self.serial, tenant=self.spec.tenant))
        for group in self._groups:
            self._room.members.forget(group)
