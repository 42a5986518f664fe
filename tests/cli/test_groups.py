"""What is said of groups of jobs: when they are handed in, waited for, interrupted and cancelled."""

from __future__ import annotations

import json
from functools import partial

import pytest

from prorld.cli import cancel, jobs, submit, submit_wait
from prorld.cli.submit_wait import Waiting
from prorld.client import ClientError
from prorld.wire.jobs import SubmitJob
from prorld.wire.ops import Condition
from tests.cli.fake_daemon import FakeClient, FakeDaemon


@pytest.fixture
def fake(monkeypatch):
    """The daemon that every command of these tests talks to."""
    made = FakeDaemon(looks=100_000)

    def connect(args, *, patience_s=0.0):
        return made.connect()

    for command in (cancel, submit, jobs):
        monkeypatch.setattr(command, "client_of", connect)
    # The command gives ids to jobs in the client that it makes; the fake one has none of its own.
    monkeypatch.setattr(FakeClient, "submit", submit_with_id)
    return made


def submit_with_id(self, job):
    self._daemon.tick()
    number = len(self._daemon.submitted)
    return self._daemon.submit(job if job.job_id else SubmitJob(job_id=f"job-{number}", **fields(job)))


def fields(job):
    return {name: getattr(job, name) for name in job.__struct_fields__ if name != "job_id"}


def hand_in(fake, n, group="g"):
    client = fake.connect()
    return [client.submit(SubmitJob(job_id=f"{group}.{i}", instance={}, group_id=group)) for i in range(n)]


def test_a_group_of_any_size_is_waited_for(cli, fake):
    """Every job of the group is waited for, also beyond one page of the daemon's list."""
    hand_in(fake, 600)
    fake.cancel = len
    code, out, _ = cli("cancel", "--group", "g", "--wait")
    assert (code, out) == (0, "cancelling 600 jobs\n")
    assert len(set(fake.waited)) == 600


def test_the_list_follows_the_pages(cli, fake):
    """As many as were asked for, and never a page that the daemon refuses."""
    hand_in(fake, 600)
    _, out, _ = cli("jobs", "--limit", "550", "--json")
    assert len(json.loads(out)) == 550


def test_a_group_that_nobody_knows_is_told(cli, fake):
    """A typing error is no success."""
    hand_in(fake, 2)
    assert cli("cancel", "--group", "typo") == (1, "", "prorld: no job of group typo\n")
    assert cli("cancel", "--group", "g")[1] == "cancelling 2 jobs\n"
    assert cli("cancel", "--group", "g")[:2] == (0, "already ended: 2 cancelled\n")


def test_a_job_that_has_ended_is_told_as_such(cli, fake):
    """Nothing is cancelled, and what it came to is said."""
    hand_in(fake, 1)
    fake.looks = 0
    assert cli("cancel", "g.0")[:2] == (0, "already ended: ok\n")


def test_ended_jobs_are_told_as_they_end(fake):
    """The second of two that ends first is told first."""
    records = hand_in(fake, 2)
    told = []

    def tell(record):
        told.append(record.job_id)
        fake.looks = 0

    fake.cancel(["g.1"])
    ended = Waiting(fake.connect(), records, tell).run()
    assert told == ["g.1", "g.0"]
    assert set(ended) == {"g.0", "g.1"}


def test_what_was_handed_in_is_named_by_its_group(cli, fake):
    """On stderr, so that scripts see ids only."""
    code, out, err = cli("submit", "--handler", "fake", "--instance", "{}", "--n", "3")
    assert code == 0
    assert len(out.splitlines()) == 3
    group = fake.submitted[0].group_id
    assert err == f"group {group} (3 jobs)\n"


def test_an_interrupted_wait_says_how_to_cancel(cli, fake, monkeypatch):
    """Ctrl-C: the jobs go on, and the command that ends them is there to be copied."""

    def interrupted(self, job_id, *, within_s=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeClient, "wait", interrupted)
    monkeypatch.setenv("PRORLD_PROGRAM", "./just prorld")
    code, _, err = cli("submit", "--handler", "fake", "--instance", "{}", "--n", "3", "--wait")
    assert code == 130
    assert f"the jobs go on; cancel with `./just prorld cancel --group {fake.submitted[0].group_id}`" in err


@pytest.mark.parametrize("code", ["no_daemon", "connection_lost", "unknown_job"])
def test_a_daemon_that_ends_takes_the_results_along(fake, monkeypatch, code):
    """The wait says how many are lost instead of what became of a socket."""
    records = hand_in(fake, 3)

    def gone(self, job_id, *, within_s=None):
        raise ClientError("refused", code=code)

    monkeypatch.setattr(FakeClient, "wait", gone)
    with pytest.raises(ClientError, match="the daemon ended; 3 results are lost"):
        Waiting(fake.connect(), records, print).run()


def test_a_wait_without_an_engine_says_so_once(fake, monkeypatch, capsys):
    """What readiness misses is told, and not again while it stays the same."""
    records = hand_in(fake, 1)
    monkeypatch.setattr(submit_wait, "QUIET_S", 0.0)
    fake.missing = [Condition(code="no_backend", message="policy default has no engine that is up", cure="add one")]
    fake.looks = 20
    Waiting(fake.connect(), records, partial(print, end="")).run()
    err = capsys.readouterr().err
    assert err == "waiting: policy default has no engine that is up; add one\n"


def test_the_group_is_shown(cli, fake):
    """In the list, wherever a job has one."""
    hand_in(fake, 1, group="g-7")
    _, out, _ = cli("jobs")
    assert "GROUP" in out.splitlines()[0]
    assert "g-7 " in out.splitlines()[1]
