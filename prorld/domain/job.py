"""A job's request, its states and the only legal ways between them."""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from prorld.domain.outcome import Outcome, Stage

Seconds = Annotated[float, Meta(gt=0, le=7 * 86400)]
# Versions that the policy may have gone on since the oldest token; ``None`` for as many as it likes.
MaxStaleness = Annotated[int, Meta(ge=0, le=10**9)] | None


class JobState(StrEnum):
    """Where a job is. While it waits for the next gate it keeps the state before it and names what it waits for."""

    QUEUED = "queued"
    INITIALISING = "initialising"
    RUNNING = "running"
    EVALUATING = "evaluating"
    DONE = "done"


STATE_OF_STAGE: dict[Stage, JobState] = {
    "init": JobState.INITIALISING,
    "run": JobState.RUNNING,
    "eval": JobState.EVALUATING,
}

# A retry goes back to INIT from anywhere; every state may end; nothing leaves DONE.
_NEXT: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.INITIALISING, JobState.DONE}),
    JobState.INITIALISING: frozenset({JobState.INITIALISING, JobState.RUNNING, JobState.DONE}),
    JobState.RUNNING: frozenset({JobState.INITIALISING, JobState.EVALUATING, JobState.DONE}),
    JobState.EVALUATING: frozenset({JobState.INITIALISING, JobState.DONE}),
    JobState.DONE: frozenset(),
}


def advance(state: JobState, to: JobState) -> JobState:
    """The next state; a step that is not in the table is a bug of ours."""
    if to not in _NEXT[state]:
        raise AssertionError(f"illegal step {state} -> {to}")
    return to


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the policy samples. The defaults leave the engine's distribution as it is."""

    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=1_000_000)] = -1
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    max_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] = 2048
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    stop: Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=16)] = []
    chat_template_kwargs: dict[str, Any] = {}


class AgentLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the policy may use up in one rollout, and the tools it is offered (``None``: what the handler offers)."""

    max_turns: Annotated[int, Meta(ge=1, le=10_000)] = 30
    max_context_tokens: Annotated[int, Meta(ge=16, le=10_000_000)] = 32768
    max_sampled_tokens: Annotated[int, Meta(ge=1, le=10_000_000)] = 65536
    tools: Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=64)] | None = None


class StageTimeouts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Budgets in seconds. They run only while the stage runs; waiting at a gate costs nothing."""

    init_s: Seconds = 300.0
    run_s: Seconds = 1800.0
    eval_s: Seconds = 600.0
    total_s: Seconds | None = None

    def of(self, stage: Stage) -> float:
        """The budget of one stage."""
        return {"init": self.init_s, "run": self.run_s, "eval": self.eval_s}[stage]


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout of one instance, complete: what the client asked for with every default filled in.

    Where ``max_staleness`` was left out, that of the policy counts.
    """

    job_id: str
    tenant: str
    handler: str
    instance: dict[str, Any]
    policy: str = "default"
    sampling: Sampling = Sampling()
    agent: AgentLimits = AgentLimits()
    timeouts: StageTimeouts = StageTimeouts()
    priority: int = 0
    purpose: Literal["train", "eval"] = "train"
    group_id: str | None = None
    batch_id: str | None = None
    sample_index: int = 0
    max_attempts: int = 2
    max_staleness: MaxStaleness | UnsetType = UNSET
    capture: list[str] = []
    metadata: dict[str, Any] = {}
    callback_url: str | None = None
    requeued_from: str | None = None


def effective_seed(spec: JobSpec, attempt: int, call: int) -> int | None:
    """The seed of one engine call, so that the samples of a group differ and the whole run can be repeated."""
    if spec.sampling.seed is None:
        return None
    words = f"{spec.sampling.seed}|{spec.group_id or spec.job_id}|{spec.sample_index}|{attempt}|{call}"
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=4).digest(), "big")


class Timing(msgspec.Struct, kw_only=True):
    """Where the time went, in seconds, summed over the attempts."""

    queue_init_s: float = 0.0
    init_s: float = 0.0
    queue_run_s: float = 0.0
    run_s: float = 0.0
    queue_eval_s: float = 0.0
    eval_s: float = 0.0
    paused_s: float = 0.0
    llm_s: float = 0.0
    tool_s: float = 0.0

    def queued(self, stage: Stage, seconds: float) -> None:
        """Waited this long at the gate of a stage."""
        match stage:
            case "init":
                self.queue_init_s += seconds
            case "run":
                self.queue_run_s += seconds
            case "eval":
                self.queue_eval_s += seconds

    def ran(self, stage: Stage, seconds: float) -> None:
        """Spent this long in a stage."""
        match stage:
            case "init":
                self.init_s += seconds
            case "run":
                self.run_s += seconds
            case "eval":
                self.eval_s += seconds


class TokenCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a rollout over all its branches: prompt, sampled by the policy, observed from the environment."""

    prompt: int = 0
    sampled: int = 0
    observed: int = 0


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One try at a job."""

    n: int
    outcome: Outcome
    started_at: str
    ended_at: str
