"""A pool over fakes that are made by address, for the tests of the pool."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio

from prorld.domain.job import Sampling
from prorld.domain.versions import PolicyVersion
from prorld.errors import Conflict
from prorld.inference.contract import Capabilities, EngineLoad, GenerationRequest, WeightRef
from prorld.inference.lease import Lease
from prorld.inference.pool import BackendPool
from prorld.inference.pool_entry import EngineRules
from prorld.metrics import Metrics
from prorld.testing.fake_backend import FakeBackend
from prorld.testing.scripted_engine.script import Latency, Script
from prorld.wire.ops import AddBackend, BackendInfo, BackendSet, SetBackend, SetBackends

SECOND = Script(latency=Latency(fixed_s=1.0))


class Keeper:
    """Who keeps one version for all policies, and takes every engine as it is."""

    def __init__(self, *, paused: bool = False) -> None:
        self.paused = paused
        self.version = PolicyVersion()
        self.kept: list[PolicyVersion] = []

    def must_know(self, policy: str) -> None:
        """Everybody is known."""

    def must_be_free(self, policy: str, pause_id: str | None = None) -> None:
        """Nobody changes anything."""

    def is_paused(self, policy: str) -> bool:
        """As the test says."""
        return self.paused

    def objection(self, policy: str, found: Capabilities) -> str | None:
        """None."""
        return None

    def weights(self, policy: str) -> WeightRef | None:
        """Those that engines begin with."""
        return None

    def declared(self, policy: str, version: int) -> PolicyVersion:
        """Versions do not fall."""
        if version < self.version.version:
            raise Conflict("lower", code="version_too_low")
        return PolicyVersion(0, version)

    def has_now(self, policy: str, version: PolicyVersion) -> None:
        """Remember it."""
        self.version = version

    async def keep(self, policy: str) -> None:
        """Remember that it was written down."""
        await trio.lowlevel.checkpoint()
        self.kept.append(self.version)


class World:
    """A running pool over fakes that are made by address."""

    def __init__(self, rules: EngineRules | None = None, *, make: Callable[[str], FakeBackend] | None = None) -> None:
        self.fakes: dict[str, FakeBackend] = {}
        self.metrics = Metrics()
        self.pool = BackendPool({"vllm": self._make}, self.metrics, rules=rules)
        self._made = make or _fake

    def _make(self, request: AddBackend) -> FakeBackend:
        if "bad" in request.url:
            raise ValueError("not a plain address")
        # A client that was closed is of no use any more; the engine behind it may well be there.
        known = self.fakes.get(request.url)
        if known is None or known.is_closed:
            known = self.fakes[request.url] = self._made(request.url)
        return known

    async def add(self, name: str, **options: Any) -> str:
        """Add the fake of this name; its id."""
        wish: dict[str, Any] = {"kind": "vllm", **options}
        return (await self.pool.add(AddBackend(url=f"http://{name}", **wish))).backend_id

    async def replace(self, *names: str | SetBackend, **options: Any) -> BackendSet:
        """These fakes are the set from now on; the generation is the one there is, unless another is said."""
        generation = self.pool.list("default").generation
        wished = [n if isinstance(n, SetBackend) else SetBackend(url=f"http://{n}", kind="vllm") for n in names]
        return await self.pool.replace(SetBackends(backends=wished, **{"generation": generation, **options}))

    def info(self, backend_id: str) -> BackendInfo:
        """What is told of an engine."""
        return next(info for info in self.pool.list().items if info.backend_id == backend_id)

    def state(self, backend_id: str) -> str:
        """What the pool says of an engine."""
        return self.info(backend_id).state

    def ids(self, policy: str = "default") -> list[str]:
        """Who is there."""
        return [info.backend_id for info in self.pool.list(policy).items]

    def leases(self) -> dict[str, int]:
        """Live leases by engine."""
        return {info.backend_id: info.leases for info in self.pool.list().items}


@asynccontextmanager
async def world(
    rules: EngineRules | None = None, *, make: Callable[[str], FakeBackend] | None = None
) -> AsyncIterator[World]:
    """The pool runs for the length of the block; afterwards nothing is leased, alive or open."""
    it = World(rules, make=make)
    async with trio.open_nursery() as nursery:
        await nursery.start(it.pool.run)
        yield it
        nursery.cancel_scope.cancel()
    assert set(it.leases().values()) <= {0}
    assert not any(fake.live for fake in it.fakes.values())
    assert all(fake.is_closed for fake in it.fakes.values())


def _fake(url: str) -> FakeBackend:
    return FakeBackend(SECOND, url=url)


class LoadedBackend(FakeBackend):
    """A fake whose load is what the test says."""

    said: EngineLoad | None = None

    async def load(self) -> EngineLoad:
        """The test's word, or the fake's."""
        found = await super().load()
        return found if self.said is None else self.said


def request(number: int = 0, *, priority: int = 0) -> GenerationRequest:
    """Any request."""
    return GenerationRequest(
        token_ids=array("i", [1, 2, 3]),
        max_tokens=4,
        sampling=Sampling(),
        stop_token_ids=(),
        request_id=f"r-{number}",
        session=f"s-{number}",
        priority=priority,
    )


async def call(lease: Lease, number: int = 0) -> None:
    """One call as a session makes it."""
    await lease.generate(request(number))
