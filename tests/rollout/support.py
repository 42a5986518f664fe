"""A rollout room on fakes: real supervisor, pool and sessions over engines and sandboxes that exist in name only."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import trio

from prorld.domain.job import JobSpec
from prorld.domain.outcome import DEFAULT_VERDICTS
from prorld.domain.policy import PolicyState
from prorld.handlers.registry import Registry
from prorld.inference.contract import Backend, Turn
from prorld.inference.policies import Policies, PolicySource
from prorld.inference.policy_book import PolicyBook
from prorld.inference.policy_control import PolicyControl
from prorld.inference.policy_gate import PolicyGate
from prorld.inference.pool import BackendPool
from prorld.inference.pool_entry import EngineRules
from prorld.inference.rescoring import Scorer
from prorld.inference.session import ModelSession
from prorld.kit.lanes import Lane
from prorld.metrics import Metrics
from prorld.rollout.clock import SystemClock
from prorld.rollout.life import World
from prorld.rollout.looks import Looks
from prorld.rollout.stages import Gates
from prorld.rollout.supervisor import Supervisor, SupervisorLimits
from prorld.sandbox.contract import SandboxSpec
from prorld.sandbox.warm import WarmRuntime
from prorld.sandbox.warm_plan import WarmRules
from prorld.store.jobs import StoredJob
from prorld.store.journal import Journal
from prorld.store.reader import Reader
from prorld.store.retention import Forget
from prorld.testing.byte_tokenizer import write_byte_tokenizer
from prorld.testing.fake_backend import FakeBackend
from prorld.testing.fake_sandbox import FakeRuntime
from prorld.testing.handlers import FakeHandler
from prorld.testing.inline_lane import InlineLane
from prorld.testing.scripted_engine.script import Script
from prorld.tokens.jinja_renderer import JinjaRenderer
from prorld.tokens.tokenizer import HfTokenizer
from prorld.wire.jobs import JobRecord, SubmitJob
from prorld.wire.ops import AddBackend


@cache
def byte_renderer() -> JinjaRenderer:
    """One renderer for all tests; it holds nothing of a job."""
    with tempfile.TemporaryDirectory() as directory:
        return JinjaRenderer(HfTokenizer.from_directory(write_byte_tokenizer(Path(directory))))


class Models:
    """Sessions on the pool, all with one renderer: nothing is loaded in a thread, so virtual time may jump."""

    def __init__(self, pool: BackendPool, gate: Callable[[str], PolicyGate], policies: Policies) -> None:
        self._pool = pool
        self._gate = gate
        self._policies = policies
        self._lane = Lane("tests", 1)

    def knows(self, policy: str) -> bool:
        """As ``PooledModels``."""
        return policy in self._policies.names()

    @asynccontextmanager
    async def open(
        self, spec: JobSpec, attempt: int, on_turn: Callable[[int, Turn], None]
    ) -> AsyncIterator[ModelSession]:
        """As ``PooledModels``."""
        async with self._pool.lease(spec.policy, group_id=spec.group_id) as lease:
            yield ModelSession(
                spec,
                attempt,
                renderer=byte_renderer(),
                lease=lease,
                lane=self._lane,
                on_turn=on_turn,
                gate=self._gate(spec.policy),
            )


class KeptPolicies:
    """States as they would be on disk: what the next life of a daemon finds."""

    def __init__(self) -> None:
        self.states: list[PolicyState] = []
        self.broken: OSError | None = None

    async def save(self, policies: Iterable[PolicyState]) -> None:
        """Keep these and no others."""
        await trio.lowlevel.checkpoint()
        if self.broken is not None:
            raise self.broken
        self.states = list(policies)


class Room:
    """Everything a test looks at."""

    def __init__(
        self,
        *,
        backends: Sequence[FakeBackend] | None = None,
        runtime: FakeRuntime | None = None,
        workers: tuple[int, int, int] = (4, 4, 4),
        ahead: int = 8,
        limits: SupervisorLimits | None = None,
        kept: KeptPolicies | None = None,
        rules: EngineRules | None = None,
        warm: WarmRules | None = None,
        state: Path | None = None,
        without_handler: bool = False,
        without_policy: bool = False,
        also: Sequence[str] = (),
    ) -> None:
        """``state`` is a directory that outlives the room; without one the room has its own.

        ``also`` are policies beside the default one; their engines are the tests' to add.
        """
        if state is None:
            # In memory where there is such a place: the sweep makes thousands of rooms.
            state = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
            weakref.finalize(self, shutil.rmtree, state, ignore_errors=True)
        self.state = state
        # On the loop itself: to a clock that jumps, a thread looks like idleness.
        self.journal = Journal(self.state, lane=InlineLane())
        self.reader = Reader(self.journal.path, lane=InlineLane())
        self.backends = list(backends) if backends is not None else [FakeBackend(Script())]
        self.runtime = runtime or FakeRuntime()
        self.warm = None if warm is None else WarmRuntime(self.runtime, warm, boot_id="test")
        self.engines: dict[str, Backend] = {backend.url: backend for backend in self.backends}
        self.expected: list[SandboxSpec] = []
        self.metrics = Metrics()
        kinds = ("vllm", "openai", "prorl")
        self.pool = BackendPool(
            {kind: lambda request: self.engines[request.url] for kind in kinds}, self.metrics, rules=rules
        )
        self.kept = kept or KeptPolicies()
        clock = SystemClock()
        policies = Policies({name: PolicySource() for name in ("default", *also)}, Lane("policies", 1))
        self.book = PolicyBook(
            self.pool, policies, self.kept, self.metrics, clock.wall, states=self.kept.states, load_s=600.0
        )
        self.policies = PolicyControl(self.book)
        self.gates = Gates(init=workers[0], run=workers[1], eval=workers[2], ahead=ahead)
        self.registry = Registry()
        if not without_handler:
            self.registry.add(FakeHandler())
        self.world = World(
            gates=self.gates,
            runtime=self.warm or self.runtime,
            models=Models(self.pool, self.book.gate, policies),
            clock=clock,
            boot_id="test",
            verdicts=DEFAULT_VERDICTS,
            metrics=self.metrics,
            journal=self.journal,
            expect=self.expected.append if self.warm is None else self.warm.expect,
        )
        self.supervisor = Supervisor(
            self.world,
            self.registry,
            policies=() if without_policy else policies.names(),
            limits=limits or SupervisorLimits(),
            reader=self.reader,
        )
        self.policies.tell = self.supervisor.feed.of_daemon
        self.looks = Looks(self.world, self.supervisor, self.registry, Scorer(self.pool, self.book.gate))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Journal, pool and supervisor, until cancelled; the journal goes last."""
        await self.journal.open()
        async with outliving() as core, trio.open_nursery() as nursery:
            await core.start(self.journal.run)
            await nursery.start(self.pool.run)
            await nursery.start(self.policies.run)
            if self.warm is not None:
                await nursery.start(self.warm.keep)
            for backend in self.backends:
                await self.pool.add(AddBackend(url=backend.url, kind="vllm"))
            await nursery.start(self.supervisor.run)
            await nursery.start(self.looks.run)
            task_status.started()

    async def submit(self, job_id: str, instance: dict[str, Any] | None = None, **fields: Any) -> JobRecord:
        """Accept a job of the fake handler."""
        body = {"job_id": job_id, "handler": "fake", "instance": instance or {}, **fields}
        request = msgspec.convert(body, SubmitJob)
        record, _ = await self.supervisor.submit(request, "tests")
        return record

    async def finish(self, job_id: str, instance: dict[str, Any] | None = None, **fields: Any) -> JobRecord:
        """Accept a job and wait for its end."""
        await self.submit(job_id, instance, **fields)
        return await self.supervisor.wait_done(job_id, "tests")

    async def stored(self, job_id: str) -> StoredJob:
        """All of an ended job."""
        return await self.supervisor.stored(job_id, "tests", "it has not ended")

    async def forget(self, *job_ids: str) -> None:
        """As retention does."""
        (gone,) = await self.journal.commit(Forget(count=len(job_ids), bytes=0, before=""))
        assert sorted(job.job_id for job in gone) == sorted(job_ids)
        self.supervisor.forget((job.tenant, job.job_id) for job in gone)

    def assert_clean(self) -> None:
        """Nothing is left: no sandbox, no engine call, no lease, no place in a gate, nothing in a mailbox."""
        assert not [box for box in self.runtime.live.values() if box.job_id], self.runtime.live
        for backend in self.backends:
            assert not backend.live, backend.live
        for info in self.pool.list().items:
            assert (info.leases, info.inflight) == (0, 0), info
        stages = self.supervisor.stages()
        for gate in (stages.init, stages.run, stages.eval):
            assert (gate.active, gate.waiting) == (0, 0), stages
        assert self.supervisor.mailbox_used() == 0


@asynccontextmanager
async def outliving() -> AsyncIterator[trio.Nursery]:
    """A nursery for what the block needs to the last: an end from outside reaches it after the block."""
    scope, opened, held = trio.CancelScope(shield=True), trio.Event(), list[trio.Nursery]()

    async def hold() -> None:
        with scope:
            async with trio.open_nursery() as inner:
                held.append(inner)
                opened.set()
                await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold)
        try:
            await opened.wait()
            yield held[0]
        finally:
            scope.cancel()


@asynccontextmanager
async def room(**options: Any) -> AsyncIterator[Room]:
    """A room that runs for the length of the block, and is clean when its jobs have ended."""
    made = Room(**options)
    async with trio.open_nursery() as nursery:
        await nursery.start(made.run)
        yield made
        nursery.cancel_scope.cancel()
