"""``prorld verify``: what it asks, what it prints, and how it ends."""

from __future__ import annotations

import json
from typing import Any, Self, get_args

import pytest

from prorld.cli import verify
from prorld.domain.scoring import UnscoredReason, Worst
from prorld.wire.jobs import JobPage
from prorld.wire.looks import Rescore, Unverifiable, VerifyAnswer, VersionScore, Violation

WORST = Worst(branch=0, index=17, token_id=5, call=2, recorded=-0.5, scored=-0.75)
SCORE = Rescore(
    tokens=90, mean=0.0125, max=0.25, worst=WORST, backends=["b-1", "b-2"], tolerance_mean=0.02, tolerance_max=1.0,
    by_version=[
        VersionScore(
            epoch=epoch, version=version, tokens=tokens, mean=0.01, max=0.25, worst=WORST, backends=[name],
            tolerance_mean=0.02,
        )
        for epoch, version, tokens, name in ((0, 3, 60, "b-1"), (1, 2, 30, "b-2"))
    ],
    seconds=0.5,
)  # fmt: skip


def answer(job_id: str, result: Any = "ok", **fields: Any) -> VerifyAnswer:
    """An answer of the daemon."""
    given: dict[str, Any] = {"violations": [], "unverifiable": [], "rescore": SCORE} | fields
    return VerifyAnswer(
        job_id=job_id, ok=result == "ok", result=result, branches=1, calls=3, tokens=200, sampled=90, **given
    )


DRIFTED = answer(
    "bad", "broken", violations=[Violation(code="logprob_drift", message="by \x1b[2J0.08", branch=0, call=2)]
)
LEFT = answer("half", "unverifiable", unverifiable=[Unverifiable(epoch=0, version=2, tokens=7, reason="processed")])


class FakeClient:
    """Answers by id, and remembers what it was asked."""

    def __init__(self, make: Any) -> None:
        self.answers = {found.job_id: found for found in (answer("good"), DRIFTED, LEFT)}
        self.asked: list[dict[str, Any]] = []
        self.make = make

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def verify(self, job_id: str, **asked: Any) -> VerifyAnswer:
        self.asked.append(asked)
        return self.answers[job_id]

    def list(self, *, state: str, limit: int) -> JobPage:
        assert state == "done"
        return JobPage(items=[self.make.record(job_id=name) for name in list(self.answers)[:limit]])


@pytest.fixture
def client(make, monkeypatch):
    """The daemon's client, in the command's place."""
    made = FakeClient(make)
    monkeypatch.setattr(verify, "client_of", lambda args: made)
    return made


def test_a_sound_job_is_one_line(cli, client):
    """Tokens, mean, largest, versions and engines; exit 0."""
    code, out, err = cli("verify", "good")
    head, row = out.splitlines()
    assert (code, err) == (0, "")
    assert head.split() == ["JOB", "RESULT", "SAMPLED", "SCORED", "MEAN", "MAX", "VERSIONS", "ENGINES"]
    assert row.split() == ["good", "ok", "90", "90", "0.01250", "0.25000", "0.3,1.2", "b-1,b-2"]
    assert client.asked == [{"rescore": True, "tolerance": None, "tolerance_max": None}]


def test_what_is_broken_is_told_and_is_the_exit_code(cli, client):
    """With the place of it, and without steering the terminal."""
    code, out, _ = cli("verify", "good", "bad")
    assert code == 1
    assert out.splitlines()[-1] == "bad branch 0 call 2: logprob_drift: by \\x1b[2J0.08"


def test_what_can_not_be_confirmed_is_told(cli, client):
    """Its reason in words; a failure only where that was asked for."""
    code, out, _ = cli("verify", "half")
    assert code == 0
    assert out.splitlines()[-1].startswith("half: 7 tokens of version 0.2: recorded after temperature")
    assert cli("verify", "half", "--strict")[0] == 1
    assert cli("verify", "good", "--strict")[0] == 0


def test_the_newest_jobs_as_json(cli, client):
    """The answers themselves, the newest N of them."""
    code, out, _ = cli("verify", "--recent", "2", "--json", "--tolerance", "0.5", "--tolerance-max", "3")
    found = json.loads(out)
    assert (code, [one["job_id"] for one in found]) == (1, ["good", "bad"])
    assert found[0]["rescore"]["worst"]["index"] == 17
    assert client.asked[0] == {"rescore": True, "tolerance": 0.5, "tolerance_max": 3.0}


def test_without_engines(cli, client):
    """``--no-rescore`` asks none, and the columns of the second look are empty."""
    client.answers["plain"] = answer("plain", rescore=None)
    code, out, _ = cli("verify", "plain", "--no-rescore")
    assert (code, out.splitlines()[1].split()) == (0, ["plain", "ok", "90", "-", "-", "-", "-", "-"])
    assert client.asked[0]["rescore"] is False


def test_nothing_has_ended_yet(cli, client):
    """No table of nothing."""
    client.answers.clear()
    assert cli("verify", "--recent", "3") == (0, "no job has ended yet\n", "")


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("job", "--recent", "2"),
        ("job", "--tolerance", "x"),
        ("job", "--tolerance", "-1"),
        ("job", "--tolerance", "nan"),
    ],
)
def test_what_makes_no_sense_is_refused(cli, client, argv):
    """Neither jobs nor a number of them, both, or a tolerance that is none."""
    assert cli("verify", *argv)[0] == 2
    assert client.asked == []


def test_every_reason_has_words():
    """A reason that is added needs some."""
    assert set(get_args(UnscoredReason)) == set(verify._WHY)
