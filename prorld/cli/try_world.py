"""Rollouts in this process, through the same life as in the daemon: supervisor, gates, pool, session, sandbox.

It owns what a daemon would: the pool with one engine, the policy, the sandboxes. ``roll_out`` is one rollout, whose
engine may be anything; ``open_plays`` is for many at once, each with what its policy says. It shows nothing;
``on_event`` and ``Recorder`` hand out what happens.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import trio

from prorld.cli.sandboxes import open_runtime
from prorld.cli.try_record import Recorder
from prorld.config import Loaded
from prorld.domain.outcome import DEFAULT_VERDICTS, Stage
from prorld.handlers.base import AgentHandler, Grade, JobContext, RunResult
from prorld.handlers.registry import Registry
from prorld.inference.embedded import EmbeddedEngine, run_embedded_engine
from prorld.inference.models import PooledModels
from prorld.inference.policies import Policies, PolicySource
from prorld.inference.pool import BackendFactory, BackendPool
from prorld.inference.registry import backend_factories
from prorld.kit.lanes import Lane
from prorld.metrics import Metrics
from prorld.rollout.clock import SystemClock
from prorld.rollout.life import World
from prorld.rollout.stages import Gates
from prorld.rollout.supervisor import Supervisor, SupervisorLimits
from prorld.sandbox.contract import SandboxRuntime
from prorld.store.journal import Journal
from prorld.store.reader import Reader
from prorld.store.retention import Keep, Retention
from prorld.testing.byte_tokenizer import write_byte_tokenizer
from prorld.testing.fake_backend import FakeBackend
from prorld.testing.plays import CONTEXT_TOKENS as PLAY_CONTEXT_TOKENS
from prorld.testing.plays import TURN_TOKENS as PLAY_TURN_TOKENS
from prorld.testing.plays import PlayingBackend
from prorld.testing.scripted_engine.script import Script
from prorld.wire.events import JobEvent
from prorld.wire.jobs import JobRecord, SubmitJob
from prorld.wire.ops import AddBackend
from prorld.wire.trajectory import Trajectory

__all__ = [
    "PLAY_CONTEXT_TOKENS",
    "PLAY_TURN_TOKENS",
    "Engine",
    "Failure",
    "Played",
    "Plays",
    "Rollout",
    "open_plays",
    "roll_out",
]

TENANT = "try"
POLICY = "default"
CONTEXT_TOKENS = 4096
EVENTS_PAGE = 1000
TOKENIZER_THREADS = 2
# Jobs that have ended, beside those that are being looked at: there may have been thousands of them.
KEPT_JOBS = 64
KEPT_BYTES = 64 << 20
KEPT_S = 7 * 86400.0


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """What speaks: the turns of a script, an engine somewhere, or else the embedded one."""

    turns: Sequence[str] = ()
    backend: dict[str, Any] | None = None
    tokenizer: str | None = None


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage of the handler raised."""

    stage: Stage
    attempt: int
    error: Exception


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """All there is to see of it."""

    document: Trajectory
    failures: list[Failure]


class _Joined(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that can be leased, and where its policy's tokens come from."""

    request: AddBackend
    source: PolicySource
    factories: dict[str, BackendFactory]


async def roll_out(
    registry: Registry,
    job: SubmitJob,
    *,
    engine: Engine,
    sandbox: str | None,
    loaded: Loaded,
    recorder: Recorder,
    on_event: Callable[[JobEvent], None],
) -> Rollout:
    """Run one job to its end. Raises what the daemon would answer to a submit that it refuses."""
    assert job.handler is not None
    assert job.job_id is not None
    failures: list[Failure] = []
    _watch_failures(registry.get(job.handler), failures)
    async with (
        _joined(engine) as joined,
        open_runtime(sandbox, loaded, registry.sources()) as runtime,
        _world(registry, joined, recorder.watching(runtime)) as supervisor,
    ):
        await supervisor.submit(job, TENANT)
        await _follow(supervisor, job.job_id, on_event)
        document = await supervisor.trajectory(job.job_id, TENANT)
    return Rollout(document=document, failures=failures)


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a play: the job's record, and what its handler told on the way."""

    record: JobRecord
    told: list[dict[str, Any]]


class Plays:
    """Plays rollouts: each a job of its own, whose policy says what it is given."""

    def __init__(self, supervisor: Supervisor, backend: PlayingBackend) -> None:
        self._supervisor = supervisor
        self._backend = backend

    async def play(self, job: SubmitJob, turns: Sequence[str]) -> Played:
        """Run a job to its end. Raises what the daemon would answer to a submit that it refuses."""
        assert job.job_id is not None
        name = f"{TENANT}/{job.job_id}"
        self._backend.learn(name, turns)
        try:
            await self._supervisor.submit(job, TENANT)
            record = await self._supervisor.wait_done(job.job_id, TENANT)
            events = await self._supervisor.events(job.job_id, TENANT, limit=EVENTS_PAGE)
        finally:
            self._backend.forget(name)
        return Played(record=record, told=[event.data for event in events if event.event == "job.progress"])


@asynccontextmanager
async def open_plays(registry: Registry, *, sandbox: str | None, loaded: Loaded, jobs: int) -> AsyncIterator[Plays]:
    """A world in which so many jobs are played at once."""
    backend = PlayingBackend(url="http://plays")
    with tempfile.TemporaryDirectory(prefix="prorld-try-") as place:
        joined = _Joined(
            request=AddBackend(url=backend.url, kind="vllm", max_inflight=jobs),
            source=PolicySource(tokenizer=str(write_byte_tokenizer(Path(place)))),
            factories={"vllm": lambda _request: backend},
        )
        async with (
            open_runtime(sandbox, loaded, registry.sources()) as runtime,
            _world(registry, joined, runtime, jobs=jobs) as supervisor,
        ):
            yield Plays(supervisor, backend)


@asynccontextmanager
async def _world(
    registry: Registry, joined: _Joined, runtime: SandboxRuntime, *, jobs: int = 1
) -> AsyncIterator[Supervisor]:
    """A supervisor whose gates let so many jobs through at once; everything that it needs ends with the block."""
    async with _journal() as journal, trio.open_nursery() as nursery:
        metrics, clock, reader = Metrics(), SystemClock(), Reader(journal.path)
        pool = BackendPool(joined.factories, metrics)
        await nursery.start(pool.run, name="pool")
        await pool.add(joined.request)
        lane = Lane("tokenizers", TOKENIZER_THREADS)
        world = World(
            gates=Gates(init=jobs, run=jobs, eval=jobs, ahead=jobs),
            runtime=runtime,
            models=PooledModels(pool, Policies({POLICY: joined.source}, lane), lane),
            clock=clock,
            boot_id="try",
            verdicts=DEFAULT_VERDICTS,
            metrics=metrics,
            journal=journal,
        )
        kept = KEPT_JOBS + 4 * jobs
        limits = SupervisorLimits(results_max_count=kept, results_max_bytes=KEPT_BYTES)
        supervisor = Supervisor(world, registry, policies=[POLICY], limits=limits, reader=reader)
        keep = Keep(age_s=KEPT_S, count_max=kept, bytes_max=KEPT_BYTES, tombstones_max=kept)
        retention = Retention(journal, reader, keep, wall=clock.wall)
        retention.listen(lambda gone: supervisor.forget((job.tenant, job.job_id) for job in gone))
        async with registry.open_all(), trio.open_nursery() as inner:
            await inner.start(supervisor.run, name="supervisor")
            await inner.start(retention.run, name="retention")
            yield supervisor
            inner.cancel_scope.cancel("the command is over")
        nursery.cancel_scope.cancel("the command is over")


async def _follow(supervisor: Supervisor, job_id: str, on_event: Callable[[JobEvent], None]) -> None:
    """Hand out the job's events as they come, up to its end."""
    events, seen = await supervisor.follow(job_id, TENANT), 0
    while seen < events.last or not events.is_over:
        await events.wait_after(seen)
        for event in events.after(seen, EVENTS_PAGE):
            on_event(event)
            seen = event.seq
    await supervisor.wait_done(job_id, TENANT)


@asynccontextmanager
async def _journal() -> AsyncIterator[Journal]:
    """One that nobody will read again."""
    with tempfile.TemporaryDirectory(prefix="prorld-try-") as place:
        journal = Journal(Path(place))
        await journal.open()
        async with trio.open_nursery() as nursery:
            await nursery.start(journal.run, name="journal")
            yield journal
            nursery.cancel_scope.cancel("the command is over")


def _watch_failures(handler: AgentHandler[Any], failures: list[Failure]) -> None:
    """Note every error of a stage on its way through ``recover``, which each of them takes."""
    recover = handler.recover

    async def noted(job: JobContext[Any], stage: Stage, error: Exception) -> RunResult | Grade | None:
        failures.append(Failure(stage=stage, attempt=job.attempt, error=error))
        return await recover(job, stage, error)

    vars(handler)["recover"] = noted


@asynccontextmanager
async def _joined(engine: Engine) -> AsyncIterator[_Joined]:
    if engine.turns:
        # A few kilobytes, and gone with the command.
        with tempfile.TemporaryDirectory(prefix="prorld-try-") as place:
            yield _scripted(engine.turns, write_byte_tokenizer(Path(place)))
    elif engine.backend is not None:
        yield _Joined(
            request=msgspec.convert(engine.backend, AddBackend),
            source=PolicySource(tokenizer=engine.tokenizer),
            factories=backend_factories(),
        )
    else:
        async with trio.open_nursery() as nursery:
            run = partial(run_embedded_engine, slots=1, context_per_slot=CONTEXT_TOKENS)
            ready: EmbeddedEngine = await nursery.start(run, name="embedded engine")
            yield _Joined(
                request=AddBackend(url=ready.url, kind="llamacpp"),
                source=PolicySource(tokenizer=engine.tokenizer),
                factories=backend_factories(),
            )
            nursery.cancel_scope.cancel("the command is over")


def _scripted(turns: Sequence[str], tokenizer: Path) -> _Joined:
    backend = FakeBackend(Script(turns=list(turns), model="scripted"), url="http://scripted")
    return _Joined(
        request=AddBackend(url=backend.url, kind="vllm"),
        source=PolicySource(tokenizer=str(tokenizer)),
        factories={"vllm": lambda _request: backend},
    )
