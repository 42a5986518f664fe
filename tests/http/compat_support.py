"""The listener for trainers of other servers over a real supervisor, with engines and sandboxes in name only."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import trio

from prorld.domain.branch import Rewrite
from prorld.domain.messages import user
from prorld.domain.outcome import StopReason
from prorld.handlers.base import JobContext, RunResult
from prorld.http.auth import CompatAuth
from prorld.http.compat import create_compat_app
from prorld.http.deps import CompatDeps
from prorld.http.serve import HttpServer, run_http
from prorld.inference.policies import PolicySource
from prorld.rollout.compat.engines import CompatEngines
from prorld.rollout.compat.nemo_gym import GymService
from prorld.rollout.compat.service import CompatService
from prorld.sandbox.contract import SandboxSpec
from prorld.store.compat_file import CompatFile
from prorld.testing.fake_backend import FakeBackend
from prorld.testing.handlers import FakeHandler, FakeInstance
from prorld.testing.scripted_engine.script import Latency, Script
from tests.http.raw_client import Client, Reply, until
from tests.rollout.support import Room

TENANT = "compat"
ENGINE = "http://engine-1:8000/v1"
OTHER = "http://engine-2:8000/v1"
TOKENS = "http://engine-3:9000"


class TaskInstance(FakeInstance, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """What the fake handler does, among the fields that benchmarks bring."""

    say: list[str] = []
    rewrite: Rewrite | None = None
    sub_agent: bool = False


class TaskHandler(FakeHandler):
    """The fake handler where old trainers find it; it may hold longer conversations."""

    name = "task"
    instance_type: type[FakeInstance] = TaskInstance
    data_sources: ClassVar[tuple[str, ...]] = ("swebench", "task*")

    def grading_sandbox(self, instance: FakeInstance) -> SandboxSpec | None:
        """A fresh one, where a repair is graded."""
        return SandboxSpec() if instance.expected == "patched" else None

    async def run(self, job: JobContext[Any]) -> RunResult:
        """As many turns as the instance has things to say, and branches where it asks for them."""
        instance: TaskInstance = job.instance
        if not instance.say and instance.rewrite is None and not instance.sub_agent:
            return await super().run(job)
        model, answer = job.model, ""
        await model.start([user(instance.prompt)])
        turn = await model.turn()
        if instance.sub_agent:
            async with model.sub_agent([user("a question beside")]) as other:
                await other.turn()
        for text in instance.say:
            await model.observe([user(text)])
            turn = await model.turn()
        if instance.rewrite is not None:
            await model.rewrite([user("what was said, in short")], reason=instance.rewrite)
            turn = await model.turn()
        answer = turn.content
        return RunResult(stop=turn.stop or StopReason.FINISHED, answer=answer)

    async def carry(self, job: JobContext[Any]) -> Mapping[str, bytes]:
        """What a repair leaves."""
        await trio.lowlevel.checkpoint()
        return {"/tmp/patch.diff": b"--- a\n+++ b\n"} if job.instance.expected == "patched" else {}


class CompatWorld:
    """A room, the service, its listener and clients of it."""

    def __init__(
        self, made: Room, *, total_s: float = 300.0, is_public: bool = False, expects: bool = False, **options: Any
    ) -> None:
        self.room = made
        self.engines = CompatEngines(
            made.pool, made.book.policies, TENANT, own_source=PolicySource, allowed=options.pop("allowed", None)
        )
        self.service = CompatService(
            made.supervisor, self.engines, CompatFile(made.state),
            handlers=made.registry, policy=TENANT, total_s=total_s, expects=expects,
        )  # fmt: skip
        gym = GymService(made.supervisor, self.service, total_s=total_s)
        deps = CompatDeps(service=self.service, gym=gym, auth=CompatAuth(is_public=is_public), **options)
        self.app = create_compat_app(deps)
        self.server: HttpServer
        self.clients: list[Client] = []

    def engine(self, url: str, script: Script | None = None) -> FakeBackend:
        """An engine that can be named by this address."""
        backend = FakeBackend(script or Script(turns=["fine"]), url=url)
        self.room.backends.append(backend)
        self.room.engines[url] = backend
        return backend

    async def connect(self) -> Client:
        """A new connection."""
        host, _, port = self.server.address.removeprefix("http://").rpartition(":")
        self.clients.append(Client(await trio.open_tcp_stream(host, int(port)), None))
        return self.clients[-1]

    async def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Reply:
        """One call on a connection of its own."""
        client = await self.connect()
        try:
            return await client.call(method, path, body, headers)
        finally:
            client.stream.socket.close()
            self.clients.remove(client)

    async def ready(self, *addresses: str) -> None:
        """Started, with these engines."""
        for address in addresses or (ENGINE,):
            if address not in self.room.engines:
                self.engine(address)
            assert (await self.call("POST", "/add_llm_server", {"address": address})).status == 200
        assert (await self.call("POST", "/start")).status == 200

    async def process(self, job_id: str | None = None, *, params: dict[str, Any] | None = None, **task: Any) -> Reply:
        """A blocking call."""
        body: dict[str, Any] = {"instance": {"data_source": "task", **task}, "sampling_params": params or {}}
        return await self.call("POST", "/process", body | ({} if job_id is None else {"job_id": job_id}))

    async def jobs(self) -> list[str]:
        """The ids of all jobs of this surface, oldest first."""
        page = await self.room.supervisor.list(TENANT)
        return [record.job_id for record in reversed(page.items)]

    async def branch(self, job_id: str, number: int = 0) -> Any:
        """A branch of a job's trajectory as the other listener shows it."""
        return (await self.room.supervisor.trajectory(job_id, TENANT)).branches[number]


@asynccontextmanager
async def compat_world(
    *, state: Path | None = None, scripts: Sequence[Script] = (), **options: Any
) -> AsyncIterator[CompatWorld]:
    """A running listener; everything is gone when the block ends. ``scripts`` are of engines named at once."""
    made = Room(state=state, backends=[], also=(TENANT,))
    made.registry.add(TaskHandler())
    world = CompatWorld(made, **options)
    async with trio.open_nursery() as nursery:
        for address, script in zip((ENGINE, OTHER), scripts, strict=False):
            world.engine(address, script)
        backends, made.backends = made.backends, []
        await nursery.start(made.run)
        made.backends = backends
        await nursery.start(world.service.run)
        async with trio.open_nursery() as front:
            world.server = await front.start(partial(run_http, world.app, bind="127.0.0.1:0"))
            try:
                yield world
            finally:
                for client in world.clients:
                    client.stream.socket.close()
                front.cancel_scope.cancel()
                nursery.cancel_scope.cancel()


def slow(seconds: float = 3600.0) -> Script:
    """An engine that takes its time."""
    return Script(turns=["fine"], latency=Latency(fixed_s=seconds))


def joined(result: dict[str, Any]) -> list[int]:
    """The tokens of all messages."""
    return [token for message in result["messages"] for token in message["token_ids"]]


async def hang(world: CompatWorld, job_id: str, replies: dict[str, Reply], **task: Any) -> None:
    """A call that waits; its reply is put where the test finds it."""
    replies[job_id] = await world.process(job_id, **task)


async def running(world: CompatWorld, count: int = 1) -> None:
    """Until so many calls are in engines."""
    await until(lambda: sum(len(backend.live) for backend in world.room.backends) == count)
