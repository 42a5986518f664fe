"""Outcomes: every error has one, and nothing may be trained on without a grade."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorld.domain.outcome import (
    DEFAULT_VERDICTS,
    Outcome,
    OutcomeKind,
    StopReason,
    Verdict,
    cancelled,
    outcome_of_error,
    outcome_of_stop,
    should_retry,
    timed_out,
    verdict_of,
)
from prorld.errors import (
    BackendError,
    ContextOverflow,
    GraderError,
    HandlerError,
    NoBackend,
    RendererError,
    SandboxError,
)

KINDS = st.sampled_from(OutcomeKind)
TABLES = st.dictionaries(KINDS, st.sampled_from(Verdict))


@given(kind=KINDS, table=TABLES)
def test_nothing_ungraded_is_ever_used(kind: OutcomeKind, table: dict[OutcomeKind, Verdict]) -> None:
    """Whatever the table says, a rollout without a grade is not ``use``."""
    assert verdict_of(Outcome(kind=kind), graded=False, table=table) is not Verdict.USE


@given(kind=KINDS, table=TABLES)
def test_a_graded_rollout_gets_what_the_table_says(kind: OutcomeKind, table: dict[OutcomeKind, Verdict]) -> None:
    """The table decides; what it leaves out is dropped."""
    assert verdict_of(Outcome(kind=kind), graded=True, table=table) is table.get(kind, Verdict.DROP)


def test_the_default_table_trains_on_graded_ends_and_masks_timeouts() -> None:
    """Ok and policy_limit are used, timeout is masked, all else is dropped."""
    verdicts = {kind: verdict_of(Outcome(kind=kind), graded=True, table=DEFAULT_VERDICTS) for kind in OutcomeKind}
    used = {kind for kind, verdict in verdicts.items() if verdict is Verdict.USE}
    masked = {kind for kind, verdict in verdicts.items() if verdict is Verdict.MASK}
    assert used == {OutcomeKind.OK, OutcomeKind.POLICY_LIMIT}
    assert masked == {OutcomeKind.TIMEOUT}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (SandboxError("x"), OutcomeKind.ENV_ERROR),
        (BackendError("x"), OutcomeKind.LLM_ERROR),
        (NoBackend("x"), OutcomeKind.LLM_ERROR),
        (RendererError("x"), OutcomeKind.LLM_ERROR),
        (HandlerError("x"), OutcomeKind.HANDLER_ERROR),
        (GraderError("x"), OutcomeKind.GRADER_ERROR),
        (ContextOverflow("x"), OutcomeKind.POLICY_LIMIT),
        (ZeroDivisionError("x"), OutcomeKind.HANDLER_ERROR),
    ],
)
def test_each_error_has_its_outcome(error: Exception, kind: OutcomeKind) -> None:
    """The taxonomy maps onto the closed set of outcomes."""
    assert outcome_of_error(error, "run").kind is kind


def test_an_unknown_error_in_eval_is_the_graders() -> None:
    """A bug in a grader is a grader error, so that it can never be read as a zero."""
    assert outcome_of_error(ZeroDivisionError("x"), "eval").kind is OutcomeKind.GRADER_ERROR


@given(stop=st.sampled_from(StopReason))
def test_every_stop_reason_is_a_graded_end(stop: StopReason) -> None:
    """A limit of the policy is a normal end; only ``finished`` is plain ok."""
    expected = OutcomeKind.OK if stop is StopReason.FINISHED else OutcomeKind.POLICY_LIMIT
    assert outcome_of_stop(stop).kind is expected


@given(attempt=st.integers(1, 10), attempts_max=st.integers(1, 10))
def test_only_infrastructure_is_tried_again(attempt: int, attempts_max: int) -> None:
    """And never beyond the last attempt."""
    again = attempt < attempts_max
    assert should_retry(outcome_of_error(SandboxError("x"), "init"), attempt, attempts_max) is again
    assert should_retry(timed_out("init", 1.0), attempt, attempts_max) is again
    for outcome in (
        outcome_of_error(HandlerError("x"), "run"),
        outcome_of_error(GraderError("x"), "eval"),
        outcome_of_error(BackendError("x", retryable=False), "run"),
        outcome_of_stop(StopReason.FINISHED),
        timed_out("run", 1.0),
        timed_out("init", 1.0, total=True),
        cancelled("x", "run"),
    ):
        assert not should_retry(outcome, attempt, attempts_max)
