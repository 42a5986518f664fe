"""``prorld batch``: what is typed becomes the call that it says; files of groups are whole and can be gone on with."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest

from prorld.cli import batch_feed, batch_watch
from prorld.cli.batch_show import record_lines
from prorld.cli.exits import Exit
from prorld.cli.output import Style
from prorld.domain.batch import BatchState
from prorld.domain.outcome import Verdict
from prorld.wire.batches import (
    BatchEvent,
    BatchRecord,
    BeforeFilter,
    Durations,
    GroupCounts,
    PackedBatchGroup,
    PackedBatchGroupPage,
    StalenessSeen,
    Waste,
)
from tests.client.serving import error, serving

MSGPACK = {"Content-Type": "application/msgpack"}
NOW = datetime(2026, 1, 1, 0, 1, tzinfo=UTC)


def make_record(**fields):
    """A batch in the middle of its way."""
    whole = {
        "batch_id": "b", "tenant": "t", "handler": "math", "policy": "default", "purpose": "train",
        "state": BatchState.RUNNING, "samples_per_group": 4, "target_groups": 8, "next_offset": 20, "wants": 24,
        "acknowledged": 3, "last_seq": 11, "carry_from": "a",
        "groups": GroupCounts(waiting=1, running=5, informative=2, uninformative=4, failed=1, carried=0),
        "before_filter": BeforeFilter(
            groups=6, samples=24, reward_mean=0.25, reward_histogram={"0": 18, "1": 6}, solved_none=3, solved_all=1,
            kept_fraction=1 / 3,
        ),
        "durations": Durations(accepted_mean_s=9.0, informative_mean_s=10.0, all_mean_s=12.0),
        "waste": Waste(jobs=16, sampled_tokens=1234, seconds=90.0), "staleness": StalenessSeen(mean=0.5, max=1),
        "created_at": "2026-01-01T00:00:00Z", **fields,
    }  # fmt: skip
    return BatchRecord(**whole)


def make_group(seq):
    return PackedBatchGroup(
        seq=seq, index=seq, group_id=f"b:{seq}", rewards=[1.0, None], verdicts=[Verdict.USE, Verdict.DROP],
        durations_s=[1.0, None], policy_versions=[[0], []], job_ids=["x", "y"], advantages=[0.0, None],
        advantage_formula="f",
    )  # fmt: skip


class Daemon:
    """Batches as the routes give them, without anything that runs."""

    def __init__(self):
        self.record = make_record()
        self.groups = [make_group(2), make_group(5), make_group(9)]
        self.events = []
        self.is_over = True
        self.refusal = None
        self.submitted = []
        self.appended = []
        self.acks = []
        self.cancelled = []

    def __call__(self, method, path, headers, body):
        asked = json.loads(body) if body else {}
        parts = urlsplit(path)
        fields = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if method == "POST" and self.refusal is not None:
            return self.refusal
        match method, parts.path.removeprefix("/v1/batches").strip("/").split("/"):
            case "POST", [""]:
                self.submitted.append(asked)
                return 201, self._told(batch_id=asked["batch_id"])
            case "GET", [""]:
                return 200, {"items": [self._told()], "next": None}
            case "GET", [_]:
                return 200, self._told()
            case "POST", [_, "instances"]:
                self.appended.append(asked)
                n = len(asked["instances"])
                return 200, {"accepted": n, "next_offset": asked["offset"] + n}
            case "POST", [_, "ack"]:
                self.acks.append(asked["through"])
                return 200, {"through": asked["through"], "ready": 1}
            case "POST", [_, "cancel"]:
                self.cancelled.append(asked)
                return 202, self._told()
            case "GET", [_, "groups"]:
                new = [group for group in self.groups if group.seq > int(fields["after"])]
                page = PackedBatchGroupPage(items=new, state=self.record.state, is_over=self.is_over)
                return 200, msgspec.msgpack.encode(page), MSGPACK
            case "GET", [_, "events"]:
                new = [event for event in self.events if event.seq > int(fields["after"])]
                return 200, {"items": msgspec.to_builtins(new), "next": None}
        return 404, error("not_found", message=path)

    def _told(self, **fields):
        return msgspec.to_builtins(msgspec.structs.replace(self.record, **fields))


@pytest.fixture
def daemon():
    return Daemon()


@pytest.fixture
def batch(cli, daemon):
    """``prorld batch ...`` on that daemon."""
    with serving(daemon) as (address, _):
        yield lambda *argv: cli("batch", *argv, "--address", address)


@pytest.fixture
def prompts(tmp_path):
    """A file of three prompts."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(3)))
    return str(file)


def test_prompts_and_flags_make_a_batch(batch, daemon, prompts):
    """One instance per line; the flags are its fields; the end of the prompts is told; the id is what is printed."""
    flags = ("--handler", "math", "--target", "2", "--samples", "4", "--carry-from", "a", "--max-staleness", "none")
    more = ("--rule", "all", "--selection", "submission", "--max-tokens", "64", "--max-turns", "3", "--eval")
    code, out, err = batch("submit", prompts, "--id", "step-1", *flags, *more)
    assert (code, out, err) == (0, "step-1\n", "")
    [sent] = daemon.submitted
    wanted = {
        "handler": "math", "target_groups": 2, "samples_per_group": 4, "carry_from": "a", "max_staleness": None,
        "selection": "submission", "purpose": "eval", "instances": [{"n": 0}, {"n": 1}, {"n": 2}],
    }  # fmt: skip
    assert {name: sent[name] for name in wanted} == wanted
    assert (sent["informative"]["rule"], sent["sampling"]["max_tokens"], sent["agent"]["max_turns"]) == ("all", 64, 3)
    assert (sent["last"], daemon.appended) == (True, [])


def test_an_open_batch_gets_more_later(batch, daemon, prompts):
    """Nobody says that its prompts are all."""
    assert batch("submit", prompts, "--open", "--handler", "math")[0] == 0
    assert (daemon.submitted[0]["last"], daemon.appended) == (False, [])
    assert batch("append", "b", prompts, "--offset", "3", "--last")[1] == (
        "3 prompts added; the batch has 6 and gets no more\n"
    )
    assert [(sent["offset"], len(sent["instances"]), sent["last"]) for sent in daemon.appended] == [(3, 3, True)]


def test_prompts_without_a_place_go_after_those_that_it_has(batch, daemon, prompts):
    """As many as the daemon says."""
    assert json.loads(batch("append", "b", prompts, "--json")[1]) == {"next_offset": 23}
    assert [sent["offset"] for sent in daemon.appended] == [20]


def test_fewer_prompts_than_groups_are_worth_a_word(batch, prompts):
    """It can't meet its target, unless more prompts come or another batch left some."""
    argv = ("submit", prompts, "--handler", "math", "--target", "4")
    assert "4 groups are wanted of 3 prompts" in batch(*argv)[2]
    assert [batch(*argv, *more)[2] for more in (("--open",), ("--carry-from", "a"), ("--target", "3"))] == ["", "", ""]


def test_what_does_not_fit_follows(batch, daemon, prompts, monkeypatch):
    """The rest comes after the first of them, and a person is told."""
    monkeypatch.setattr(batch_feed, "FIRST_MAX", 2)
    code, _, err = batch("submit", prompts, "--handler", "math")
    assert (code, len(daemon.submitted[0]["instances"]), daemon.submitted[0]["last"]) == (0, 2, False)
    assert daemon.appended == [{"offset": 2, "instances": [{"n": 2}], "last": True}]
    assert err == "2 of 3 prompts sent; the others follow as it takes them\n"


def test_a_batch_that_needs_no_more_prompts_is_no_failure(batch, daemon, prompts, monkeypatch):
    """It met its target while it was being fed."""
    monkeypatch.setattr(batch_feed, "FIRST_MAX", 2)
    ended = (409, error("batch_ended", message="it has ended"))
    plain = Daemon.__call__

    def refuse(self, method, path, headers, body):
        return ended if path.endswith("/instances") else plain(self, method, path, headers, body)

    monkeypatch.setattr(Daemon, "__call__", refuse)
    code, _, err = batch("submit", prompts, "--handler", "math")
    assert code == 0
    assert "the batch ended before it needed all prompts: `prorld batch show batch-" in err


def test_an_interrupted_feed_says_how_to_go_on(batch, daemon, prompts, monkeypatch):
    """The batch goes on with what it has; the command that is told takes nothing twice, and any file of a batch."""

    def interrupted(self, *args, **fields):
        raise KeyboardInterrupt

    monkeypatch.setattr(batch_feed, "FIRST_MAX", 2)
    with monkeypatch.context() as patch:
        patch.setattr("prorld.client.Client.append_instances", interrupted)
        code, _, err = batch("submit", prompts, "--id", "s", "--handler", "math")
    again = f"prorld batch append s {prompts} --offset 0 --last"
    assert code == Exit.INTERRUPTED
    assert f"feed it the others by `{again}`" in err
    assert batch(*again.split()[2:])[0] == 0
    assert [(sent["offset"], len(sent["instances"]), sent["last"]) for sent in daemon.appended] == [(0, 3, True)]


def test_a_file_of_a_batch_can_be_appended(batch, daemon, tmp_path):
    """Its instances; and no file at all says that there are no more."""
    file = tmp_path / "f"
    file.write_text(json.dumps({"handler": "math", "instances": [{"a": 1}]}))
    assert batch("append", "b", str(file))[0] == 0
    assert batch("append", "b", "/dev/null", "--last")[1] == "0 prompts added; the batch has 20 and gets no more\n"
    assert [sent["instances"] for sent in daemon.appended] == [[{"a": 1}], []]
    file.write_text(json.dumps({"instances": ["a"]}))
    assert batch("append", "b", str(file))[0] == Exit.USAGE
    assert batch("append", "b", "/dev/null")[0] == Exit.USAGE


def test_a_whole_batch_is_taken_as_it_stands(batch, daemon, tmp_path):
    """And the flags go over it; a dry run sends nothing."""
    file = tmp_path / "step.json"
    whole = {"batch_id": "s", "handler": "math", "instances": [{"a": 1}], "sampling": {"temperature": 0.5}}
    file.write_text(json.dumps({**whole, "informative": {"metric": "exact"}}, indent=2))
    code, out, _ = batch("submit", str(file), "--dry-run", "--seed", "7", "--rule", "all")
    assert (code, daemon.submitted) == (0, [])
    planned = json.loads(out)
    assert (planned["batch_id"], planned["sampling"]["seed"], planned["sampling"]["temperature"]) == ("s", 7, 0.5)
    assert (planned["informative"]["rule"], planned["informative"]["metric"]) == ("all", "exact")
    assert batch("submit", str(file))[1] == "s\n"
    assert daemon.submitted[0]["instances"] == [{"a": 1}]


@pytest.mark.parametrize(
    ("text", "flags", "words"),
    [
        ("", (), "holds no instance"),
        ('{"instances": []}', (), "has no instances; --open if they follow"),
        ('{"instances": [{}], "target": 3}', (), "unknown field `target`"),
        ('{"handler": "h", "instancs": [{}]}', (), "unknown field `instancs`"),
        ('{"instances": [{}],\n "handler": }', (), "is meant to be a batch, and is not JSON: Expecting value: line 2"),
        ('{"x": 1}', (), "name one with --handler"),
        ('{\n"handler": "math"\n}', (), "has no instances"),
        ('{"a": 1}\n[1]\n', (), "line 2"),
        ('{"a": 1}\n', ("--max-staleness", "few"), "--max-staleness is a number from 0 or none"),
        ('{"a": 1}\n', ("--samples", "5000"), "samples_per_group"),
    ],
)
def test_what_is_no_batch_is_a_usage_error(batch, daemon, tmp_path, text, flags, words):
    """In one line, before anything is sent."""
    file = tmp_path / "f"
    file.write_text(text)
    code, _, err = batch("submit", str(file), *flags)
    assert (code, daemon.submitted, err.count("\n")) == (Exit.USAGE, [], 1)
    assert words in err


def test_a_gap_names_the_offset_to_give(batch, daemon, prompts):
    """The cure is a flag."""
    gap = error("offset_gap", message="the next offset is 3")
    gap["error"]["details"] = {"expected_offset": 3}
    daemon.refusal = (409, gap)
    code, _, err = batch("append", "b", prompts, "--offset", "9")
    assert (code, err) == (1, "prorld: the next offset is 3; the next prompts go to --offset 3\n")


def test_batches_are_listed(batch):
    """The command alone is the list."""
    code, out, _ = batch("list")
    head, row = out.splitlines()
    assert (code, head.split()[:5]) == (0, ["BATCH", "HANDLER", "POLICY", "STATE", "ACCEPTED"])
    assert row.split()[:7] == ["b", "math", "default", "running", "2/8", "5", "33"]
    assert [item["batch_id"] for item in json.loads(batch("list", "--json", "--state", "running")[1])] == ["b"]
    assert batch("list", "--state", "failed")[1] == "no batches\n"


def test_a_batch_is_shown(batch, daemon):
    """Ends, what came before the filter, the bias of speed, waste, staleness; without bars where nobody looks."""
    daemon.record = make_record(reason="no\x1b[2J way")
    code, out, _ = batch("show", "b")
    assert code == 0
    assert "█" not in out
    assert "\x1b" not in out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for line in (
        "b running: no\\x1b[2J way",
        "math, policy default, 8 groups wanted of 4 samples",
        "groups 13",
        "informative 2",
        "uninformative 4",
        "before filter 6 groups, 24 samples; mean reward 0.25; solved by none 3, by all 1; kept 33 %",
        "reward 0 18",
        "durations all 12.0 s, informative 10.0 s, accepted 9.0 s, bias -10.0 % a sample",
        "waste 16 jobs, 1234 tokens, 90.0 s",
        "staleness mean 0.5, max 1",
        "prompts 20 taken, more may follow; it could use 24",
        "acknowledged through 3 of 11",
        "carried from a",
    ):
        assert line in lines
    assert json.loads(batch("show", "b", "--json")[1])["waste"]["jobs"] == 16


def test_bars_are_as_long_as_they_say():
    """The longest is the most; nothing is none, and little is not nothing."""
    record = make_record(groups=GroupCounts(informative=1, uninformative=100), before_filter=BeforeFilter())
    lines = record_lines(record, Style(on=False), bars=True)
    lengths = {line.split()[0]: line.count("█") for line in lines if "█" in line}
    assert lengths == {"informative": 1, "uninformative": 32}


def test_a_batch_of_which_nothing_has_ended_is_shown():
    """No figure is made up."""
    fresh = BatchRecord(
        batch_id="b", tenant="t", handler="math", policy="default", purpose="eval", state=BatchState.RUNNING,
        samples_per_group=1, target_groups=None, created_at="2026-01-01T00:00:00Z",
    )  # fmt: skip
    text = "\n".join(record_lines(fresh, Style(on=False), bars=True))
    assert "a stream of 1 sample, evaluation" in text
    assert "nothing has ended" in text
    assert "staleness" not in text


def make_events(state):
    at = "2026-01-01T00:00:00Z"
    return [
        BatchEvent(seq=1, event="batch.wants", at=at, total=4),
        BatchEvent(seq=2, event="group.done", at=at, group_id="b:0", rewards=[1.0, None], durations_s=[2.0, None]),
        BatchEvent(seq=3, event="group.failed", at=at, group_id="b:1", reason="no\x1b[2J engine"),
        BatchEvent(seq=4, event="batch.end", at=at, state=state, reason="the target is met"),
    ]


@pytest.mark.parametrize(("state", "code"), [("complete", 0), ("exhausted", 0), ("failed", 1), ("cancelled", 1)])
def test_a_batch_is_watched_line_by_line(batch, daemon, state, code):
    """A line per group, then all of it; the exit code is the batch's end."""
    daemon.record = make_record(state=BatchState(state))
    daemon.events = make_events(BatchState(state))
    found, out, _ = batch("watch", "b")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert found == code
    assert lines[:3] == [
        "2 done b:0 rewards 1 - slowest 2.0 s",
        "3 failed b:1: no\\x1b[2J engine",
        f"4 batch.end {state}: the target is met",
    ]
    assert "waste 16 jobs, 1234 tokens, 90.0 s" in lines


def test_a_watch_for_scripts_is_every_event(batch, daemon):
    """A line of JSON each, after the number that was given."""
    daemon.record = make_record(state=BatchState.COMPLETE)
    daemon.events = make_events(BatchState.COMPLETE)
    _, out, _ = batch("watch", "b", "--json", "--after", "2")
    assert [json.loads(line)["seq"] for line in out.splitlines()] == [3, 4]


def test_a_watch_on_a_terminal_moves(batch, daemon, monkeypatch):
    """One line that is drawn again until the batch has ended."""
    records = iter([make_record(), make_record(state=BatchState.COMPLETE)])
    plain = Daemon.__call__

    def moving(self, method, path, headers, body):
        self.record = next(records, self.record)
        return plain(self, method, path, headers, body)

    monkeypatch.setattr(Daemon, "__call__", moving)
    monkeypatch.setattr(batch_watch, "_LOOK_S", 0)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "160")
    code, out, _ = batch("watch", "b")
    first, second = out.split("\r\x1b[K")[1:3]
    assert code == 0
    assert first.startswith("[██████··················] 2/8 accepted")
    assert "left" in first
    assert "left" not in second


def test_progress_says_what_is_left():
    """By the mean so far: two of eight in a minute are three minutes more."""
    assert batch_watch.progress(make_record(), NOW) == (
        "[██████··················] 2/8 accepted, 5 running, 4 filtered, 1 failed, 16 jobs wasted, about 3m00s left"
    )
    stream = make_record(target_groups=None, waste=Waste())
    assert batch_watch.progress(stream, NOW) == "2 accepted, 5 running, 4 filtered, 1 failed"


def test_groups_are_printed_after_what_is_acknowledged(batch):
    """A line each."""
    code, out, _ = batch("groups", "b")
    found = [json.loads(line) for line in out.splitlines()]
    assert (code, [line["group"]["seq"] for line in found]) == (0, [5, 9])
    assert found[0]["batch_id"] == "b"
    assert found[0]["group"]["advantages"] == [0.0, None]


def test_groups_are_acknowledged_when_they_are_in_the_file(batch, daemon, tmp_path):
    """The same command again goes on after the last line, and half a line is done again."""
    file = tmp_path / "groups.jsonl"
    whole = daemon.groups
    daemon.groups = whole[:2]
    argv = ("groups", "b", "-o", str(file), "--after", "0", "--ack")
    assert batch(*argv)[2] == f"2 groups written to {file}\n"
    assert daemon.acks == [2, 5]
    file.write_bytes(file.read_bytes() + b'{"batch_id":"b","gro')
    daemon.groups = whole
    assert batch(*argv)[2] == f"1 group written to {file}\n"
    assert [json.loads(line)["group"]["seq"] for line in file.read_text().splitlines()] == [2, 5, 9]
    assert daemon.acks == [2, 5, 9]


@pytest.mark.parametrize("text", ["my notes", "my notes\n", '{"batch_id":"other","group":{"seq":1}}\n'])
def test_a_file_of_something_else_is_left_alone(batch, daemon, tmp_path, text):
    """Nothing is written into it and nothing cut off."""
    file = tmp_path / "f"
    file.write_text(text)
    code, _, err = batch("groups", "b", "-o", str(file), "--ack")
    assert (code, file.read_text(), daemon.acks) == (Exit.USAGE, text, [])
    assert "name another file" in err


def test_only_what_is_there_now(batch, daemon):
    """Without waiting that is a success; a wait that came to nothing can be tried again."""
    daemon.is_over = False
    code, out, _ = batch("groups", "b", "--no-wait")
    assert (code, len(out.splitlines())) == (0, 2)
    code, out, err = batch("groups", "b", "--within", "0", "--after", "5")
    assert (code, len(out.splitlines())) == (Exit.TEMPORARY, 1)
    assert "nothing new of batch b within 0 s" in err
    assert batch("groups", "b", "--no-wait", "--within", "3")[0] == Exit.USAGE


def test_groups_are_acknowledged_by_number(batch, daemon):
    """What waits for it still is told."""
    assert batch("ack", "b", "--through", "5")[:2] == (0, "acknowledged through 5; 1 accepted group left\n")
    assert json.loads(batch("ack", "b", "--through", "5", "--json")[1]) == {"through": 5, "ready": 1}
    assert batch("ack", "b", "--through", "-5")[0] == Exit.USAGE


def test_a_batch_is_cancelled_once(cli, daemon):
    """By either command; one that has ended says so."""
    with serving(daemon) as (address, _):
        place = ("--address", address)
        words = "cancelling; it keeps 2 accepted groups\n"
        assert cli("batch", "cancel", "b", "--reason", "why", *place)[:2] == (0, words)
        assert cli("cancel", "--batch", "b", *place)[:2] == (0, words)
        daemon.record = make_record(state=BatchState.COMPLETE)
        assert cli("cancel", "--batch", "b", *place)[:2] == (0, "already ended: complete\n")
        daemon.record = make_record(state=BatchState.COMPLETE, leftovers=3)
        words = "already ended: complete; cancelling 3 groups that it left for another batch\n"
        assert cli("cancel", "--batch", "b", *place)[:2] == (0, words)
        assert cli("cancel", "--batch", "b", "--group", "g", *place)[0] == Exit.USAGE
        assert cli("cancel", "--batch", "b", "--wait", *place)[0] == Exit.USAGE
    assert daemon.cancelled[0] == {"reason": "why"}
    assert len(daemon.cancelled) == 3
