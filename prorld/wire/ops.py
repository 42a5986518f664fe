"""Operations on the wire: status, health, handlers, engines, stages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

BackendKindName = Literal["vllm", "sglang", "llamacpp", "openai", "prorl"]


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What went wrong, for a program (``code``, ``retryable``) and for a person (``message``)."""

    code: str
    message: str
    retryable: bool
    details: dict[str, Any] | None = None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class Condition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that is wrong, and the cure. An ``error`` keeps the daemon from being ready, a ``warning`` does not."""

    code: str
    message: str
    cure: str
    severity: Literal["error", "warning"] = "error"
    broken_for_s: float | None = None
    policy: str | None = None


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /readyz``."""

    ready: bool
    missing: list[Condition] = []


class NotReady(Ready, frozen=True, kw_only=True):
    """``GET /readyz`` with 503: the same, readable as an error too."""

    error: ErrorDetail


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /healthz``: the process answers."""

    status: Literal["ok"] = "ok"


class DrainAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /v1/drain``: no new jobs from now on, and what is left by state."""

    draining: bool
    jobs: dict[str, int]


class StageStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One stage gate."""

    workers: int
    active: int
    waiting: int


class Stages(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /v1/stages``."""

    init: StageStatus
    run: StageStatus
    eval: StageStatus


class StagePatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """New size of one stage gate; 0 pauses it."""

    workers: Annotated[int, Meta(ge=0, le=100_000)]


class StagesPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``PATCH /v1/stages``."""

    init: StagePatch | None = None
    run: StagePatch | None = None
    eval: StagePatch | None = None


class LoopLagStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How late the event loop runs its tasks."""

    p50: float = 0.0
    p99: float = 0.0


class BackendInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One engine of a policy. ``id`` is its ``backend_id``, by the name that answers about policies use.

    ``call_limit`` is how many calls it is given at once now, ``queued`` how many wait for a place, ``errors`` counts
    failed calls by code, and ``busy_s`` is time with at least one call in it.
    """

    backend_id: str
    url: str
    kind: BackendKindName
    policy: str
    state: str
    model: str
    max_context_tokens: int
    leases: int = 0
    inflight: int = 0
    max_inflight: int | None = None
    weight: float = 1.0
    version: int | None = None
    calls_total: int = 0
    errors_total: int = 0
    node: str | None = None
    queued: int = 0
    call_limit: int | None = None
    strikes: int = 0
    errors: dict[str, int] = {}
    tokens_prompted_total: int = 0
    tokens_sampled_total: int = 0
    tokens_cached_total: int = 0
    migrated_in_total: int = 0
    migrated_away_total: int = 0
    busy_s: float = 0.0
    details: dict[str, Any] = {}
    id: str = ""


class BackendList(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /v1/backends``. ``generation`` moves when the set changes, not with the health of who is in it."""

    items: list[BackendInfo]
    generation: int = 0
    next: str | None = None


BackendUrl = Annotated[str, Meta(min_length=8, max_length=2048)]
PolicyName = Annotated[str, Meta(min_length=1, max_length=128)]
ModelName = Annotated[str, Meta(max_length=512)]
MaxInflight = Annotated[int, Meta(ge=1, le=1_000_000)]
Weight = Annotated[float, Meta(gt=0, le=1000)]
NodeName = Annotated[str, Meta(max_length=256)]


class AddBackend(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/backends``."""

    url: BackendUrl
    kind: BackendKindName
    policy: PolicyName = "default"
    model: ModelName | None = None
    max_inflight: MaxInflight | None = None
    weight: Weight = 1.0
    node: NodeName | None = None


class SetBackend(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine of a new set; ``policy``, where it is said, is that of the set."""

    url: BackendUrl
    kind: BackendKindName
    policy: PolicyName | None = None
    model: ModelName | None = None
    max_inflight: MaxInflight | None = None
    weight: Weight = 1.0
    node: NodeName | None = None


class SetBackends(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``PUT /v1/backends``: the whole set of a policy.

    ``version`` is what its engines have; ``removed`` says what becomes of leases on those that are not named any more;
    ``pause_id`` is that of a pause of the caller's own.
    """

    policy: PolicyName = "default"
    generation: Annotated[int, Meta(ge=0)]
    backends: Annotated[list[SetBackend], Meta(min_length=1, max_length=1024)]
    version: Annotated[int, Meta(ge=0, le=10**15)] | None = None
    removed: Literal["drain", "migrate"] = "drain"
    pause_id: Annotated[str, Meta(max_length=128)] | None = None


class FailedBackend(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that was named and could not be taken as it was named."""

    url: str
    code: str
    message: str


class BackendSet(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to ``PUT /v1/backends``: the set as it is now, and what of the wish could not be had."""

    policy: str
    generation: int
    items: list[BackendInfo]
    failed: list[FailedBackend] = []
    removed: list[str] = []


class HandlerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One handler, or one plugin that could not be loaded."""

    name: str
    version: str
    origin: str
    data_sources: list[str] = []
    tools: list[str] = []
    instance_schema: dict[str, Any] | None = None
    error: str | None = None


class HandlerList(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /v1/handlers``."""

    items: list[HandlerInfo]
    next: str | None = None


class SandboxRow(msgspec.Struct, frozen=True, kw_only=True):
    """One live sandbox."""

    sandbox_id: str
    job_id: str
    runtime: str
    image: str | None
    state: str
    age_s: float
    rss_bytes: int


class SandboxList(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /v1/sandboxes``."""

    items: list[SandboxRow]
    next: str | None = None


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /v1/status``. ``sandboxes_warm`` of the sandboxes wait for a job; ``cgroups``: each has one of its own.

    ``batches`` counts those that run, by purpose.
    """

    version: str
    boot_id: str
    pid: int
    uptime_s: float
    draining: bool
    jobs: dict[str, int]
    outcomes: dict[str, int]
    batches: dict[str, int] = {}
    stages: Stages
    backends: list[BackendInfo]
    sandboxes: int
    sandboxes_warm: int = 0
    cgroups: bool = False
    loop_lag_s: LoopLagStatus
    conditions: list[Condition] = []


class TaskNode(msgspec.Struct, frozen=True, kw_only=True):
    """One task. ``waits_at`` is the innermost line of ours that it waits in; ``left_out`` counts children not shown."""

    name: str
    age_s: float
    waits_at: str
    children: list[TaskNode] = []
    left_out: int = 0


class TaskTree(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /v1/debug/tasks``."""

    tasks: int
    root: TaskNode


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """``endpoint.json`` in the state directory: where the daemon of this directory listens."""

    address: str
    boot_id: str
    pid: int
    version: str
    started_at: str
    compat_address: str | None = None
