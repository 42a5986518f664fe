"""``prorld show`` on a document made by hand."""

from __future__ import annotations

import json

import msgspec
import pytest

from prorld.cli.conversation import View, bar_cells, summary_lines, timing_lines, token_lines, trajectory_lines
from prorld.cli.output import Style
from prorld.domain.branch import Branch
from prorld.domain.job import JobState
from prorld.domain.messages import user
from prorld.domain.outcome import Outcome, OutcomeKind
from prorld.wire.trajectory import branch_doc


@pytest.fixture
def file(make, tmp_path):
    """The document in a file."""
    path = tmp_path / "job-1.json"
    path.write_bytes(msgspec.json.encode(make.trajectory()))
    return path


def test_the_conversation_is_readable(cli, file):
    """Who spoke, what was called, what each turn cost, how it was graded."""
    code, out, err = cli("show", str(file))
    assert (code, err) == (0, "")
    for part in (
        "job-1  calc  ok",
        "reward     1 (exact 1), verdict use, stopped: finished",
        "7 prompt, 4 sampled, 3 observed, in 2 turns",
        "version 3, 4, engine b-1",
        "── system · 3 tokens",
        "turn 1 · 2 tokens sampled · mean logprob -1.00 · version 3 · stop · 500 ms",
        '→ calc(expression="2+2")',
        "→ ? [invalid_json] CALC {{{",
        "── tool · 3 tokens",
        "turn 2 · 2 tokens sampled · mean logprob -0.25 · version 3, 4 · stop · 1.0 s",
        "ANSWER: 4",
        "It is easy.",
    ):
        assert part in out
    assert out.index("system ·") < out.index("user ·") < out.index("Let me see.") < out.index("tool ·")


def test_what_a_sandbox_wrote_can_not_steer_the_terminal(cli, file):
    """Escapes in messages are shown, not obeyed."""
    _, out, _ = cli("show", str(file))
    assert "\x1b" not in out
    assert "\\x1b[2J\\u202eevil" in out


def test_tokens_are_listed_one_by_one(cli, file):
    """With --tokens every token has a line: index, id, mask, log-probability, version, source."""
    _, out, _ = cli("show", str(file), "--tokens")
    rows = [line.split() for line in out.splitlines()[2:]]
    assert len(rows) == 14
    assert rows[0] == ["0", "1", "0", "-", "-", "glue"]
    assert rows[7] == ["7", "10", "1", "-0.50000", "3", "sampled"]
    assert rows[13] == ["13", "31", "1", "-0.25000", "4", "sampled"]


def test_json_gives_the_document_back(cli, file):
    """--json is the document itself."""
    _, out, _ = cli("show", str(file), "--json")
    assert json.loads(out) == json.loads(file.read_bytes())


def test_messages_are_shortened_on_request(cli, file):
    """--lines bounds each message and says what is left out."""
    _, out, _ = cli("show", str(file), "--lines", "1")
    assert "line three" not in out
    assert "… 2 more lines" in out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda doc: doc.update(format="prorld.trajectory/9"), "prorld.trajectory/9"),
        (lambda doc: doc["branches"][0]["mask"].pop(), "damaged"),
        (lambda doc: doc["branches"][0]["segments"][0].update(end=99), "damaged"),
        (lambda doc: doc["job"].pop("state"), "state"),
    ],
)
def test_a_document_that_is_not_right_is_refused(cli, file, change, words):
    """Another format, lists that don't fit, missing fields: exit 2 and the reason."""
    doc = json.loads(file.read_bytes())
    change(doc)
    file.write_text(json.dumps(doc))
    code, out, err = cli("show", str(file))
    assert (code, out) == (2, "")
    assert words in err


def test_a_file_that_is_missing_is_not_taken_for_a_job(cli):
    """A path is told apart from an id."""
    code, _, err = cli("show", "./nowhere.json")
    assert code == 2
    assert "nowhere.json" in err


def test_a_fork_shows_only_what_is_new(make):
    """What a branch shares with its parent is shown once, with the parent."""
    doc = make.trajectory()
    child = Branch(1, parent=0, fork_at=7, reason="compaction")
    child.append_given([1, 2, 3, 4, 5, 6, 7], "prompt", user("shared words"))
    child.append_given([8], "prompt", user("new words"))
    doc = msgspec.structs.replace(doc, branches=[*doc.branches, branch_doc(child)])
    text = "\n".join(trajectory_lines(doc, View(Style(on=False), 80)))
    assert "branch 1, forked from 0 at token 7 (compaction)" in text
    assert "new words" in text
    assert "shared words" not in text


def test_a_failed_job_says_why(make):
    """Outcome, stage, code and message are there; no reward is no zero."""
    outcome = Outcome(kind=OutcomeKind.ENV_ERROR, stage="init", code="sandbox_failed", message="no\x1b namespaces")
    record = make.record(outcome=outcome, reward=None, reward_parts={}, stop_reason=None)
    text = "\n".join(summary_lines(record, View(Style(on=False), 80)))
    assert "env_error in init (sandbox_failed)" in text
    assert "no\\x1b namespaces" in text
    assert "reward     -," in text
    assert "metrics    files 3, suspicious.network 2\n" in text
    assert "metrics" not in "\n".join(summary_lines(make.record(metrics={}), View(Style(on=False), 80)))


def test_a_running_job_shows_its_state(make):
    """Before the end there is no outcome to show."""
    record = make.record(state=JobState.RUNNING, outcome=None, verdict=None, reward=None)
    text = "\n".join(summary_lines(record, View(Style(on=False), 80)))
    assert "job-1  calc  running" in text
    assert "verdict" not in text


def test_bars_show_what_took_time():
    """About nothing is no cell, a half is rounded up, and the whole is the whole bar."""
    assert [bar_cells(part, 100) for part in (0, 0.001, 3, 100)] == [0, 0, 1, 30]
    assert bar_cells(1, 0) == 0


def test_times_of_one_rollout_have_one_unit(make):
    """Bars, times and the mark of queues can be compared without sums in the head."""
    text = "\n".join(timing_lines(make.record().timing, Style(on=False)))
    assert "░ in a queue" in text
    assert "2.0 s, queued 1.0 s (model 1.5 s, tools 0.0 s)" in text
    assert " ms" not in text


def test_what_a_file_says_can_not_steer_the_terminal(make):
    """Ids, engines, groups and reasons of a document are untrusted, too."""
    bad = "\x1b[2J"
    doc = make.trajectory()
    branch = doc.branches[0]
    segments = [msgspec.structs.replace(segment, finish_reason=bad) for segment in branch.segments]
    branch = msgspec.structs.replace(branch, segments=segments, parent=0, fork_at=0, reason=bad)
    job = msgspec.structs.replace(doc.job, job_id=bad, backends=[bad], group_id=bad)
    doc = msgspec.structs.replace(doc, job=job, branches=[branch, branch])
    text = "\n".join([*trajectory_lines(doc, View(Style(on=False), 80)), *token_lines(doc)])
    assert "\x1b" not in text
    assert text.count("\\x1b[2J") >= 6
