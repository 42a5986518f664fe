"""How a rollout ends: a closed set of outcomes, why the episode stopped, and what training may do with it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

import msgspec

from prorld.errors import (
    BackendError,
    ContextOverflow,
    GraderError,
    HandlerError,
    RendererError,
    RolloutError,
    SandboxError,
    Stale,
    chain,
)

Stage = Literal["init", "run", "eval"]
STAGES: tuple[Stage, ...] = ("init", "run", "eval")


class OutcomeKind(StrEnum):
    """The nine ends of a job. Exactly one of them is reported for every accepted job."""

    OK = "ok"
    POLICY_LIMIT = "policy_limit"
    TIMEOUT = "timeout"
    ENV_ERROR = "env_error"
    LLM_ERROR = "llm_error"
    HANDLER_ERROR = "handler_error"
    GRADER_ERROR = "grader_error"
    CANCELLED = "cancelled"
    LOST = "lost"


class Verdict(StrEnum):
    """What training may do with the rollout.

    ``use``: train on it. ``mask``: real but not trainable, and out of the group's baseline. ``drop``: as if it had
    never happened.
    """

    USE = "use"
    MASK = "mask"
    DROP = "drop"


class StopReason(StrEnum):
    """Why the episode stopped; decided by the agent loop before any grading."""

    FINISHED = "finished"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    CONTEXT_FULL = "context_full"
    MALFORMED = "malformed"


# A limit of the policy is a normal, graded end; only "finished" is plain ok.
POLICY_LIMITS = frozenset({StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.CONTEXT_FULL, StopReason.MALFORMED})

DEFAULT_VERDICTS: Mapping[OutcomeKind, Verdict] = {
    OutcomeKind.OK: Verdict.USE,
    OutcomeKind.POLICY_LIMIT: Verdict.USE,
    OutcomeKind.TIMEOUT: Verdict.MASK,
}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One end, with the stage it happened in, a stable code, and words for people."""

    kind: OutcomeKind
    stage: Stage | None = None
    code: str = ""
    message: str = ""
    retryable: bool = False


def verdict_of(outcome: Outcome, *, graded: bool, table: Mapping[OutcomeKind, Verdict] = DEFAULT_VERDICTS) -> Verdict:
    """The verdict for an outcome. Without a grade nothing may be used, whatever the table says."""
    verdict = table.get(outcome.kind, Verdict.DROP)
    return Verdict.DROP if verdict is Verdict.USE and not graded else verdict


def outcome_of_stop(stop: StopReason) -> Outcome:
    """The outcome of an episode that ran to an end of its own."""
    if stop in POLICY_LIMITS:
        return Outcome(kind=OutcomeKind.POLICY_LIMIT, stage="run", code=stop.value, message=_LIMIT_WORDS[stop])
    return Outcome(kind=OutcomeKind.OK, code="ok")


_LIMIT_WORDS: Mapping[StopReason, str] = {
    StopReason.MAX_TURNS: "the policy used all its turns",
    StopReason.MAX_TOKENS: "the policy used all the tokens it may sample",
    StopReason.CONTEXT_FULL: "the context has no room for another turn",
    StopReason.MALFORMED: "the policy kept answering in a form that can't be parsed",
}

_KIND_OF_ERROR: tuple[tuple[type[RolloutError], OutcomeKind], ...] = (
    (SandboxError, OutcomeKind.ENV_ERROR),
    (Stale, OutcomeKind.CANCELLED),
    (BackendError, OutcomeKind.LLM_ERROR),
    (RendererError, OutcomeKind.LLM_ERROR),
    (GraderError, OutcomeKind.GRADER_ERROR),
    (HandlerError, OutcomeKind.HANDLER_ERROR),
)


def outcome_of_error(exc: BaseException, stage: Stage | None) -> Outcome:
    """Classify what escaped from a stage. Unclassified errors in EVAL are the grader's, elsewhere the handler's."""
    if isinstance(exc, ContextOverflow):
        return outcome_of_stop(StopReason.CONTEXT_FULL)
    for error, kind in _KIND_OF_ERROR:
        if isinstance(exc, error):
            found = _of_handler(stage) if kind is OutcomeKind.HANDLER_ERROR else kind
            return Outcome(kind=found, stage=stage, code=exc.stable_code, message=chain(exc), retryable=exc.may_retry)
    return Outcome(kind=_of_handler(stage), stage=stage, code="internal", message=chain(exc))


def _of_handler(stage: Stage | None) -> OutcomeKind:
    """A handler's own trouble: in EVAL it is the grader."""
    return OutcomeKind.GRADER_ERROR if stage == "eval" else OutcomeKind.HANDLER_ERROR


def timed_out(stage: Stage, seconds: float, *, total: bool = False) -> Outcome:
    """A stage, or the whole job, used up its time. Time-outs of INIT are infrastructure and may be tried again."""
    which = "the job's total budget" if total else f"the {stage} stage"
    return Outcome(
        kind=OutcomeKind.TIMEOUT,
        stage=stage,
        code="total_timeout" if total else f"{stage}_timeout",
        message=f"{which} ran out of its {seconds:g} s",
        retryable=stage == "init" and not total,
    )


def starved(outcome: Outcome, lacking: str) -> Outcome:
    """A time-out that was met while waiting for an engine: infrastructure, not the policy."""
    return Outcome(
        kind=OutcomeKind.LLM_ERROR,
        stage=outcome.stage,
        code=lacking,
        message=f"{outcome.message} while it waited for an engine",
        retryable=outcome.code != "total_timeout",
    )


def cancelled(reason: str, stage: Stage | None) -> Outcome:
    """Somebody asked for the end."""
    return Outcome(kind=OutcomeKind.CANCELLED, stage=stage, code="cancelled", message=reason)


# Of graders, only those whose process was lost are marked retryable: what a grader says, it would say again.
_RETRIED = frozenset({OutcomeKind.ENV_ERROR, OutcomeKind.LLM_ERROR, OutcomeKind.GRADER_ERROR, OutcomeKind.TIMEOUT})


def should_retry(outcome: Outcome, attempt: int, max_attempts: int) -> bool:
    """Whether an attempt that ended so is followed by another one."""
    return outcome.kind in _RETRIED and outcome.retryable and attempt < max_attempts
