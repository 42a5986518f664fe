"""What the tests of the HTTP room share: a service that keeps jobs in memory, behind the real server."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import trio

from prorld.domain.branch import Branch, VersionSpan
from prorld.domain.job import JobState, Timing
from prorld.domain.outcome import Outcome, OutcomeKind, Verdict
from prorld.errors import BackendError, Conflict, Impossible, NotFound, Overloaded, TooMany
from prorld.http.app import App, create_app
from prorld.http.auth import ADMIN_TENANT, Auth, Role, TokenBook, TokenEntry
from prorld.http.deps import HttpDeps
from prorld.http.serve import HttpServer, run_http
from prorld.inference.policies import Policies, PolicySource
from prorld.inference.policy_book import PolicyBook
from prorld.inference.policy_control import PolicyControl
from prorld.inference.pool import BackendPool
from prorld.kit.lanes import Lane
from prorld.metrics import Metrics
from prorld.rollout.clock import SystemClock
from prorld.rollout.events import Feed
from prorld.wire.batches import BatchPage, BatchRecord, SubmitBatch
from prorld.wire.events import JobEvent
from prorld.wire.jobs import Drift, JobPage, JobRecord, SubmitJob
from prorld.wire.looks import ReevaluateJob, Reevaluation, ReevaluationPage, ReevaluationState, VerifyAnswer
from prorld.wire.ops import (
    AddBackend,
    BackendInfo,
    BackendList,
    BackendSet,
    Condition,
    HandlerInfo,
    HandlerList,
    LoopLagStatus,
    Ready,
    SandboxList,
    SandboxRow,
    SetBackends,
    Stages,
    StagesPatch,
    StageStatus,
    Status,
    TaskNode,
    TaskTree,
)
from prorld.wire.trajectory import (
    PackedTrajectory,
    Trajectory,
    TrajectoryJob,
    branch_doc,
    packed_branch,
)
from tests.http.raw_client import Client
from tests.rollout.support import KeptPolicies

ADMIN = "admin-token-0123456789"
ALICE = "alice-token-0123456789"
BOB = "bob-token-0123456789"
READER = "reader-token-0123456789"
AT = "2026-01-01T00:00:00Z"


def book() -> TokenBook:
    """One token of each kind; the reader belongs to alice's tenant."""
    return TokenBook(
        [
            TokenEntry(token=ADMIN, tenant=ADMIN_TENANT, role=Role.ADMIN),
            TokenEntry(token=ALICE, tenant="alice", role=Role.TRAINER),
            TokenEntry(token=BOB, tenant="bob", role=Role.TRAINER),
            TokenEntry(token=READER, tenant="alice", role=Role.READ),
        ]
    )


class Job:
    """A job that does nothing until the test ends it."""

    def __init__(self, request: SubmitJob, job_id: str, tenant: str, digest: str | None, feed: Feed) -> None:
        self.request = request
        self.tell_all = partial(feed.of_job, tenant, job_id)
        self.digest = digest
        self.done = trio.Event()
        self.news = trio.Event()
        self.events: list[JobEvent] = []
        self.record = JobRecord(
            job_id=job_id,
            handler=request.handler or "fake",
            policy=request.policy,
            tenant=tenant,
            state=JobState.QUEUED,
            timing=Timing(),
            group_id=request.group_id,
            created_at=AT,
        )
        self.tell("job.queued")

    def tell(self, what: str) -> None:
        self.events.append(JobEvent(seq=len(self.events) + 1, event=what, at=AT))
        self.tell_all(self.events[-1])
        self.news.set()
        self.news = trio.Event()

    def finish(self, kind: OutcomeKind = OutcomeKind.OK) -> None:
        self.record = msgspec.structs.replace(
            self.record,
            state=JobState.DONE,
            outcome=Outcome(kind=kind, code=kind.value),
            verdict=Verdict.USE,
            reward=1.0,
        )
        self.tell("job.done")
        self.done.set()


class Followed:
    """The events of such a job."""

    def __init__(self, job: Job) -> None:
        self._job = job

    @property
    def last(self) -> int:
        return self._job.events[-1].seq

    @property
    def is_over(self) -> bool:
        return self._job.done.is_set()

    def after(self, seq: int, limit: int) -> Sequence[JobEvent]:
        return self._job.events[seq : seq + limit]

    async def wait_after(self, seq: int) -> None:
        while len(self._job.events) <= seq and not self.is_over:
            await self._job.news.wait()


class NoBatches:
    """Batches of which there is none, and none is taken."""

    async def list(self, tenant: str | None, *, limit: int = 50, after: str | None = None) -> BatchPage:
        return BatchPage(items=[])

    async def submit(self, request: SubmitBatch, tenant: str, *, digest: str) -> tuple[BatchRecord, bool]:
        raise Impossible("no batches here")

    async def _none(self, batch_id: str, *args: Any, **options: Any) -> Any:
        raise NotFound(f"there is no batch {batch_id}", code="unknown_batch")

    get = append = events = groups = wait_news = acknowledge = cancel = cancel_jobs = _none


class FakeService:
    """Jobs in memory: what it answers is what was put in, and a job ends when the test says so."""

    def __init__(self) -> None:
        self.jobs: dict[tuple[str, str], Job] = {}
        self.draining = False
        self.waiting = 0
        self.sizes = {"init": 2, "run": 4, "eval": 2}
        self.raises: Exception | ExceptionGroup[Exception] | None = None
        self.tokens = 8
        self.feed = Feed(SystemClock())

    def owns_sandbox(self, sandbox_id: str, tenant: str) -> bool:
        """The sandbox of a job is named after both."""
        owner, _, job_id = sandbox_id.removeprefix("s-").partition("-")
        return owner == tenant and (tenant, job_id) in self.jobs

    def find(self, job_id: str, tenant: str | None) -> Job:
        if self.raises is not None:
            raise self.raises
        for (owner, known), job in self.jobs.items():
            if known == job_id and tenant in (None, owner):
                return job
        raise NotFound(f"there is no job {job_id}", code="unknown_job")

    async def submit(
        self, request: SubmitJob, tenant: str, *, digest: str | None = None, size_bytes: int | None = None
    ) -> tuple[JobRecord, bool]:
        await trio.lowlevel.checkpoint()
        if self.draining:
            raise Overloaded("draining", code="draining", retry_after_s=7.2)
        job_id = request.job_id or f"j-{len(self.jobs)}"
        known = self.jobs.get((tenant, job_id))
        if known is not None:
            if known.digest != digest:
                raise Conflict(f"job {job_id} exists with another body", code="job_exists")
            return known.record, False
        job = self.jobs[tenant, job_id] = Job(request, job_id, tenant, digest, self.feed)
        return job.record, True

    async def get(self, job_id: str, tenant: str | None) -> JobRecord:
        return self.find(job_id, tenant).record

    async def wait_done(self, job_id: str, tenant: str | None) -> JobRecord:
        job = self.find(job_id, tenant)
        self.waiting += 1
        try:
            await job.done.wait()
        finally:
            self.waiting -= 1
        return job.record

    async def list(
        self,
        tenant: str | None,
        *,
        state: JobState | None = None,
        handler: str | None = None,
        group_id: str | None = None,
        limit: int = 50,
        after: str | None = None,
    ) -> JobPage:
        found = [
            job.record
            for (owner, _), job in reversed(self.jobs.items())
            if tenant in (None, owner)
            and state in (None, job.record.state)
            and handler in (None, job.record.handler)
            and group_id in (None, job.record.group_id)
        ]
        start = int(after or 0)
        end = start + limit
        return JobPage(items=found[start:end], next=str(end) if end < len(found) else None)

    async def cancel(self, job_id: str, tenant: str | None, reason: str) -> JobRecord:
        job = self.find(job_id, tenant)
        if not job.done.is_set():
            job.finish(OutcomeKind.CANCELLED)
        return job.record

    async def cancel_many(
        self, tenant: str | None, *, job_ids: Sequence[str] | None, group_id: str | None, reason: str
    ) -> int:
        await trio.lowlevel.checkpoint()
        chosen = [
            job
            for (owner, job_id), job in self.jobs.items()
            if tenant in (None, owner)
            and (job_ids is None or job_id in job_ids)
            and (group_id is None or job.record.group_id == group_id)
            and not job.done.is_set()
        ]
        for job in chosen:
            job.finish(OutcomeKind.CANCELLED)
        return len(chosen)

    def document(self, job_id: str, tenant: str | None) -> dict[str, Any]:
        """What both forms of a trajectory share."""
        job = self.find(job_id, tenant)
        if not job.done.is_set():
            raise Conflict("not done", code="not_done")
        record = job.record
        fields = {name: getattr(record, name) for name in record.__struct_fields__}
        return {
            "job": TrajectoryJob(**fields, instance=job.request.instance),
            "tokenizer": "fake",
            "tools": [],
            "calls": [],
            "drift": Drift(),
            "reward": record.reward,
            "step_rewards": [],
            "verdict": Verdict.USE,
            "outcome": Outcome(kind=OutcomeKind.OK),
        }

    def branch(self) -> Branch:
        """One that the policy sampled whole."""
        n, branch = self.tokens, Branch()
        branch.append_sampled(
            range(n),
            [-0.123456789 * (i % 7) for i in range(n)],
            [VersionSpan(start=0, end=n, epoch=0, version=0)],
            calls=[0],
            message=None,
            finish_reason="stop",
        )
        return branch

    async def trajectory(self, job_id: str, tenant: str | None) -> Trajectory:
        return Trajectory(**self.document(job_id, tenant), branches=[branch_doc(self.branch())])

    async def packed_trajectory(self, job_id: str, tenant: str | None) -> PackedTrajectory:
        return PackedTrajectory(**self.document(job_id, tenant), branches=[packed_branch(self.branch())])

    async def requeue(self, job_id: str, tenant: str | None, new_id: str | None) -> tuple[JobRecord, bool]:
        old = self.find(job_id, tenant)
        new = msgspec.structs.replace(old.request, job_id=new_id)
        return await self.submit(new, old.record.tenant, digest=f"requeued from {job_id}")

    async def follow(self, job_id: str, tenant: str | None) -> Followed:
        return Followed(self.find(job_id, tenant))

    def stages(self) -> Stages:
        return Stages(**{name: StageStatus(workers=n, active=0, waiting=0) for name, n in self.sizes.items()})

    def set_stages(self, patch: StagesPatch) -> Stages:
        for name in self.sizes:
            change = getattr(patch, name)
            self.sizes[name] = self.sizes[name] if change is None else change.workers
        return self.stages()

    def counts(self) -> dict[str, int]:
        return {"queued": sum(not job.done.is_set() for job in self.jobs.values())}

    def outcomes(self) -> dict[str, int]:
        return {}

    def drain(self) -> None:
        self.draining = True

    async def wait_idle(self) -> None:
        for job in self.jobs.values():
            await job.done.wait()


class FakeLooks:
    """Every rollout is sound, and a reevaluation ends when the test says so."""

    def __init__(self, service: FakeService) -> None:
        self.service = service
        self.records: dict[str, list[Reevaluation]] = {}
        self.done = trio.Event()

    async def verify(self, job_id: str, tenant: str | None, **asked: Any) -> VerifyAnswer:
        await trio.lowlevel.checkpoint()
        self.service.find(job_id, tenant)
        return VerifyAnswer(
            job_id=job_id,
            ok=True,
            result="ok",
            violations=[],
            unverifiable=[],
            branches=1,
            calls=1,
            tokens=8,
            sampled=8,
        )

    async def reevaluate(self, job_id: str, tenant: str | None, request: ReevaluateJob) -> Reevaluation:
        await trio.lowlevel.checkpoint()
        job, known = self.service.find(job_id, tenant), self.records.setdefault(job_id, [])
        if len(known) >= 3:
            raise TooMany("three are enough", retry_after_s=2.5)
        known.append(
            Reevaluation(
                n=len(known) + 1,
                job_id=job_id,
                tenant=job.record.tenant,
                state=ReevaluationState.QUEUED,
                reason=request.reason,
                created_at=AT,
            )
        )
        return known[-1]

    async def reevaluations(self, job_id: str, tenant: str | None) -> ReevaluationPage:
        self.service.find(job_id, tenant)
        return ReevaluationPage(items=self.records.get(job_id, [])[::-1])

    async def reevaluation(self, job_id: str, tenant: str | None, n: int) -> Reevaluation:
        for record in (await self.reevaluations(job_id, tenant)).items:
            if record.n == n:
                state = ReevaluationState.DONE if self.done.is_set() else record.state
                return msgspec.structs.replace(record, state=state)
        raise NotFound("no such reevaluation", code="unknown_reevaluation")

    async def wait_reevaluation(self, job_id: str, tenant: str | None, n: int) -> Reevaluation:
        await self.done.wait()
        return await self.reevaluation(job_id, tenant, n)

    async def cancel_reevaluation(self, job_id: str, tenant: str | None, n: int, reason: str) -> Reevaluation:
        self.done.set()
        return await self.reevaluation(job_id, tenant, n)


class FakeBackends:
    """Engines in memory; an address with ``dead`` in it does not answer its probe."""

    def __init__(self) -> None:
        self.rows: dict[str, BackendInfo] = {}

    def list(self, policy: str | None) -> BackendList:
        return BackendList(items=[row for row in self.rows.values() if policy in (None, row.policy)])

    async def add(self, request: AddBackend) -> BackendInfo:
        await trio.lowlevel.checkpoint()
        if "dead" in request.url:
            raise BackendError("the probe failed") from ConnectionRefusedError("nobody there")
        row = BackendInfo(
            backend_id=f"b-{len(self.rows)}",
            url=request.url,
            kind=request.kind,
            policy=request.policy,
            state="up",
            model="m",
            max_context_tokens=1024,
        )
        self.rows[row.backend_id] = row
        return row

    async def replace(self, wanted: SetBackends) -> BackendSet:
        await trio.lowlevel.checkpoint()
        if wanted.generation != len(self.rows):
            raise Conflict("the set has changed", code="generation_moved", details={"generation": len(self.rows)})
        self.rows = {}
        for item in wanted.backends:
            await self.add(AddBackend(url=item.url, kind=item.kind, policy=wanted.policy))
        return BackendSet(policy=wanted.policy, generation=len(self.rows), items=list(self.rows.values()))

    async def drain(self, backend_id: str) -> BackendInfo:
        await trio.lowlevel.checkpoint()
        if backend_id not in self.rows:
            raise NotFound("no such engine")
        self.rows[backend_id] = msgspec.structs.replace(self.rows[backend_id], state="draining")
        return self.rows[backend_id]

    async def remove(self, backend_id: str) -> None:
        await trio.lowlevel.checkpoint()
        if self.rows.pop(backend_id, None) is None:
            raise NotFound("no such engine")


def no_policies() -> PolicyControl:
    """One policy without an engine, to look at: nothing runs that could change it."""
    metrics, sources = Metrics(), Policies({"default": PolicySource()}, Lane("policies", 1))
    return PolicyControl(PolicyBook(BackendPool({}, metrics), sources, KeptPolicies(), metrics, lambda: AT))


class World:
    """An application over the fakes."""

    def __init__(
        self,
        *,
        auth: Auth | None = None,
        body_bytes_max: int = 1 << 20,
        service: Any = None,
        looks: Any = None,
        batches: Any = None,
        policies: PolicyControl | None = None,
        hold_s_max: float = 60.0,
    ) -> None:
        self.clients: list[Client] = []
        self.service = service or FakeService()
        self.looks = looks or FakeLooks(self.service)
        self.backends = FakeBackends()
        self.policies = policies or no_policies()
        self.missing: list[Condition] = []
        self.sandboxes: list[SandboxRow] = []
        self.app: App = create_app(
            HttpDeps(
                service=self.service,
                looks=self.looks,
                batches=batches or NoBatches(),
                backends=self.backends,
                policies=self.policies,
                handlers=lambda: HandlerList(items=[HandlerInfo(name="fake", version="1", origin="tests")]),
                sandboxes=lambda: SandboxList(items=self.sandboxes),
                ready=lambda: Ready(ready=not self.missing, missing=self.missing),
                status=self._status,
                metrics=lambda: b"# HELP x y\nx 1\n",
                tasks=lambda: TaskTree(tasks=1, root=TaskNode(name="root", age_s=1.0, waits_at="")),
                auth=auth or book(),
                body_bytes_max=body_bytes_max,
                hold_s_max=hold_s_max,
            )
        )

    def _status(self) -> Status:
        return Status(
            version="0",
            boot_id="boot",
            pid=os.getpid(),
            uptime_s=1.0,
            draining=self.service.draining,
            jobs=self.service.counts(),
            outcomes={},
            stages=self.service.stages(),
            backends=[],
            sandboxes=0,
            loop_lag_s=LoopLagStatus(),
        )

    async def serve(self, nursery: trio.Nursery, bind: str = "127.0.0.1:0", **options: Any) -> HttpServer:
        """Start the server in ``nursery``."""
        self.server: HttpServer = await nursery.start(partial(run_http, self.app, bind=bind, **options))
        return self.server

    async def connect(self, token: str | None = ADMIN, *, receive_bytes: int | None = None) -> Client:
        """A new connection to the server; ``receive_bytes`` makes its receive buffer small."""
        address = self.server.address
        if address.startswith("unix:"):
            stream = await trio.open_unix_socket(address.removeprefix("unix:"))
        else:
            host, _, port = address.removeprefix("http://").rpartition(":")
            sock = trio.socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            if receive_bytes is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            try:
                await sock.connect((host, int(port)))
            except OSError:
                sock.close()
                raise
            stream = trio.SocketStream(sock)
        self.clients.append(Client(stream, token))
        return self.clients[-1]

    async def is_alive(self) -> None:
        """Fails when the server does not answer a new client."""
        client = await self.connect()
        assert (await client.call("GET", "/healthz")).status == 200
        await client.stream.aclose()

    def close(self) -> None:
        """Close what the test left open."""
        for client in self.clients:
            client.stream.socket.close()
