"""One rollout in this process, through the same life as in the daemon: supervisor, gates, pool, session, sandbox.

It owns what a daemon would: the pool with one engine, the policy, the sandboxes. It shows nothing; ``on_event`` and
``Recorder`` hand out what happens.
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
from prorld.store.journal import Journal
from prorld.store.reader import Reader
from prorld.testing.byte_tokenizer import write_byte_tokenizer
from prorld.testing.fake_backend import FakeBackend
from prorld.testing.scripted_engine.script import Script
from prorld.wire.events import JobEvent
from prorld.wire.jobs import SubmitJob
from prorld.wire.ops import AddBackend
from prorld.wire.trajectory import Trajectory

__all__ = ["Engine", "Failure", "Rollout", "roll_out"]

TENANT = "try"
POLICY = "default"
CONTEXT_TOKENS = 4096
EVENTS_PAGE = 1000
TOKENIZER_THREADS = 2


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
        open_runtime(sandbox, loaded) as runtime,
        _journal() as journal,
        trio.open_nursery() as nursery,
    ):
        metrics = Metrics()
        pool = BackendPool(joined.factories, metrics)
        await nursery.start(pool.run, name="pool")
        await pool.add(joined.request)
        lane = Lane("tokenizers", TOKENIZER_THREADS)
        world = World(
            gates=Gates(init=1, run=1, eval=1, ahead=1),
            runtime=recorder.watching(runtime),
            models=PooledModels(pool, Policies({POLICY: joined.source}, lane), lane),
            clock=SystemClock(),
            boot_id="try",
            verdicts=DEFAULT_VERDICTS,
            metrics=metrics,
            journal=journal,
        )
        supervisor = Supervisor(
            world, registry, policies=[POLICY], limits=SupervisorLimits(), reader=Reader(journal.path)
        )
        async with registry.open_all(), trio.open_nursery() as jobs:
            await jobs.start(supervisor.run, name="supervisor")
            await supervisor.submit(job, TENANT)
            await _follow(supervisor, job.job_id, on_event)
            document = await supervisor.trajectory(job.job_id, TENANT)
            jobs.cancel_scope.cancel("the rollout is over")
        nursery.cancel_scope.cancel("the rollout is over")
    return Rollout(document=document, failures=failures)


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
            nursery.cancel_scope.cancel("the rollout is over")


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
            nursery.cancel_scope.cancel("the rollout is over")


def _scripted(turns: Sequence[str], tokenizer: Path) -> _Joined:
    backend = FakeBackend(Script(turns=list(turns), model="scripted"), url="http://scripted")
    return _Joined(
        request=AddBackend(url=backend.url, kind="vllm"),
        source=PolicySource(tokenizer=str(tokenizer)),
        factories={"vllm": lambda _request: backend},
    )
