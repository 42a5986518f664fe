"""Batches on the wire: what a trainer asks for, the events of its groups, and the groups that it trains on."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from prorld.domain.batch import BatchState, Informative, Leftovers, OnError, OnTimeout, Quorum, Selection
from prorld.domain.job import AgentLimits, Sampling, StageTimeouts
from prorld.domain.outcome import Verdict
from prorld.wire.jobs import ClientId, Name, NewJobId
from prorld.wire.trajectory import PackedTrajectory, Trajectory

__all__ = [
    "AckAnswer",
    "AckBatch",
    "AppendAnswer",
    "AppendInstances",
    "BatchEvent",
    "BatchEventPage",
    "BatchGroup",
    "BatchGroupPage",
    "BatchPage",
    "BatchRecord",
    "BeforeFilter",
    "CancelBatch",
    "Durations",
    "EndCounts",
    "GroupCounts",
    "PackedBatchGroup",
    "PackedBatchGroupPage",
    "StalenessSeen",
    "SubmitBatch",
    "Waste",
]

Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Seconds = Annotated[float, Meta(ge=0, le=30 * 86400)]


class SubmitBatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/batches``: so many informative groups of n samples each.

    ``last``: no prompts will be appended. Left out, it holds for a batch that comes with prompts and is no stream, as
    long as nothing is appended all the same.
    """

    instances: list[dict[str, Any]] = []
    last: bool | None = None
    batch_id: NewJobId | None = None
    handler: Name | None = None
    policy: Name = "default"
    purpose: Literal["train", "eval"] = "train"
    samples_per_group: Annotated[int, Meta(ge=1, le=4096)] = 8
    target_groups: Count | None = None
    informative: Informative = Informative()
    max_running_groups: Count | None = None
    max_ready_groups: Count = 96
    max_groups: Count | None = None
    max_wall_s: Annotated[float, Meta(gt=0, le=30 * 86400)] | None = None
    selection: Selection = "arrival"
    quorum: Quorum = Quorum()
    on_error: OnError = "retry"
    on_timeout: OnTimeout = "mask"
    leftovers: Leftovers = "carry"
    carry_ttl_s: Seconds = 3600.0
    carry_from: ClientId | None = None
    max_staleness: Annotated[int, Meta(ge=0, le=10**9)] | None = 2
    pin_version: bool = False
    max_attempts: Annotated[int, Meta(ge=1, le=10)] = 2
    sampling: Sampling = Sampling()
    agent: AgentLimits = AgentLimits()
    timeouts: StageTimeouts = StageTimeouts()
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | UnsetType = UNSET
    capture: Annotated[list[Name], Meta(max_length=8)] = []
    metadata: dict[str, Any] = {}


class GroupCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Groups by where they are; the last six are ends. ``informative`` are those that were accepted."""

    waiting: int = 0
    running: int = 0
    informative: int = 0
    uninformative: int = 0
    failed: int = 0
    stale: int = 0
    cancelled: int = 0
    carried: int = 0


class EndCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Groups of an ended batch by their terminal events; ``submitted`` is the sum of the others."""

    submitted: int = 0
    done: int = 0
    filtered: int = 0
    failed: int = 0
    stale: int = 0
    cancelled: int = 0
    carried: int = 0


class BeforeFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Rewards of all groups that ran to their end, informative or not; shares are null before the first of them.

    ``reward_histogram`` counts usable samples by reward, at most so many different ones.
    """

    groups: int = 0
    samples: int = 0
    reward_mean: float | None = None
    reward_histogram: dict[str, int] = {}
    solved_none: int = 0
    solved_all: int = 0
    kept_fraction: float | None = None


class Durations(msgspec.Struct, frozen=True, kw_only=True):
    """How long rollouts took: those of the accepted groups, of all informative ones, of all that ended by themselves.

    ``bias`` is the first relative to the second: -0.3 says that what is trained on took 30 % less time.
    """

    accepted_mean_s: float | None = None
    informative_mean_s: float | None = None
    all_mean_s: float | None = None
    bias: float | None = None


class Waste(msgspec.Struct, frozen=True, kw_only=True):
    """Work that no trainer gets: jobs of groups that were filtered, failed, stale or cancelled."""

    jobs: int = 0
    sampled_tokens: int = 0
    seconds: float = 0.0


class StalenessSeen(msgspec.Struct, frozen=True, kw_only=True):
    """Of the accepted groups."""

    mean: float | None = None
    max: int | None = None


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a batch."""

    batch_id: str
    tenant: str
    handler: str
    policy: str
    purpose: Literal["train", "eval"]
    state: BatchState
    reason: str | None = None
    samples_per_group: int
    target_groups: int | None
    priority: int = 0
    next_offset: int = 0
    is_last: bool = False
    wants: int = 0
    acknowledged: int = 0
    last_seq: int = 0
    carry_from: str | None = None
    carried_to: str | None = None
    leftovers: int = 0
    groups: GroupCounts = GroupCounts()
    before_filter: BeforeFilter = BeforeFilter()
    durations: Durations = Durations()
    waste: Waste = Waste()
    staleness: StalenessSeen = StalenessSeen()
    metadata: dict[str, Any] = {}
    created_at: str
    ended_at: str | None = None


class BatchPage(msgspec.Struct, frozen=True, kw_only=True):
    """One page of a list, newest first; ``next`` is opaque."""

    items: list[BatchRecord]
    next: str | None = None


class AppendInstances(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/batches/{id}/instances``: more prompts, from ``offset`` on. ``last``: there will be no more."""

    offset: Annotated[int, Meta(ge=0, le=2**53)]
    instances: list[dict[str, Any]] = []
    last: bool = False


class AppendAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """How many of these are in, and where the next ones begin."""

    accepted: int
    next_offset: int


class AckBatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/batches/{id}/ack``: everything up to this number is safe with the trainer, or of no use to it."""

    through: Annotated[int, Meta(ge=0, le=2**53)]
    discard: Annotated[list[ClientId], Meta(max_length=10_000)] = []


class AckAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Up to where it is acknowledged now, and how many accepted groups still wait for it."""

    through: int
    ready: int


class CancelBatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/batches/{id}/cancel``."""

    reason: Annotated[str, Meta(max_length=500)] = "cancelled by the client"


class BatchEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One numbered event of a batch.

    The terminal events of groups (``group.done``, ``.filtered``, ``.failed``, ``.stale``, ``.cancelled``,
    ``.carried``) fill everything from ``index`` to ``job_ids``: arrays by sample index, null where a sample has none.
    ``batch.wants`` has ``total``; ``batch.end`` has ``reason``, ``state`` and ``counts``.
    """

    seq: int
    event: str
    at: str
    index: int | UnsetType = UNSET
    group_id: str | UnsetType = UNSET
    instance_id: str | UnsetType | None = UNSET
    reason: str | UnsetType = UNSET
    rewards: list[float | None] | UnsetType = UNSET
    verdicts: list[Verdict | None] | UnsetType = UNSET
    durations_s: list[float | None] | UnsetType = UNSET
    policy_versions: list[list[int]] | UnsetType = UNSET
    job_ids: list[str | None] | UnsetType = UNSET
    advantages: list[float | None] | UnsetType = UNSET
    advantage_formula: str | UnsetType = UNSET
    staleness: int | UnsetType | None = UNSET
    total: int | UnsetType = UNSET
    state: BatchState | UnsetType = UNSET
    counts: EndCounts | UnsetType = UNSET


class BatchEventPage(msgspec.Struct, frozen=True, kw_only=True):
    """Events of a batch in order; ``next`` is the ``after`` of the following page where a bound cut this one."""

    items: list[BatchEvent]
    next: str | None = None


class BatchGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group to train on; ``seq`` is that of its ``group.done``. Trajectories are by sample index."""

    seq: int
    index: int
    group_id: str
    instance_id: str | None = None
    rewards: list[float | None]
    verdicts: list[Verdict | None]
    durations_s: list[float | None]
    policy_versions: list[list[int]]
    job_ids: list[str | None]
    advantages: list[float | None]
    advantage_formula: str
    staleness: int | None = None
    instance: dict[str, Any] | UnsetType = UNSET
    trajectories: list[Trajectory | None] | UnsetType = UNSET


class PackedBatchGroup(BatchGroup, frozen=True, kw_only=True):
    """The same in MessagePack."""

    trajectories: list[PackedTrajectory | None] | UnsetType = UNSET  # type: ignore[assignment]


class BatchGroupPage(msgspec.Struct, frozen=True, kw_only=True):
    """Groups in order of acceptance. ``is_over``: the batch has ended and there will be no other one."""

    items: list[BatchGroup]
    next: str | None = None
    state: BatchState
    is_over: bool = False


class PackedBatchGroupPage(msgspec.Struct, frozen=True, kw_only=True):
    """The same in MessagePack."""

    items: list[PackedBatchGroup]
    next: str | None = None
    state: BatchState
    is_over: bool = False
