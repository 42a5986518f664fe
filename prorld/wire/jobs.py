"""Jobs on the wire: what a client posts and the record it reads."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from prorld.domain.branch import VersionSpan
from prorld.domain.ids import CLIENT_ID_PATTERN
from prorld.domain.job import (
    AgentLimits,
    Attempt,
    JobState,
    MaxStaleness,
    Sampling,
    StageTimeouts,
    Timing,
    TokenCounts,
)
from prorld.domain.outcome import Outcome, Stage, StopReason, Verdict

__all__ = [
    "COLLECTION_VERBS",
    "CancelAnswer",
    "CancelJob",
    "CancelJobs",
    "Drift",
    "JobPage",
    "JobRecord",
    "RequeueJob",
    "SubmitJob",
    "VersionSpan",
]

# What stands in a path where an id could stand, and is therefore none.
COLLECTION_VERBS = ("cancel",)
_RESERVED = "|".join(COLLECTION_VERBS)

ClientId = Annotated[str, Meta(pattern=CLIENT_ID_PATTERN)]
NewJobId = Annotated[str, Meta(pattern=rf"^(?!(?:{_RESERVED})$){CLIENT_ID_PATTERN.removeprefix('^')}")]
Name = Annotated[str, Meta(min_length=1, max_length=128)]


class SubmitJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/jobs``: one rollout of one instance."""

    instance: dict[str, Any]
    job_id: NewJobId | None = None
    handler: Name | None = None
    policy: Name = "default"
    sampling: Sampling = Sampling()
    agent: AgentLimits = AgentLimits()
    timeouts: StageTimeouts = StageTimeouts()
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    purpose: Literal["train", "eval"] = "train"
    group_id: ClientId | None = None
    sample_index: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    max_attempts: Annotated[int, Meta(ge=1, le=10)] = 2
    max_staleness: MaxStaleness | UnsetType = UNSET
    capture: Annotated[list[Name], Meta(max_length=8)] = []
    metadata: dict[str, Any] = {}
    callback_url: Annotated[str, Meta(max_length=2048)] | None = None


class CancelJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/jobs/{id}/cancel``."""

    reason: Annotated[str, Meta(max_length=500)] = "cancelled by the client"


class CancelJobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/jobs/cancel``: exactly one of the three selectors."""

    job_ids: Annotated[list[str], Meta(max_length=10_000)] | UnsetType = UNSET
    group_id: str | UnsetType = UNSET
    batch_id: str | UnsetType = UNSET
    reason: Annotated[str, Meta(max_length=500)] = "cancelled by the client"

    def __post_init__(self) -> None:
        if sum(selector is not UNSET for selector in (self.job_ids, self.group_id, self.batch_id)) != 1:
            raise ValueError("give exactly one of job_ids, group_id and batch_id")


class CancelAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """How many jobs are on their way out."""

    cancelling: int


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the trainer's tokens are the engine's."""

    verdict: Literal["exact", "forked", "realigned", "broken"] = "exact"
    first_index: int | None = None
    tokens_affected: int = 0


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a job. ``outcome`` and what follows it are set when ``state`` is ``done``.

    ``waiting_for`` names the stage whose turn has not come; ``journal`` is a job whose end is not on the disk yet.
    ``metrics`` are what the handler measured in the last attempt, graded or not: figures that are no reward.
    """

    job_id: str
    handler: str
    policy: str
    tenant: str
    state: JobState
    waiting_for: Stage | Literal["journal"] | None = None
    outcome: Outcome | None = None
    verdict: Verdict | None = None
    reward: float | None = None
    reward_parts: dict[str, float] = {}
    metrics: dict[str, float] = {}
    stop_reason: StopReason | None = None
    attempts: list[Attempt] = []
    timing: Timing
    turns: int = 0
    tokens: TokenCounts = TokenCounts()
    backends: list[str] = []
    policy_versions: list[int] = []
    drift: Drift = Drift()
    group_id: str | None = None
    sample_index: int = 0
    metadata: dict[str, Any] = {}
    requeued_from: str | None = None
    created_at: str
    ended_at: str | None = None


class JobPage(msgspec.Struct, frozen=True, kw_only=True):
    """One page of a list, newest first; ``next`` is opaque."""

    items: list[JobRecord]
    next: str | None = None


class RequeueJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/jobs/{id}/requeue``: the id of the new job; with one the call may be repeated."""

    job_id: NewJobId | None = None
