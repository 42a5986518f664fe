"""A trajectory made by hand, and the command line as a function."""

from __future__ import annotations

import sys

import msgspec
import pytest
import structlog

from prorld.cli.main import main
from prorld.domain.branch import Branch, VersionSpan
from prorld.domain.calls import CallRecord
from prorld.domain.job import JobState, Timing, TokenCounts
from prorld.domain.messages import CallStatus, Message, ToolCall, ToolSchema, system, tool_result, user
from prorld.domain.outcome import Outcome, OutcomeKind, StopReason, Verdict
from prorld.handlers import registry
from prorld.wire.jobs import Drift, JobRecord
from prorld.wire.trajectory import Trajectory, TrajectoryJob, branch_doc
from tests.cli.distributions import Site

CALL = ToolCall(id="c1", name="calc", arguments={"expression": "2+2"}, raw="CALC: 2+2")
BROKEN = ToolCall(id="c2", name="", status=CallStatus.INVALID_JSON, raw="CALC {{{")


def make_branch():
    """Prompt, a turn with a tool call, its result, a last turn under a newer policy version."""
    branch = Branch()
    branch.append_given([1, 2], "glue")
    branch.append_given([3, 4, 5], "prompt", system("You have a calculator."))
    branch.append_given([6, 7], "prompt", user("What is 2+2? \x1b[2J\u202eevil"))
    said = Message(role="assistant", content="Let me see.", reasoning="It is easy.", tool_calls=[CALL, BROKEN])
    spans = [VersionSpan(start=0, end=2, version=3)]
    branch.append_sampled([10, 11], [-0.5, -1.5], spans, calls=[0], message=said, finish_reason="stop")
    branch.append_given([20, 21, 22], "observation", tool_result("4", "c1"))
    end = Message(role="assistant", content="ANSWER: 4\nline two\nline three")
    spans = [VersionSpan(start=0, end=1, version=3), VersionSpan(start=1, end=2, version=4)]
    branch.append_sampled([30, 31], [-0.25, -0.25], spans, calls=[1, 2], message=end, finish_reason="stop")
    return branch


def call(n, turn, sampled):
    return CallRecord(
        n=n, turn=turn, branch=0, backend="b-1", policy_versions=[], prompt_len=7, sampled_len=sampled,
        finish_reason="stop", latency_s=0.5,
    )  # fmt: skip


def make_record(**changes):
    """A record of a job that ended well."""
    record = JobRecord(
        job_id="job-1", handler="calc", policy="default", tenant="default", state=JobState.DONE,
        outcome=Outcome(kind=OutcomeKind.OK, code="ok"), verdict=Verdict.USE, reward=1.0, reward_parts={"exact": 1.0},
        stop_reason=StopReason.FINISHED, timing=Timing(init_s=0.5, queue_run_s=1.0, run_s=2.0, eval_s=0.001, llm_s=1.5),
        turns=2, tokens=TokenCounts(prompt=7, sampled=4, observed=3), backends=["b-1"], policy_versions=[3, 4],
        created_at="2026-01-01T00:00:00.123456Z", ended_at="2026-01-01T00:00:04Z",
    )  # fmt: skip
    return msgspec.structs.replace(record, **changes)


def make_trajectory(**changes):
    """The document of that job."""
    record = make_record()
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    doc = Trajectory(
        job=TrajectoryJob(**fields, instance={"question": "2+2"}), tokenizer="smollm2 sha256:abc",
        tools=[ToolSchema(name="calc", description="d", parameters={})], branches=[branch_doc(make_branch())],
        calls=[call(0, 0, 2), call(1, 1, 1), call(2, 1, 1)], drift=Drift(), reward=1.0, step_rewards=[],
        verdict=Verdict.USE, outcome=Outcome(kind=OutcomeKind.OK, code="ok"),
    )  # fmt: skip
    return msgspec.structs.replace(doc, **changes)


@pytest.fixture
def make():
    """The makers of documents."""

    class Makers:
        record = staticmethod(make_record)
        trajectory = staticmethod(make_trajectory)

    return Makers


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A place to install distributions to, for this test alone."""
    path = tmp_path / "site"
    path.mkdir()
    monkeypatch.syspath_prepend(str(path))
    known = set(sys.modules)
    yield Site(path)
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(path)):
            del sys.modules[name]


@pytest.fixture
def cli(capsys, monkeypatch, tmp_path):
    """Run a command; gives (exit code, stdout, stderr). The user's own daemon and configuration are out of reach."""
    for name in ("PRORLD_ADDRESS", "PRORLD_TOKEN", "PRORLD_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PRORLD_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def call_cli(*argv):
        try:
            code = int(main(argv))
        except SystemExit as exc:
            code = int(exc.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    yield call_cli
    # A command that runs without a daemon silences its logs, for the whole process, and loggers keep what they were.
    structlog.reset_defaults()
    vars(registry.log).pop("bind", None)
