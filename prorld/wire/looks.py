"""A second look at an ended job: whether its trajectory is sound, and what a grader says of it now."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from prorld.domain.outcome import Outcome
from prorld.domain.scoring import UnscoredReason, Worst
from prorld.wire.trajectory import StepReward

__all__ = [
    "ReevaluateJob",
    "Reevaluation",
    "ReevaluationPage",
    "ReevaluationState",
    "Rescore",
    "Result",
    "Unverifiable",
    "VerifyAnswer",
    "VersionScore",
    "Violation",
]


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """One invariant that does not hold, and where."""

    code: str
    message: str
    branch: int | None = None
    call: int | None = None


class Unverifiable(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled tokens of a policy version that nothing can confirm, and why.

    Without re-scoring the reason is always ``not_served``: no engine has that version now.
    """

    epoch: int
    version: int | None
    tokens: int
    reason: UnscoredReason = "not_served"


class VersionScore(msgspec.Struct, frozen=True, kw_only=True):
    """How far the recorded log-probabilities of one version are from those that ``backends`` give its tokens now.

    ``tolerance_mean`` is wider than that of the whole where the results of these engines depend on their load.
    """

    epoch: int
    version: int | None
    tokens: int
    mean: float
    max: float
    worst: Worst
    backends: list[str]
    tolerance_mean: float


class Rescore(msgspec.Struct, frozen=True, kw_only=True):
    """A second look of the engines at the sampled tokens: absolute differences to what was recorded.

    Each version has to be within both tolerances. ``mean``, ``max`` and ``worst`` are null where nothing was compared.
    """

    tokens: int
    mean: float | None
    max: float | None
    worst: Worst | None
    by_version: list[VersionScore]
    backends: list[str]
    tolerance_mean: float
    tolerance_max: float
    seconds: float


Result = Literal["ok", "unverifiable", "broken"]


class VerifyAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /v1/jobs/{id}/verify``. ``ok`` says the same as ``result`` does.

    ``broken``: an invariant does not hold, or log-probabilities drifted; do not train on it. ``unverifiable``: nothing
    is wrong, and some tokens can't be confirmed. ``rescore`` is null where it was not asked for, and where the tokens
    don't even fit their call log.
    """

    job_id: str
    ok: bool
    result: Result
    violations: list[Violation]
    unverifiable: list[Unverifiable]
    branches: int
    calls: int
    tokens: int
    sampled: int
    rescore: Rescore | None = None


class ReevaluationState(StrEnum):
    """Where a reevaluation is."""

    QUEUED = "queued"
    EVALUATING = "evaluating"
    DONE = "done"


class ReevaluateJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/jobs/{id}/reevaluate``: ``eval_s`` stands for the job's own budget, ``reason`` is kept with it."""

    eval_s: Annotated[float, Meta(gt=0, le=7 * 86400)] | None = None
    reason: Annotated[str, Meta(max_length=500)] = ""


class Reevaluation(msgspec.Struct, frozen=True, kw_only=True):
    """What a grader said of a stored rollout. The job's own record and trajectory stay as they were delivered."""

    n: int
    job_id: str
    tenant: str
    state: ReevaluationState
    reason: str = ""
    outcome: Outcome | None = None
    reward: float | None = None
    reward_parts: dict[str, float] = {}
    step_rewards: list[StepReward] = []
    queue_eval_s: float = 0.0
    eval_s: float = 0.0
    created_at: str
    ended_at: str | None = None


class ReevaluationPage(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /v1/jobs/{id}/reevaluations``, newest first."""

    items: list[Reevaluation]
    next: str | None = None
