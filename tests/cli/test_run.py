"""``prorld run``: resumable, patient, exact: every sample has one line, whatever happens in between."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorld.cli import run_drive, run_tasks
from prorld.cli.exits import Exit, UsageError
from prorld.cli.run_drive import INTERRUPTED, Driver
from prorld.cli.run_out import open_out
from prorld.cli.run_plan import key_of, plan, run_of
from prorld.cli.run_stats import Progress, Stats
from prorld.client import ClientError
from prorld.domain.job import JobState
from prorld.domain.outcome import Outcome, OutcomeKind, Verdict
from prorld.wire.jobs import SubmitJob
from tests.cli.fake_daemon import FakeDaemon


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No pauses: the fake's time is its calls."""
    monkeypatch.setattr(run_drive, "SWEEP_S", 0.0)
    monkeypatch.setattr(run_drive, "_BACKOFF_S", (0.0,))


@pytest.fixture
def tasks(tmp_path):
    """Ten tasks in a file."""
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps({"x": i}) + "\n" for i in range(10)))
    return path


@pytest.fixture
def run(cli, tmp_path, tasks, monkeypatch):
    """The command on a fake daemon; gives (exit code, lines of OUT, stderr)."""
    out = tmp_path / "out.jsonl"

    def call(daemon: FakeDaemon, *flags: str) -> tuple[int, list[Any], str]:
        monkeypatch.setattr(run_tasks, "client_of", lambda args: daemon.connect())
        code, _, err = cli("run", str(tasks), "--handler", "fake", "-o", str(out), *flags)
        written = out.read_text().splitlines() if out.exists() else []
        return code, [json.loads(line) for line in written], err

    return call


def exact(lines, *, tasks=10, n=1):
    """Every sample of every task exactly once."""
    found = Counter((line["instance"]["x"], line["record"]["sample_index"]) for line in lines)
    return found == Counter((x, i) for x in range(tasks) for i in range(n))


def test_every_sample_has_its_line(run):
    """Groups of n, each with its own index and one group id."""
    daemon = FakeDaemon()
    code, lines, err = run(daemon, "--n", "3")
    assert (code, exact(lines, n=3)) == (0, True)
    assert len({line["record"]["group_id"] for line in lines}) == 10
    assert [line["line"] for line in lines if line["instance"]["x"] == 4] == [5, 5, 5]
    assert "30/30" in err
    assert "30 ok" in err


def test_the_bound_on_jobs_in_flight_holds(run):
    """No more than --max-inflight are in the daemon."""
    daemon = FakeDaemon(looks=8)
    code, lines, _ = run(daemon, "--max-inflight", "3")
    assert (code, exact(lines)) == (0, True)
    assert daemon.most_inflight == 3


def test_a_full_daemon_is_waited_for(run):
    """503 with Retry-After refuses nothing."""
    daemon = FakeDaemon(inflight_max=2)
    assert run(daemon)[0] == 0
    assert daemon.most_inflight == 2


def test_the_same_command_again_does_nothing(run):
    """What is in the file is kept byte by byte, and no job is handed in."""
    first = run(FakeDaemon(), "--n", "2")
    again = FakeDaemon()
    second = run(again, "--n", "2")
    assert (second[0], second[1]) == (0, first[1])
    assert again.submitted == []
    assert "20 of 20 rollouts are in" in second[2]


def test_more_samples_later(run):
    """A larger n adds the samples that are missing, to the same groups."""
    run(FakeDaemon(), "--n", "2")
    daemon = FakeDaemon()
    code, lines, _ = run(daemon, "--n", "3")
    assert (code, exact(lines, n=3), len(daemon.submitted)) == (0, True, 10)
    assert len({line["record"]["group_id"] for line in lines}) == 10


@pytest.mark.parametrize("flags", [("--temperature", "0.5"), ("--policy", "other")])
def test_other_settings_are_not_mixed_in(run, flags):
    """A file is of one run; the cure is told."""
    run(FakeDaemon())
    code, lines, err = run(FakeDaemon(), *flags)
    assert (code, len(lines)) == (Exit.USAGE, 10)
    assert "other settings" in err


def test_half_a_last_line_is_cut_off_and_done_again(run, tmp_path):
    """A kill in the middle of a write costs that rollout only."""
    run(FakeDaemon())
    out = tmp_path / "out.jsonl"
    out.write_bytes(out.read_bytes()[:-40])
    daemon = FakeDaemon()
    code, lines, err = run(daemon)
    assert (code, exact(lines), len(daemon.submitted)) == (0, True, 1)
    assert "half a line" in err


def test_a_last_line_that_only_lacks_its_newline_is_kept(run, tmp_path):
    """It is whole."""
    run(FakeDaemon())
    out = tmp_path / "out.jsonl"
    whole = out.read_bytes()
    out.write_bytes(whole[:-1])
    daemon = FakeDaemon()
    assert run(daemon)[0] == 0
    assert (out.read_bytes(), daemon.submitted) == (whole, [])


@settings(max_examples=60)
@given(cut=st.integers(min_value=0, max_value=3000))
def test_a_file_cut_anywhere_resumes(cut, tmp_path_factory):
    """Whatever a crash leaves of the file, the next run makes it whole and keeps every whole line."""
    place = tmp_path_factory.mktemp("cut")
    samples = plan([(i + 1, {"x": i}) for i in range(5)], SubmitJob(instance={}, handler="fake"), n=1, run="r0000000a")
    out = place / "out.jsonl"
    drive(FakeDaemon(), samples, out)
    whole = out.read_bytes().splitlines()
    out.write_bytes(out.read_bytes()[:cut])
    with open_out(str(out)) as file:
        done = {key_of(ended.job_id) for ended in file.ended}
    drive(FakeDaemon(), [sample for sample in samples if sample.key not in done], out)
    lines = out.read_bytes().splitlines()
    assert sorted(json.loads(line)["instance"]["x"] for line in lines) == [0, 1, 2, 3, 4]
    assert lines[: len(done)] == whole[: len(done)]


def drive(daemon: FakeDaemon, samples, out: Path, **options: Any) -> Stats:
    """A driver on a fake daemon."""
    stats = Stats(len(samples))
    with open_out(str(out)) as file:
        Driver(
            cast("Any", daemon.connect), samples, file, stats, Progress(io.StringIO(), quiet=False),
            inflight_max=4, patience_s=options.pop("patience_s", 5.0), **options,
        ).run()  # fmt: skip
    return stats


@pytest.mark.parametrize("at", [1, 2, 3, 5, 8, 13, 21])
def test_a_restart_of_the_daemon_loses_nothing(run, at):
    """Results are in its memory: what it forgot is handed in again, what was written is not."""
    daemon = FakeDaemon(looks=4)
    daemon.restarts_at = [at, at + 9]
    code, lines, err = run(daemon, "--n", "2", "--max-inflight", "5")
    assert (code, exact(lines, n=2)) == (0, True)
    if at > 1:
        assert "no daemon answers; waiting up to 300 s" in err


def test_a_daemon_that_stays_away_is_told_and_resumed(run):
    """After the patience, exit 69; the file goes on later."""
    daemon = FakeDaemon()

    def tick() -> None:
        daemon.calls += 1
        if daemon.calls > 12:
            raise ClientError("no daemon answers", code="no_daemon", retryable=True)

    daemon.tick = tick  # type: ignore[method-assign]
    code, lines, err = run(daemon, "--max-inflight", "2", "--patience", "0.01")
    assert code == Exit.UNAVAILABLE
    assert 0 < len(lines) < 10
    assert "no daemon answers" in err
    code, lines, _ = run(FakeDaemon())
    assert (code, exact(lines)) == (0, True)


def test_without_a_daemon_nothing_is_waited_for(cli, tasks, tmp_path):
    """The first contact fails at once, with the cure."""
    code, _, err = cli("run", str(tasks), "-o", str(tmp_path / "out.jsonl"))
    assert code == Exit.UNAVAILABLE
    assert "prorld serve" in err


def test_a_job_that_was_forgotten_runs_under_another_id(run):
    """Its id never runs again, so the sample gets a new one and still counts once."""
    daemon = FakeDaemon(looks=2)
    tried: list[str] = []
    submit = daemon.submit

    def forgetful(job: SubmitJob) -> Any:
        record = submit(job)
        if job.instance["x"] == 3 and not tried:
            tried.append(str(job.job_id))
            daemon.forgets.add(str(job.job_id))
        return record

    daemon.submit = forgetful  # type: ignore[method-assign]
    code, lines, _ = run(daemon)
    assert (code, exact(lines)) == (0, True)
    (line,) = [line for line in lines if line["instance"]["x"] == 3]
    assert line["record"]["job_id"] == f"{tried[0]}.1"


def test_a_cancel_of_an_earlier_run_that_is_still_under_way_is_no_result(run):
    """Handed in again while it ends, the job ends as cancelled by that run: it runs again under another id."""
    daemon = FakeDaemon(looks=2)
    tried: list[str] = []
    record = daemon.record

    def late(job_id: str) -> Any:
        found = record(job_id)
        if found.state is JobState.DONE and not tried:
            tried.append(job_id)
        if job_id in tried and found.outcome is not None:
            gone = Outcome(kind=OutcomeKind.CANCELLED, code="cancelled", message=INTERRUPTED)
            return msgspec.structs.replace(found, outcome=gone, verdict=Verdict.DROP, reward=None)
        return found

    daemon.record = late  # type: ignore[method-assign]
    code, lines, _ = run(daemon)
    assert (code, exact(lines)) == (0, True)
    assert f"{tried[0]}.1" in {line["record"]["job_id"] for line in lines}


def test_a_refused_task_is_told_with_its_line(run):
    """The others are done; the exit code says that the tasks are wrong."""
    daemon = FakeDaemon()
    daemon.refuses["6"] = ClientError("instance.x: too large", code="bad_instance", status=400)
    code, lines, err = run(daemon, "--quiet")
    assert (code, len(lines)) == (Exit.USAGE, 9)
    assert err == "line 7 is refused: instance.x: too large\n"


@pytest.mark.parametrize(
    ("kind", "code"),
    [(OutcomeKind.POLICY_LIMIT, 0), (OutcomeKind.TIMEOUT, 0), (OutcomeKind.ENV_ERROR, 1), (OutcomeKind.LLM_ERROR, 1)],
)
def test_the_exit_code_tells_infrastructure_from_policy(run, kind, code):
    """What a policy does is a result; an engine that died is not. A resumed run says the same."""
    daemon = FakeDaemon()
    daemon.outcomes["2"] = Outcome(kind=kind, code="x")
    assert run(daemon)[0] == code
    assert run(FakeDaemon())[0] == code


@pytest.mark.parametrize("leave", [False, True])
def test_ctrl_c_leaves_a_file_that_goes_on(run, leave):
    """Running jobs are cancelled, or left; either way the next run ends with every sample."""
    daemon = FakeDaemon(looks=30)
    tick = daemon.tick

    def interrupted() -> None:
        tick()
        if daemon.calls == 14:
            raise KeyboardInterrupt

    daemon.tick = interrupted  # type: ignore[method-assign]
    flags = ("--leave",) if leave else ()
    code, lines, err = run(daemon, "--max-inflight", "4", *flags)
    assert code == Exit.INTERRUPTED
    assert len(lines) < 10
    assert bool(daemon.cancelled) is not leave
    assert (" on; the same command" in err) is leave
    assert len(daemon.cancelled) == (0 if leave else 4)
    code, lines, _ = run(daemon, "--max-inflight", "4")
    assert (code, exact(lines)) == (0, True)


@pytest.mark.parametrize(
    ("line", "words"),
    [("{", "line 3"), ("[1]", "line 3"), ('{"a": 1', "line 3"), ('"x"', "line 3"), ("{}{}", "line 3")],
)
def test_a_bad_line_is_named_before_anything_is_sent(run, tasks, line, words):
    """Blank lines don't shift the number."""
    tasks.write_text('{"x": 1}\n\n' + line + "\n")
    daemon = FakeDaemon()
    code, _, err = run(daemon)
    assert (code, daemon.submitted) == (Exit.USAGE, [])
    assert words in err


def test_two_runs_do_not_share_a_file(tmp_path):
    """The second is refused."""
    name = str(tmp_path / "out.jsonl")
    with open_out(name), pytest.raises(UsageError, match="another command"), open_out(name):
        pass


def test_a_file_of_something_else_is_left_alone(run, tmp_path):
    """A line that is no rollout, or a rollout of no run, ends it before anything is written."""
    out = tmp_path / "out.jsonl"
    for text in ('{"a": 1}\n', '{"record": {"job_id": "job-1", "outcome": {"kind": "ok", "code": "ok"}}}\n'):
        out.write_text(text)
        code, _, err = run(FakeDaemon())
        assert (code, out.read_text()) == (Exit.USAGE, text)
        assert "name another file" in err


def test_the_same_instance_twice_is_two_tasks():
    """Told apart by a count, so that a resumed run finds both."""
    samples = plan([(1, {"x": 1}), (2, {"x": 1})], SubmitJob(instance={}), n=2, run="r0000000a")
    assert len({sample.job_id for sample in samples}) == 4
    assert len({sample.job.group_id for sample in samples}) == 2
    assert {run_of(sample.job_id) for sample in samples} == {"r0000000a"}
    assert [key_of(sample.another().another().job_id) for sample in samples] == [sample.key for sample in samples]


def test_quiet_is_silent(run):
    """Nothing on stderr."""
    assert run(FakeDaemon(), "--quiet")[2] == ""


def test_a_terminal_gets_a_bar():
    """Redrawn in place, with rates and outcomes."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream, stats = Terminal(), Stats(4)
    stats.count(Outcome(kind=OutcomeKind.OK, code="ok"), 0.5)
    Progress(stream, quiet=False).show(stats)
    assert stream.getvalue().startswith("\r\x1b[K[██████··")
    assert "1/4" in stream.getvalue()
    assert "mean reward 0.5" in stream.getvalue()


def test_it_needs_no_event_loop():
    """A script that starts many of these pays for no server."""
    script = (
        "import sys\nfrom prorld.cli.main import main\n"
        "code = main(['run', '/dev/null', '-o', '/dev/null/x'])\n"
        "print(int(code), sorted({'trio', 'quart', 'structlog'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "2 []", done.stderr


def test_a_full_disk_is_told_and_what_was_written_is_kept(tmp_path, make):
    """The line that did not fit is cut off by the next run; those before it stay."""
    name = str(tmp_path / "out.jsonl")
    record = msgspec.json.encode(make.record(job_id="r0000000a.0123456789abcdef.0")).decode()
    script = (
        "import msgspec, resource\nfrom prorld.cli.exits import UsageError\n"
        "from prorld.cli.run_out import OutLine, open_out\nfrom prorld.wire.jobs import JobRecord\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))\n"
        f"line = OutLine(line=1, instance={{}}, record=msgspec.json.decode({record!r}, type=JobRecord))\n"
        f"try:\n with open_out({name!r}) as out:\n  for n in range(9): out.append(line)\n"
        "except UsageError as exc: print(exc)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "can't be written" in done.stdout
    size = Path(name).stat().st_size
    with open_out(name) as out:
        assert out.repaired
        assert 0 < len(out.ended) < 9
    assert 0 < Path(name).stat().st_size < size
