"""The synchronous client: the calls of the HTTP contract, made so that each may be repeated without harm."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from functools import partial
from types import NoneType, TracebackType
from typing import Self

import msgspec

from prorld.client.batches import BatchCalls
from prorld.client.caller import LONG_POLL_S, REQUEST_S, Caller, part, query
from prorld.client.errors import ClientError
from prorld.client.find import find
from prorld.client.http import MSGPACK
from prorld.domain.job import JobState
from prorld.domain.policy import How, Mode
from prorld.wire.events import EventPage, JobEvent, JobEventPage
from prorld.wire.jobs import CancelAnswer, CancelJob, CancelJobs, JobPage, JobRecord, RequeueJob, SubmitJob
from prorld.wire.looks import ReevaluateJob, Reevaluation, ReevaluationPage, ReevaluationState, VerifyAnswer
from prorld.wire.ops import (
    AddBackend,
    BackendInfo,
    BackendList,
    BackendSet,
    DrainAnswer,
    HandlerList,
    Ready,
    SandboxList,
    SetBackends,
    Stages,
    StagesPatch,
    Status,
    TaskTree,
)
from prorld.wire.policies import (
    PausedPolicy,
    PausePolicy,
    PolicyInfo,
    PolicyList,
    PolicyUpdate,
    PolicyUpdateList,
    PutPolicy,
    ResumedPolicy,
    ResumePolicy,
    UpdatePolicy,
)
from prorld.wire.trajectory import PackedTrajectory, Trajectory

# For engines to say that they are paused, or that they go on, beside what they were given.
ENGINES_S = 240.0
# The daemon gives up scoring a rollout before this, and says what it has.
RESCORE_S = 240.0
# Short enough to be read, long enough never to meet another one.
_ID_BYTES = 10


class Client(BatchCalls):
    """A daemon's jobs, batches and state. Finds the daemon of this host by itself; not for several threads at once.

    ``patience_s`` is how long one call may go on trying after a refusal that is worth a repeat (an overloaded daemon, a
    lost connection); 0 tells at once.
    """

    def __init__(
        self,
        address: str | None = None,
        token: str | None = None,
        state_dir: str | os.PathLike[str] | None = None,
        *,
        patience_s: float = 10.0,
    ) -> None:
        super().__init__(Caller(partial(find, address, token, state_dir), patience_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._caller.close()

    @property
    def address(self) -> str:
        """Where the daemon is."""
        return self._caller.address

    # --- jobs

    def submit(self, job: SubmitJob) -> JobRecord:
        """Hand in a job. Without an id it gets one here, so that a repeat after a lost reply is the same job."""
        if job.job_id is None:
            job = msgspec.structs.replace(job, job_id=f"job-{secrets.token_hex(_ID_BYTES)}")
        return self._call("POST", "/v1/jobs", JobRecord, body=job)

    def get(self, job_id: str) -> JobRecord:
        """A job's record now."""
        return self._call("GET", f"/v1/jobs/{part(job_id)}", JobRecord)

    def wait(self, job_id: str, *, within_s: float | None = None) -> JobRecord:
        """The record once the job is done, or as it is after ``within_s``."""
        path = f"/v1/jobs/{part(job_id)}"
        return self._caller.poll(path, JobRecord, lambda record: record.state is JobState.DONE, within_s)

    def cancel(self, job_id: str, *, reason: str | None = None) -> JobRecord:
        """Begin the end of a job; it is over when ``wait`` says so."""
        body = CancelJob() if reason is None else CancelJob(reason=reason)
        return self._call("POST", f"/v1/jobs/{part(job_id)}/cancel", JobRecord, body=body)

    def cancel_many(
        self, *, job_ids: Sequence[str] | None = None, group_id: str | None = None, reason: str | None = None
    ) -> int:
        """The same for many; how many are on their way out."""
        chosen = {"job_ids": None if job_ids is None else [*job_ids], "group_id": group_id, "reason": reason}
        body = msgspec.convert({name: value for name, value in chosen.items() if value is not None}, CancelJobs)
        return self._call("POST", "/v1/jobs/cancel", CancelAnswer, body=body).cancelling

    def trajectory(self, job_id: str) -> Trajectory:
        """The trajectory of a job that is done."""
        return self._call("GET", f"/v1/jobs/{part(job_id)}/trajectory", Trajectory)

    def packed_trajectory(self, job_id: str) -> PackedTrajectory:
        """The same with packed arrays, bit for bit what the engine returned, and several times as fast."""
        return self._call("GET", f"/v1/jobs/{part(job_id)}/trajectory", PackedTrajectory, accept=MSGPACK)

    def verify(
        self, job_id: str, *, rescore: bool = False, tolerance: float | None = None, tolerance_max: float | None = None
    ) -> VerifyAnswer:
        """Whether the stored rollout of a job is what it says; with ``rescore`` by what engines say of it now, too."""
        path = f"/v1/jobs/{part(job_id)}/verify"
        if not rescore:
            return self._call("GET", path, VerifyAnswer)
        path += query(rescore="true", tolerance=tolerance, tolerance_max=tolerance_max)
        return self._call("GET", path, VerifyAnswer, within_s=RESCORE_S + REQUEST_S)

    def requeue(self, job_id: str, *, new_id: str | None = None) -> JobRecord:
        """Run an ended job again as a new one. Without an id it gets one here, so that a repeat is the same job."""
        body = RequeueJob(job_id=new_id or f"job-{secrets.token_hex(_ID_BYTES)}")
        return self._call("POST", f"/v1/jobs/{part(job_id)}/requeue", JobRecord, body=body)

    def reevaluate(self, job_id: str, *, eval_s: float | None = None, reason: str = "") -> Reevaluation:
        """Score the stored rollout again, into a record of its own. Told at once; ``wait_reevaluation`` has its end."""
        body = ReevaluateJob(eval_s=eval_s, reason=reason)
        return self._call("POST", f"/v1/jobs/{part(job_id)}/reevaluate", Reevaluation, body=body)

    def reevaluations(self, job_id: str) -> Sequence[Reevaluation]:
        """All that are kept of a job, newest first."""
        return self._call("GET", f"/v1/jobs/{part(job_id)}/reevaluations", ReevaluationPage).items

    def wait_reevaluation(self, job_id: str, n: int, *, within_s: float = LONG_POLL_S) -> Reevaluation:
        """One of them once it has ended, or as it is after ``within_s``."""
        path = f"/v1/jobs/{part(job_id)}/reevaluations/{n}"
        return self._caller.poll(path, Reevaluation, lambda found: found.state is ReevaluationState.DONE, within_s)

    def events(self, job_id: str, *, after: int = 0, wait_s: float = 0.0) -> Sequence[JobEvent]:
        """The job's events with a higher number than ``after``, waiting up to ``wait_s`` for the first."""
        path = f"/v1/jobs/{part(job_id)}/events{query(after=after, wait_s=wait_s)}"
        return self._call("GET", path, JobEventPage, within_s=wait_s + REQUEST_S).items

    def all_events(self, *, after: int = 0, wait_s: float = 0.0, limit: int = 1000) -> EventPage:
        """What happened in the daemon after a number; go on after the page's ``last``."""
        path = f"/v1/events{query(after=after, wait_s=wait_s, limit=limit)}"
        return self._call("GET", path, EventPage, within_s=wait_s + REQUEST_S)

    # --- operations

    def status(self) -> Status:
        """What the daemon does now."""
        return self._call("GET", "/v1/status", Status)

    def ready(self) -> Ready:
        """Whether the daemon can take work, and what is missing."""
        return self._call("GET", "/readyz", Ready, also=(503,))

    def handlers(self) -> HandlerList:
        """The kinds of task that are installed."""
        return self._call("GET", "/v1/handlers", HandlerList)

    def backends(self, policy: str | None = None) -> BackendList:
        """The engines of one policy, or of all."""
        return self._call("GET", f"/v1/backends{query(policy=policy)}", BackendList)

    def add_backend(self, request: AddBackend) -> BackendInfo:
        """Let the daemon probe an engine and take it in."""
        return self._call("POST", "/v1/backends", BackendInfo, body=request)

    def replace_backends(self, wanted: SetBackends) -> BackendSet:
        """Make these the engines of a policy, all at once; ``generation`` is that of the list they were chosen by."""
        return self._call("PUT", "/v1/backends", BackendSet, body=wanted)

    def remove_backend(self, backend_id: str) -> None:
        """Take an engine out; what runs on it goes on elsewhere."""
        self._call("DELETE", f"/v1/backends/{part(backend_id)}", NoneType)

    def drain_backend(self, backend_id: str) -> BackendInfo:
        """No new leases on an engine from now on."""
        return self._call("POST", f"/v1/backends/{part(backend_id)}/drain", BackendInfo)

    # --- policies

    def policies(self) -> Sequence[PolicyInfo]:
        """The policies and their versions."""
        return self._call("GET", "/v1/policies", PolicyList).items

    def policy(self, policy: str) -> PolicyInfo:
        """One of them."""
        return self._call("GET", f"/v1/policies/{part(policy)}", PolicyInfo)

    def put_policy(self, policy: str, request: PutPolicy) -> PolicyInfo:
        """Make or change a policy."""
        return self._call("PUT", f"/v1/policies/{part(policy)}", PolicyInfo, body=request)

    def pause_policy(
        self, policy: str, *, mode: Mode = "abort", timeout_s: float = 60.0, pause_id: str | None = None
    ) -> PausedPolicy:
        """Let no generation begin, and pause the engines. Gets its id here, so that a repeat is the same pause."""
        named = pause_id or f"pause-{secrets.token_hex(_ID_BYTES)}"
        body = PausePolicy(mode=mode, timeout_s=timeout_s, pause_id=named)
        within_s = timeout_s + ENGINES_S
        return self._call("POST", f"/v1/policies/{part(policy)}/pause", PausedPolicy, body=body, within_s=within_s)

    def resume_policy(self, policy: str, pause_id: str, version: int, *, rollback: bool = False) -> ResumedPolicy:
        """Name the weights that the engines have now, and let everything go on."""
        body = ResumePolicy(pause_id=pause_id, version=version, rollback=rollback)
        return self._call("POST", f"/v1/policies/{part(policy)}/resume", ResumedPolicy, body=body, within_s=ENGINES_S)

    def update_policy(
        self,
        policy: str,
        version: int,
        how: How = "reload",
        *,
        path: str | None = None,
        mode: Mode = "abort",
        timeout_s: float = 60.0,
        backends: Sequence[str] | None = None,
        rollback: bool = False,
        pause_id: str | None = None,
    ) -> PolicyUpdate:
        """Begin to change the weights; ``wait_update`` has the end. A repeat is the same update."""
        if path is not None and not path.startswith("/"):
            raise ClientError(f"path must be an absolute path, and not {path!r}", code="bad_input")
        if path is None and how != "none":
            raise ClientError(f"path is missing: {how!r} loads weights from it", code="bad_input")
        fields = {
            "version": version, "how": how, "path": path, "mode": mode, "timeout_s": timeout_s,
            "backends": None if backends is None else [*backends], "rollback": rollback, "pause_id": pause_id,
        }  # fmt: skip
        try:
            body = msgspec.convert(fields, UpdatePolicy)
        except msgspec.ValidationError as exc:
            raise ClientError(str(exc), code="bad_input") from exc
        return self._call("POST", f"/v1/policies/{part(policy)}/updates", PolicyUpdate, body=body)

    def updates(self, policy: str) -> Sequence[PolicyUpdate]:
        """The updates that are remembered of a policy, newest first."""
        return self._call("GET", f"/v1/policies/{part(policy)}/updates", PolicyUpdateList).items

    def wait_update(self, policy: str, update_id: str, *, within_s: float | None = None) -> PolicyUpdate:
        """An update once it has ended, or as it is after ``within_s``."""
        path = f"/v1/policies/{part(policy)}/updates/{part(update_id)}"
        return self._caller.poll(path, PolicyUpdate, lambda found: found.state != "running", within_s)

    def sandboxes(self) -> SandboxList:
        """The sandboxes that live."""
        return self._call("GET", "/v1/sandboxes", SandboxList)

    def drain(self) -> DrainAnswer:
        """Take no new jobs from now on; those that are accepted go on."""
        return self._call("POST", "/v1/drain", DrainAnswer)

    def tasks(self) -> TaskTree:
        """The tree of the daemon's tasks."""
        return self._call("GET", "/v1/debug/tasks", TaskTree)

    def stages(self) -> Stages:
        """The three gates."""
        return self._call("GET", "/v1/stages", Stages)

    def set_stages(self, patch: StagesPatch) -> Stages:
        """Resize gates; 0 pauses one."""
        return self._call("PATCH", "/v1/stages", Stages, body=patch)

    # Last, because the name hides the builtin in the annotations that follow it.
    def list(
        self,
        *,
        state: str | None = None,
        handler: str | None = None,
        group_id: str | None = None,
        limit: int = 50,
        after: str | None = None,
    ) -> JobPage:
        """One page of jobs, newest first; ``after`` is the ``next`` of the page before."""
        wanted = query(state=state, handler=handler, group_id=group_id, limit=limit, next=after)
        return self._call("GET", f"/v1/jobs{wanted}", JobPage)
