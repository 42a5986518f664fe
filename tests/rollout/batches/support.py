"""A room of batches over jobs that end when the test says so, on a clock of its own and a real journal."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import trio
from trio.testing import wait_all_tasks_blocked

from prorld.domain.batch import PolicyNow
from prorld.domain.versions import PolicyVersion
from prorld.handlers.registry import Registry
from prorld.metrics import Metrics
from prorld.rollout.batches.breakers import Breakers
from prorld.rollout.batches.floor import Floor
from prorld.rollout.batches.room import Room
from prorld.rollout.batches.service import Batches
from prorld.rollout.batches.settings import BatchSettings
from prorld.rollout.clock import SystemClock
from prorld.rollout.events import Feed
from prorld.store.journal import Journal
from prorld.store.reader import Reader
from prorld.testing.group_jobs import GroupJobs
from prorld.testing.handlers import FakeHandler
from prorld.testing.inline_lane import InlineLane
from prorld.wire.batches import AckAnswer, AckBatch, AppendAnswer, AppendInstances, BatchEvent, BatchRecord, SubmitBatch

TENANT = "default"


class FakePolicies:
    """Policies with a version that the test moves."""

    def __init__(self) -> None:
        self.versions = {"default": 0, "other": 0}
        self._listeners: list[Callable[[str], None]] = []

    def __contains__(self, policy: object) -> bool:
        return policy in self.versions

    def now(self, policy: str) -> PolicyNow:
        return PolicyNow(version=PolicyVersion(0, self.versions[policy]))

    def listen(self, moved: Callable[[str], None]) -> None:
        self._listeners.append(moved)

    def move(self, version: int, policy: str = "default") -> None:
        self.versions[policy] = version
        for listener in self._listeners:
            listener(policy)


class Life:
    """One life of the daemon, as far as batches are concerned."""

    def __init__(self, journal: Journal, jobs: GroupJobs, policies: FakePolicies, settings: BatchSettings) -> None:
        self.journal = journal
        self.jobs = jobs
        self.policies = policies
        self.metrics = Metrics()
        clock = SystemClock()
        self.feed = Feed(clock)
        self.reader = Reader(journal.path, lane=InlineLane())
        self.draining = False
        self.room = Room(
            journal=journal, reader=self.reader, jobs=jobs, policies=policies, breakers=Breakers(), clock=clock,
            feed=self.feed, metrics=self.metrics, settings=settings,
        )  # fmt: skip
        self.floor = Floor(self.room)
        registry = Registry()
        registry.add(FakeHandler(msgspec.Struct()))
        self.batches = Batches(self.floor, registry, captures=frozenset(), is_draining=lambda: self.draining)

    # --- what a client does -------------------------------------------------------------------------------------------

    async def submit(self, tenant: str = TENANT, /, **body: Any) -> BatchRecord:
        record, is_new = await self.submitted(tenant, **body)
        assert is_new
        return record

    async def submitted(self, tenant: str = TENANT, /, **body: Any) -> tuple[BatchRecord, bool]:
        body = {"handler": "fake", "batch_id": "b", "samples_per_group": 2} | body
        digest = hashlib.sha256(msgspec.json.encode(body, order="deterministic")).hexdigest()
        request = msgspec.convert(body, SubmitBatch)
        return await self.batches.submit(request, tenant, digest=digest)

    async def append(self, offset: int, count: int, batch_id: str = "b", *, last: bool = False) -> AppendAnswer:
        asked = AppendInstances(offset=offset, instances=prompts(count, first=offset), last=last)
        return await self.batches.append(batch_id, TENANT, asked)

    async def ack(self, through: int, batch_id: str = "b", discard: list[str] | None = None) -> AckAnswer:
        return await self.batches.acknowledge(batch_id, TENANT, AckBatch(through=through, discard=discard or []))

    async def events(self, batch_id: str = "b", *, after: int = 0) -> list[BatchEvent]:
        await settled()
        return list(await self.batches.events(batch_id, TENANT, after=after, limit=10_000))

    async def ends(self, batch_id: str = "b") -> list[tuple[str, str]]:
        """The terminal events of groups: which group, which end."""
        return [
            (str(event.group_id).rpartition(":")[2], event.event.removeprefix("group."))
            for event in await self.events(batch_id)
            if event.event.startswith("group.")
        ]

    async def get(self, batch_id: str = "b") -> BatchRecord:
        await settled()
        return await self.batches.get(batch_id, TENANT)

    # --- what jobs do -------------------------------------------------------------------------------------------------

    async def finish(self, group: str, *rewards: float | None, **options: Any) -> None:
        """The samples of a group end with these rewards."""
        await settled()
        for sample, reward in enumerate(rewards):
            await self.jobs.finish(f"{group}:{sample}", reward=reward, **options)
        await settled()

    def running(self) -> list[str]:
        """The groups whose jobs run."""
        found = {spec.group_id: None for _, spec in self.jobs.live.values() if spec.group_id is not None}
        return list(found)


def prompts(count: int, *, first: int = 0) -> list[dict[str, Any]]:
    return [{"prompt": f"question {n}"} for n in range(first, first + count)]


async def settled() -> None:
    """Until everybody waits for something, the journal's pause for company included."""
    for _ in range(3):
        await wait_all_tasks_blocked()
        await trio.sleep(0.03)


@asynccontextmanager
async def life(
    path: Path, *, settings: BatchSettings | None = None, policies: FakePolicies | None = None, **jobs: Any
) -> AsyncIterator[Life]:
    """A life that ends as by a kill: what was not written is not known to the next one."""
    journal = Journal(path, lane=InlineLane())
    await journal.open()
    made = GroupJobs(journal, **jobs)
    one = Life(journal, made, policies or FakePolicies(), settings or BatchSettings())
    async with trio.open_nursery() as nursery:
        await nursery.start(journal.run)
        await nursery.start(made.run)
        await made.restore()
        await one.floor.restore()
        await nursery.start(one.floor.run)
        yield one
        nursery.cancel_scope.cancel()
