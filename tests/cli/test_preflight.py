"""``prorld preflight``: verdicts, files that are gone on with, what is refused, and how it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ptyprocess import PtyProcessUnicode

from prorld.cli.preflight_judge import Tried, Verdict, report_of
from prorld.domain.job import JobState, Timing
from prorld.domain.outcome import Outcome, OutcomeKind
from prorld.handlers import Play
from prorld.wire.jobs import JobRecord
from tests.daemon.support import alive, environ, processes, until

PYPROJECT = """
[project]
name = "prorld-fly"
version = "0.1.0"
[project.entry-points."prorld.handlers"]
fly = "prorld_fly.handler:FlyHandler"
"""

# Does in EVAL what its instance says.
HANDLER = """
from collections import Counter

import msgspec
from prorld.domain.messages import user
from prorld.handlers import AgentHandler, Grade, Play, SandboxError, SandboxSpec


class Fly(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    word: str
    how: str = "good"


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    full: float = 1.0


class FlyHandler(AgentHandler[Fly]):
    name = "fly"
    instance_type = Fly
    config_type = Config

    def __init__(self, config=None):
        super().__init__(config)
        self.seen = Counter()

    def sandbox_spec(self, instance):
        return SandboxSpec() if instance.how == "sandbox" else None

    def prompt(self, instance):
        return [user(f"Say {instance.word}.")]

    def plays(self, instance):
        if instance.how == "raises":
            raise ValueError("no plays today")
        gold = [] if instance.how == "goldless" else [Play(name="gold", turns=(instance.word,), reward=1.0)]
        return [
            *super().plays(instance),
            *gold,
            Play(name="wrong", turns=("x" + instance.word,)),
            Play(name="cheat:shout", turns=(instance.word.upper(),)),
        ]

    async def evaluate(self, job, result):
        word, how = job.instance.word, job.instance.how
        self.seen[word, result.answer] += 1
        if how == "env" or (how == "once" and self.seen[word, result.answer] == 1):
            raise SandboxError("no room")
        if how == "judge":
            await job.ask("judge", [user("Is it right?")])
        if how == "grader":
            raise ValueError("can't read it")
        job.progress("graded", said=result.answer)
        job.measure("length", len(result.answer or ""))
        full = self.config.full
        if how == "bad":
            return Grade(reward=0.0)
        if how == "generous":
            return Grade(reward=full)
        if how == "flaky" and result.answer == word:
            return Grade(reward=float(self.seen[word, word] % 2))
        if how == "leaky" and (result.answer or "").lower() == word:
            return Grade(reward=full)
        return Grade(reward=full * (result.answer == word))
"""


@pytest.fixture(scope="session")
def project(tmp_path_factory):
    """A project that need not be installed."""
    place = tmp_path_factory.mktemp("fly")
    (place / "prorld_fly").mkdir()
    (place / "pyproject.toml").write_text(PYPROJECT)
    (place / "prorld_fly/__init__.py").touch()
    (place / "prorld_fly/handler.py").write_text(HANDLER)
    return place


@pytest.fixture
def fly(cli, project, tmp_path, monkeypatch):
    """Run a preflight over instances of these kinds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def call_fly(*flags: str, how: tuple[str, ...] | None = None):
        if how is not None:
            write(tmp_path / "tasks.jsonl", how)
        return cli("preflight", "tasks.jsonl", "--handler", str(project), "--sandbox", "fake", *flags)

    return call_fly


def write(file: Path, how: tuple[str, ...]) -> None:
    """One instance of each kind; their order is no order of names."""
    file.write_text("".join(f'{{"word":  "w{n}", "how": "{kind}"}}\n' for n, kind in enumerate(how)))


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def verdicts(file: Path) -> dict[int, str]:
    return {line["line"]: line["verdict"] for line in lines(file)}


def test_good_instances_come_out_as_they_were(fly, tmp_path):
    """Byte for byte and in order, with a report beside them, and the next step is told."""
    code, out, err = fly("-o", "good.jsonl", how=("good", "good", "once"))
    assert code == 0, err
    assert (tmp_path / "good.jsonl").read_bytes() == (tmp_path / "tasks.jsonl").read_bytes()
    report = {line["line"]: line for line in lines(tmp_path / "good.report.jsonl")}
    assert {line["verdict"] for line in report.values()} == {"good"}
    gold = report[1]["plays"]["gold"]
    assert (gold["reward"], gold["rewards"], gold["outcomes"]) == (1.0, [1.0] * 3, {"ok": 3})
    assert set(gold["times"]) == {"init", "run", "eval"}
    assert gold["metrics"] == {"length": 2}
    assert report[1]["plays"]["empty"]["rewards"] == [0.0] * 3
    assert "3 instances: 3 good" in out
    assert out.splitlines()[-1].split(maxsplit=1)[1].startswith("prorld run good.jsonl --handler fly")


@pytest.mark.slow
def test_each_kind_gets_its_verdict(fly, tmp_path):
    """What is wrong with the instance makes it bad, what comes and goes flaky; what failed around it neither."""
    kinds = ("good", "bad", "generous", "flaky", "env", "grader", "raises", "goldless", "leaky")
    code, out, _ = fly("--report", "report.jsonl", "-o", "good.jsonl", how=kinds)
    assert code == 1
    found = verdicts(tmp_path / "report.jsonl")
    assert {kind: found[n] for n, kind in enumerate(kinds, 1)} == {
        "good": "good", "bad": "bad", "generous": "bad", "flaky": "flaky", "env": "unsure", "grader": "bad",
        "raises": "unsure", "goldless": "unsure", "leaky": "good",
    }  # fmt: skip
    assert [line["how"] for line in lines(tmp_path / "good.jsonl")] == ["good", "leaky"]
    by_line = {line["line"]: line for line in lines(tmp_path / "report.jsonl")}
    assert by_line[2]["why"] == "gold: reward 0, and not 1, in 3 of 3 [graded (said=w1)]"
    assert by_line[3]["why"].startswith("empty: reward 1, and not 0, in 3 of 3")
    assert 0 < by_line[4]["plays"]["gold"]["flake_rate"] < 0.5
    assert by_line[5]["plays"]["gold"]["outcomes"] == {"env_error": 3}
    assert "can't read it" in by_line[6]["why"]
    assert "no plays today" in by_line[7]["why"]
    assert "line 2 is bad: gold: reward 0" in out
    assert "9 instances: 2 good, 3 unsure, 1 flaky, 3 bad" in out


def test_what_needs_a_judge_is_unsure(fly, tmp_path):
    """There is none without an engine; that says nothing about the instance, and the report says what does."""
    assert fly("-o", "good.jsonl", "--times", "1", how=("judge",))[0] == 1
    (line,) = lines(tmp_path / "good.report.jsonl")
    assert line["verdict"] == "unsure"
    assert "no policy 'judge' that could judge; a preflight has no engine and so no judge" in line["why"]
    assert "`prorld run`" in line["why"]


def test_all_plays_have_to_come_to_their_reward(fly):
    """A cheat that works makes an instance bad, in the words of its play."""
    code, out, _ = fly("--plays", "all", "--times", "1", how=("good", "leaky"))
    assert code == 1
    assert "line 2 is bad: cheat:shout: reward 1, and not 0" in out
    assert fly("--plays", "gold,cheat:shout", "--times", "1", how=("good",))[0] == 0


def test_the_same_command_goes_on(fly, tmp_path):
    """What is in the report is not played again, half a last line is cut off, what was unsure is tried again."""
    kinds = ("good", "bad", "goldless", "good")
    flags = ("-o", "good.jsonl", "--times", "1")
    assert fly(*flags, how=kinds)[0] == 1
    report = tmp_path / "good.report.jsonl"
    whole = report.read_text().splitlines(keepends=True)
    assert len(whole) == 4
    kept = [line for line in whole if json.loads(line)["line"] != 4]
    report.write_text("".join(kept) + '{"line": 4, "dig')
    code, out, err = fly(*flags, "--json")
    summary = json.loads(out)
    assert (code, summary["kept"], summary["instances"], summary["left"]) == (1, 2, 4, 0)
    assert "2 of 4 instances are in good.report.jsonl already" in err
    assert verdicts(report) == {1: "good", 2: "bad", 3: "unsure", 4: "good"}
    assert len(report.read_text().splitlines()) == 4
    assert [line["word"] for line in lines(tmp_path / "good.jsonl")] == ["w0", "w3"]


def test_more_tasks_are_added_and_others_refused(fly, tmp_path):
    """By the digest of instance and settings."""
    assert fly("-o", "good.jsonl", "--times", "1", how=("good",))[0] == 0
    assert fly("-o", "good.jsonl", "--times", "1", how=("good", "good"))[0] == 0
    assert len(lines(tmp_path / "good.jsonl")) == 2
    for flags in (("--times", "2"), ("--times", "1", "--plays", "empty"), ("--times", "1", "--load", "1")):
        code, _, err = fly("-o", "good.jsonl", *flags)
        assert code == 2
        assert "of other tasks, another state of the handler or other settings" in err
    assert fly("-o", "good.jsonl", "--times", "2", "--anew")[0] == 0
    assert [line["rollouts"] for line in lines(tmp_path / "good.report.jsonl")] == [4, 4]


def test_a_handler_that_was_mended_is_played_again(project, cli, tmp_path, monkeypatch):
    """Its version stays while it is written; its code is looked at."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    own = tmp_path / "own"
    shutil.copytree(project, own)
    write(tmp_path / "tasks.jsonl", ("good",))
    argv: tuple[str, ...] = (
        "preflight",
        str(tmp_path / "tasks.jsonl"),
        "--handler",
        str(own),
        "--sandbox",
        "fake",
        "--times",
        "1",
    )
    argv = (*argv, "-o", str(tmp_path / "good.jsonl"))
    monkeypatch.delitem(sys.modules, "prorld_fly", raising=False)
    monkeypatch.delitem(sys.modules, "prorld_fly.handler", raising=False)
    monkeypatch.syspath_prepend(str(own))
    assert cli(*argv)[0] == 0
    assert "1 of 1 instances are in" in cli(*argv)[2]
    with (own / "prorld_fly/handler.py").open("a") as file:
        file.write("# mended\n")
    code, _, err = cli(*argv)
    assert (code, "another state of the handler" in err) == (2, True)
    assert cli(*argv, "--anew")[0] == 0
    for name in ("prorld_fly", "prorld_fly.handler"):
        sys.modules.pop(name, None)


def test_instances_that_are_the_same_are_each_judged(fly, tmp_path):
    """Twice the same line is two instances."""
    (tmp_path / "tasks.jsonl").write_text('{"word": "a"}\n\n{"word": "a"}\n')
    assert fly("-o", "good.jsonl", "--times", "1")[0] == 0
    assert verdicts(tmp_path / "good.report.jsonl") == {1: "good", 3: "good"}
    assert (tmp_path / "good.jsonl").read_text() == '{"word": "a"}\n' * 2


def test_refused_instances_are_told_and_the_others_played(fly, tmp_path):
    """Exit 2, whatever the others came to."""
    (tmp_path / "tasks.jsonl").write_text('{"word": 1}\n{"word": "a"}\n')
    code, out, err = fly("-o", "good.jsonl", "--times", "1", "--json")
    assert code == 2
    assert "line 1 is refused: " in err
    assert (json.loads(out)["refused"], json.loads(out)["good"]) == (1, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no instance"),
        ("[]", "no instance"),
        ('{"word": "a"}\nx\n', "line 2"),
        ("[1]", "tasks.jsonl"),
        ('{"word": "a"', "line 1"),
    ],
)
def test_a_file_that_can_not_be_read_is_one_line(fly, tmp_path, text, words):
    """With where it is wrong; nothing is written."""
    (tmp_path / "tasks.jsonl").write_text(text)
    code, out, err = fly("-o", "good.jsonl")
    assert (code, out) == (2, "")
    assert words in err
    assert not (tmp_path / "good.jsonl").exists()


def test_an_array_is_a_file_of_instances(fly, tmp_path):
    """Each is written on a line of its own."""
    (tmp_path / "tasks.jsonl").write_text('[{"word": "a"},\n {"word": "b"}]')
    assert fly("-o", "good.jsonl", "--times", "1", "--limit", "1", "--shuffle-seed", "1")[0] == 0
    assert lines(tmp_path / "good.jsonl") == [{"word": "b"}]


def test_a_handler_without_gold_is_told_how_to_write_one(fly):
    """Nothing can be proven without; what needs no gold can."""
    code, out, err = fly(how=("goldless", "goldless"))
    assert (code, out) == (2, "")
    for words in ("fly has no gold play", "FlyHandler", "def plays(self, instance)", "reward=1.0"):
        assert words in err
    assert fly("--plays", "empty", "--times", "1")[0] == 0


def test_a_play_that_no_instance_has_is_told(fly):
    """With those that there are."""
    code, _, err = fly("--plays", "gold,silver", how=("good",))
    assert code == 2
    assert "no play silver" in err
    assert "cheat:shout, empty, gold, malformed, wrong" in err


def test_nothing_of_the_users_is_written_over(fly, tmp_path):
    """Neither the tasks nor a file that this command has not made."""
    (tmp_path / "mine.jsonl").write_text("mine\n")
    for flags in (("-o", "tasks.jsonl"), ("-o", "mine.jsonl"), ("-o", "a.jsonl", "--report", "a.jsonl")):
        assert fly(*flags, "--times", "1", how=("good",))[0] == 2, flags
    assert (tmp_path / "mine.jsonl").read_text() == "mine\n"
    code, _, err = fly("--report", "mine.jsonl", "--times", "1")
    assert code == 2
    assert "mine.jsonl, line 1" in err


def test_the_handler_is_configured_as_in_the_daemon(fly, tmp_path):
    """By the section of its name; what is wrong there is told."""
    config = tmp_path / "prorld.toml"
    config.write_text("[handlers.config.fly]\nfull = 0.5\n")
    code, out, _ = fly("--config", str(config), "--times", "1", how=("good",))
    assert code == 1
    assert "gold: reward 0.5, and not 1" in out
    config.write_text("[handlers.config.fly]\nempty = 0.5\n")
    assert "its configuration has no empty" in fly("--config", str(config))[2]


def fly_away(project: Path, place: Path, *flags: str) -> subprocess.Popen[str]:
    """The command as a process of its own."""
    argv = ["preflight", str(place / "tasks.jsonl"), "--handler", str(project), "-o", str(place / "good.jsonl"), *flags]
    command = [sys.executable, "-m", "prorld.cli", *argv]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environ(place / "state"), stdout=pipe, stderr=pipe, text=True)


def family(pid: int) -> set[tuple[int, str]]:
    """A process and its descendants, by pid and start time."""
    found: dict[int, tuple[int, str]] = {}
    for _ in range(8):
        for child, parent, born in processes():
            if child == pid or parent in found:
                found[child] = (child, born)
    return set(found.values())


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)])
def test_an_interrupted_preflight_leaves_no_process_and_goes_on(project, tmp_path, number, code):
    """In real sandboxes, with CPUs kept busy beside it."""
    write(tmp_path / "tasks.jsonl", ("sandbox",) * 40)
    report = tmp_path / "good.report.jsonl"
    flags = ("--times", "1", "--jobs", "2", "--load", "1")
    first = fly_away(project, tmp_path, *flags)
    until(lambda: report.exists() and report.read_bytes().count(b"\n") >= 2, 60, "some are judged")
    ours = family(first.pid)
    assert len(ours) >= 4
    os.kill(first.pid, number)
    _, err = first.communicate(timeout=30)
    assert first.returncode == code, err
    until(lambda: not alive(ours), 20, "all its processes are gone")
    judged = report.read_bytes().count(b"\n")
    assert 2 <= judged < 40
    if number != signal.SIGKILL:
        assert len(lines(tmp_path / "good.jsonl")) == judged
    second = fly_away(project, tmp_path, *flags, "--json")
    out, err = second.communicate(timeout=120)
    assert second.returncode == 0, err
    summary = json.loads(out)
    assert (summary["good"], summary["kept"], summary["load"]) == (40, judged, 1)
    assert (tmp_path / "good.jsonl").read_bytes() == (tmp_path / "tasks.jsonl").read_bytes()


@pytest.mark.slow
def test_a_terminal_gets_a_bar_and_standard_input_is_read(project, tmp_path):
    """Lines go to standard error, the summary to standard output."""
    write(tmp_path / "tasks.jsonl", ("good",) * 3)
    command = f"{sys.executable} -m prorld.cli preflight - --handler {project} --sandbox fake < {tmp_path}/tasks.jsonl"
    terminal = PtyProcessUnicode.spawn(["sh", "-c", command], env=environ(tmp_path / "state"), dimensions=(24, 200))
    said, until_s = "", time.monotonic() + 60
    while time.monotonic() < until_s:
        try:
            said += terminal.read(4096)
        except EOFError:
            break
    assert "/3 instances" in said
    assert "█" in said or "·" in said
    assert "3 instances: 3 good" in said
    terminal.close(force=True)


# --- the verdict by itself --------------------------------------------------------------------------------------------

GOLD = Play(name="gold", turns=("a",), reward=1.0)
EMPTY = Play(name="empty", turns=("",))


def tried(reward: float | None, kind: OutcomeKind = OutcomeKind.OK, *, retryable: bool = False) -> Tried:
    record = JobRecord(
        job_id="j", handler="h", policy="p", tenant="t", state=JobState.DONE, reward=reward, created_at="",
        outcome=Outcome(kind=kind, code="c", message="m", retryable=retryable),
        timing=Timing(init_s=1.0, run_s=2.0, eval_s=3.0),
    )  # fmt: skip
    return Tried(record=record)


HIT, MISS, VOID = tried(1.0), tried(0.5), tried(None, OutcomeKind.ENV_ERROR)


@pytest.mark.parametrize(
    ("gold", "verdict"),
    [
        ((HIT, HIT), Verdict.GOOD),
        ((tried(1.0 - 1e-12), HIT), Verdict.GOOD),
        ((tried(1.0 - 1e-6), MISS), Verdict.BAD),
        ((MISS, MISS), Verdict.BAD),
        ((HIT, MISS), Verdict.FLAKY),
        ((HIT, VOID), Verdict.UNSURE),
        ((MISS, VOID), Verdict.UNSURE),
        ((VOID, VOID), Verdict.UNSURE),
        ((HIT, MISS, VOID), Verdict.FLAKY),
        ((tried(None, OutcomeKind.TIMEOUT), MISS), Verdict.BAD),
        ((tried(None, OutcomeKind.TIMEOUT, retryable=True), HIT), Verdict.UNSURE),
        ((tried(None, OutcomeKind.GRADER_ERROR), MISS), Verdict.BAD),
        ((tried(None, OutcomeKind.GRADER_ERROR, retryable=True), MISS), Verdict.UNSURE),
        ((tried(None, OutcomeKind.LLM_ERROR), tried(None, OutcomeKind.LOST)), Verdict.UNSURE),
    ],
)
def test_the_verdict_is_of_what_was_seen(gold, verdict):
    """Infrastructure never makes an instance bad, and hides no flake."""
    report = report_of(1, "d", [(GOLD, gold), (EMPTY, [tried(0.0)])])
    assert report.verdict is verdict


def test_the_worst_play_decides():
    """Here the empty one, which scores."""
    report = report_of(1, "d", [(GOLD, [HIT, MISS]), (EMPTY, [HIT, HIT])])
    assert report.verdict is Verdict.BAD
    assert report.why == "empty: reward 1, and not 0, in 2 of 2"
    assert report.plays["gold"].flake_rate == 0.5
    assert report.flake_rate == 0.25
