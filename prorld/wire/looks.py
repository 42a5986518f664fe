"""A second look at an ended job: whether its trajectory is sound, and what a grader says of it now."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from prorld.domain.outcome import Outcome
from prorld.wire.trajectory import StepReward

__all__ = [
    "ReevaluateJob",
    "Reevaluation",
    "ReevaluationPage",
    "ReevaluationState",
    "Result",
    "Unverifiable",
    "VerifyAnswer",
    "Violation",
]


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """One invariant that does not hold, and where."""

    code: str
    message: str
    branch: int | None = None
    call: int | None = None


class Unverifiable(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled tokens of a policy version that no engine serves now, so nothing can sample or score them again."""

    epoch: int
    version: int | None
    tokens: int


Result = Literal["ok", "unverifiable", "broken"]


class VerifyAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /v1/jobs/{id}/verify``. ``ok`` says the same as ``result`` does.

    ``broken``: an invariant does not hold, do not train on it. ``unverifiable``: every invariant holds, and some tokens
    are of a version that no engine serves any more.
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
