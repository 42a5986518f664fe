"""The demo's decisions: what it hands in, what it counts, when it was good."""

from __future__ import annotations

import msgspec
import pytest

from prorld.cli.conversation import View
from prorld.cli.demo_run import Report, Row, count_tool_calls, is_good, pick, plan, progress, report_lines
from prorld.cli.exits import UsageError
from prorld.cli.output import Style
from prorld.domain.ids import is_client_id
from prorld.domain.job import JobState
from prorld.domain.outcome import Outcome, OutcomeKind
from prorld.wire.events import JobEvent


def test_the_plan_mixes_what_is_installed():
    """Every job has a valid id of its own; the last is mathematics where both handlers are there."""
    jobs = plan(4, {"calc", "math", "other"}, "demo-x")
    assert [job.handler for job in jobs] == ["calc", "calc", "calc", "math"]
    assert len({job.job_id for job in jobs}) == 4
    assert all(is_client_id(job.job_id or "") for job in jobs)
    assert [job.handler for job in plan(2, {"math"}, "d")] == ["math", "math"]
    assert [job.handler for job in plan(1, {"calc", "math"}, "d")] == ["calc"]


def test_the_plan_is_the_same_every_time():
    """Two demos of the same size hand in the same tasks."""
    assert [job.instance for job in plan(5, {"calc"}, "a")] == [job.instance for job in plan(5, {"calc"}, "b")]


def test_the_answers_are_right():
    """What the demo calls the answer is the answer."""
    signs = {"plus": "+", "minus": "-", "times": "*", "+": "+"}
    for job in plan(40, {"calc"}, "d") + plan(40, {"math"}, "d"):
        words = (job.instance.get("question") or job.instance["problem"]).removesuffix("?").split()
        assert eval(f"{words[2]} {signs[words[3]]} {words[4]}") == int(job.instance["answer"])


def test_without_a_handler_the_cure_is_told():
    """A demo with nothing to run says what to install."""
    with pytest.raises(UsageError, match="pip install"):
        plan(3, set(), "d")


@pytest.mark.parametrize(
    ("kinds", "good"),
    [
        (["ok"], True),
        (["ok", "policy_limit", "timeout"], True),
        (["policy_limit"], True),
        (["timeout", "cancelled"], False),
        (["ok", "env_error"], False),
        (["ok", "grader_error"], False),
        ([], False),
    ],
)
def test_when_a_demo_was_good(make, kinds, good):
    """At least one was graded, nothing wrong with the infrastructure."""
    graded = {"ok": 1.0, "policy_limit": 0.0}
    records = [make.record(outcome=Outcome(kind=OutcomeKind(kind)), reward=graded.get(kind)) for kind in kinds]
    assert is_good(records) is good


def test_tool_calls_are_counted_from_the_events():
    """A task with an action language of its own has no tool calls in its messages; the job's events name them all."""
    names = ["job.queued", "job.tool", "job.turn", "job.tool", "job.done"]
    assert count_tool_calls(JobEvent(seq=i, event=name, at="") for i, name in enumerate(names)) == 2


def test_the_report_shows_table_sums_and_one_conversation(make, tmp_path):
    """The best rollout is the one that is shown, with the command to look closer."""
    file = tmp_path / "job-1.json"
    file.write_bytes(msgspec.json.encode(make.trajectory()))
    best = Row(record=make.record(), tool_calls=2, file=str(file))
    worse = Row(record=make.record(job_id="job-2", reward=0.0), tool_calls=9, file=str(file))
    assert pick([worse, best]) is best
    report = Report(rows=[worse, best], wall_s=4.0, good=True, kept_in="/a state")
    text = "\n".join(report_lines(report, View(Style(on=False), 80)))
    assert "prorld export --state-dir '/a state' -o demo.jsonl" in text
    assert "2 rollouts in 4.0 s: 2 ok; 2 graded, mean reward 0.50; 8 tokens sampled (2/s); 11 tool calls" in text
    assert f"prorld show {file} --tokens" in text
    assert "ANSWER: 4" in text


def test_a_report_without_any_turn_has_no_conversation(make):
    """When nothing was said there is nothing to show, and the table is still there."""
    failed = make.record(turns=0, reward=None, outcome=Outcome(kind=OutcomeKind.ENV_ERROR))
    report = Report(rows=[Row(record=failed, tool_calls=0, file="")], wall_s=1.0, good=False)
    text = "\n".join(report_lines(report, View(Style(on=False), 80)))
    assert "env_error" in text
    assert "one of them" not in text
    assert "0 graded; " in text


def test_progress_counts_every_job(make):
    """Ended jobs are counted whether they ended now or before."""
    records = [make.record(), make.record(state=JobState.RUNNING), make.record(state=JobState.QUEUED, turns=0)]
    assert progress(records, 5) == "3 of 5 done, 1 queued, 1 running, 4 turns"
