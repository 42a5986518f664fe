"""What ``prorld submit`` makes of files and flags, before anything is sent."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from prorld.cli.submit import overlaid, parse_jobs, samples
from prorld.wire.jobs import SubmitJob

JOB: dict[str, Any] = {"handler": "calc", "instance": {"q": 1}}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (json.dumps(JOB), 1),
        (json.dumps(JOB, indent=2), 1),
        (json.dumps([JOB, JOB]), 2),
        (f"{json.dumps(JOB)}\n\n{json.dumps(JOB)}\n", 2),
    ],
)
def test_files_hold_one_job_a_list_or_lines(text, count):
    """All three forms are understood."""
    assert parse_jobs(text, "f") == [JOB] * count


def test_flags_go_over_what_the_file_says():
    """Handler, policy and the few knobs of sampling; the rest of the job stays."""
    flags = {"handler": "h", "policy": None, "max_tokens": 5, "temperature": 0.0, "seed": None, "max_turns": 2}
    args = argparse.Namespace(**flags)
    job = overlaid({**JOB, "priority": 1, "sampling": {"seed": 7, "max_tokens": 9}}, args)
    assert job == {
        "handler": "h",
        "instance": {"q": 1},
        "priority": 1,
        "sampling": {"seed": 7, "max_tokens": 5, "temperature": 0.0},
        "agent": {"max_turns": 2},
    }
    assert overlaid([1], args) == [1]
    assert overlaid({"sampling": 3}, args)["sampling"] == 3


def test_samples_form_a_group():
    """Samples share a group, differ in their index, and keep the client's id unique."""
    jobs = samples(SubmitJob(job_id="a", **JOB), 3)
    assert [job.sample_index for job in jobs] == [0, 1, 2]
    assert [job.job_id for job in jobs] == ["a.0", "a.1", "a.2"]
    assert len({job.group_id for job in jobs}) == 1
    assert jobs[0].group_id is not None


def test_one_sample_is_the_job_itself():
    """Nothing is added to a single job."""
    job = SubmitJob(**JOB)
    assert samples(job, 1) == [job]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "FILE"),
        (("f.json", "--instance", "{}"), "FILE"),
        (("--handler", "calc", "--instance", "{"), "--instance is not JSON"),
        (("--handler", "calc", "--instance", "[]"), "$.instance"),
        (("/nowhere.json",), "/nowhere.json can't be read"),
    ],
)
def test_wrong_input_is_usage(cli, argv, words):
    """Exit 2, and the words say which input."""
    code, _, err = cli("submit", *argv)
    assert code == 2
    assert words in err


@pytest.mark.parametrize("text", ["", "\n\n", "[]"])
def test_a_file_without_jobs_is_refused(cli, tmp_path, text):
    """Nothing to do is a mistake, and told with the file's name."""
    file = tmp_path / "jobs.jsonl"
    file.write_text(text)
    code, out, err = cli("submit", str(file))
    assert (code, out, err) == (2, "", f"prorld: {file}: no jobs in it\n")


def test_a_wrong_field_is_named_before_anything_is_sent(cli, tmp_path):
    """The second job's bad field is found without a daemon."""
    file = tmp_path / "jobs.jsonl"
    file.write_text(json.dumps(JOB) + "\n" + json.dumps({**JOB, "max_attempts": 0}) + "\n")
    code, _, err = cli("submit", str(file))
    assert code == 2
    assert f"{file}: job 2" in err
    assert "max_attempts" in err
    file.write_text(json.dumps(JOB) + "\n{broken\n")
    assert "line 2" in cli("submit", str(file))[2]
