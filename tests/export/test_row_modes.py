"""Which distribution the log-probabilities of a row are of."""

from __future__ import annotations

import pytest

from prorld.domain.branch import Branch, VersionSpan
from prorld.domain.calls import CallParams, CallRecord
from prorld.domain.job import JobState, Timing, TokenCounts
from prorld.domain.outcome import Outcome, OutcomeKind, Verdict
from prorld.export.rows import rows_of
from prorld.wire.jobs import Drift
from prorld.wire.trajectory import Trajectory, TrajectoryJob, branch_doc


def rollout_of(*params: CallParams) -> Trajectory:
    """A rollout of one branch with one call of each kind."""
    branch, calls = Branch(), []
    branch.append_given([1, 2], source="prompt")
    for n, given in enumerate(params):
        spans = [VersionSpan(start=0, end=1, version=1)]
        calls.append(
            CallRecord(
                n=n, turn=n, branch=0, backend="b", policy_versions=spans, prompt_len=len(branch), sampled_len=1,
                finish_reason="stop", latency_s=0.5, params=given,
            )
        )  # fmt: skip
        branch.append_sampled([7], [-1.0], spans, calls=[n], message=None, finish_reason="stop")
    ok = Outcome(kind=OutcomeKind.OK, code="ok")
    job = TrajectoryJob(
        job_id="job", handler="sums", policy="default", tenant="default", state=JobState.DONE, outcome=ok,
        verdict=Verdict.USE, reward=1.0, timing=Timing(), turns=1, tokens=TokenCounts(),
        created_at="2026-01-01T00:00:00.000Z", ended_at="2026-01-01T00:01:00.000Z", instance={},
    )  # fmt: skip
    return Trajectory(
        job=job, tokenizer="t", tools=[], branches=[branch_doc(branch)], calls=calls, drift=Drift(), reward=1.0,
        step_rewards=[], verdict=Verdict.USE, outcome=ok,
    )  # fmt: skip


RAW, COOL = CallParams(), CallParams(temperature=0.5, logprobs_mode="processed")


@pytest.mark.parametrize(
    ("calls", "mode"),
    [
        ([RAW], "raw"),
        ([COOL, COOL], "processed"),
        ([CallParams(logprobs_mode="none")], "none"),
        ([RAW, CallParams(logprobs_mode="processed")], "mixed"),
        ([COOL, CallParams(temperature=0.7, logprobs_mode="processed")], "mixed"),
    ],
)
def test_a_row_says_what_its_logprobs_are_of(calls, mode):
    """The mode of its calls, unless one of them, or its temperature, is another: then no single answer is right."""
    (row,) = rows_of(rollout_of(*calls))
    assert row.logprobs_mode == mode
    assert row.temperature == calls[-1].temperature
