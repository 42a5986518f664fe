"""``prorld reevaluate``: whom it asks, how many at once, what it prints, and how it ends."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Self

import pytest

from prorld.cli import reevaluate
from prorld.cli.exits import Exit
from prorld.client import ClientError
from prorld.domain.outcome import Outcome, OutcomeKind
from prorld.wire.jobs import JobPage, JobRecord
from prorld.wire.looks import Reevaluation, ReevaluationState

OK = Outcome(kind=OutcomeKind.OK, code="ok")
BROKEN = Outcome(kind=OutcomeKind.GRADER_ERROR, stage="eval", code="grader_timeout", message="too \x1b[2Jslow")


def refusal(status: int, code: str) -> ClientError:
    return ClientError(f"because of {code}", code=code, status=status, retryable=status == 429, retry_after_s=7.0)


class FakeClient:
    """A daemon with jobs and a new grader; ``room`` is how many it scores at once."""

    def __init__(self, make: Any) -> None:
        self.rewards: dict[str, float | None] = {"a": 0.0, "b": 0.5, "c": 1.0, "d": None}
        self.new: dict[str, float | ClientError | None] = {"a": 1.0, "b": 0.5, "c": 1.0, "d": 0.25}
        self.make = make
        self.room = 100
        self.live: list[str] = []
        self.most = 0
        self.asked: Counter[str] = Counter()
        self.reasons: list[str] = []
        self.filters: list[dict[str, Any]] = []
        self.never = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def get(self, job_id: str) -> JobRecord:
        if job_id not in self.rewards:
            raise refusal(404, "unknown_job")
        reward = self.rewards[job_id]
        outcome = OK if reward is not None else BROKEN
        record: JobRecord = self.make.record(job_id=job_id, reward=reward, outcome=outcome)
        return record

    def list(self, *, state: str, limit: int, after: str | None, **filters: Any) -> JobPage:
        assert state == "done"
        self.filters.append(filters)
        # As a list that moves while it is read: one comes twice.
        names = [*self.rewards, next(iter(self.rewards))]
        start = int(after or 0)
        more = str(start + 2) if start + 2 < len(names) else None
        return JobPage(items=[self.get(name) for name in names[start : start + 2]], next=more)

    def groups(self, batch_id: str, *, after: int, within_s: float) -> Iterator[Any]:
        assert (batch_id, after, within_s) == ("step", 0, 0.0)
        yield SimpleNamespace(job_ids=["a", None, "gone"])
        yield SimpleNamespace(job_ids=["b"])
        raise ClientError("no more yet", code="nothing_new")

    def reevaluate(self, job_id: str, *, reason: str) -> Reevaluation:
        self.asked[job_id] += 1
        new = self.new[job_id]
        if isinstance(new, ClientError):
            raise new
        if len(self.live) >= self.room:
            raise refusal(429, "too_many")
        self.live.append(job_id)
        self.most = max(self.most, len(self.live))
        self.reasons.append(reason)
        return self._look(job_id, ReevaluationState.QUEUED)

    def wait_reevaluation(self, job_id: str, n: int, *, within_s: float) -> Reevaluation:
        assert 0 < within_s <= 30
        if self.never:
            return self._look(job_id, ReevaluationState.EVALUATING)
        self.live.remove(job_id)
        return self._look(job_id, ReevaluationState.DONE)

    def _look(self, job_id: str, state: ReevaluationState) -> Reevaluation:
        new = self.new[job_id]
        assert not isinstance(new, ClientError)
        ended = state is ReevaluationState.DONE
        return Reevaluation(
            n=3, job_id=job_id, tenant="default", state=state, reward=new if ended else None,
            outcome=(OK if new is not None else BROKEN) if ended else None, created_at="2026-01-01T00:00:00Z",
        )  # fmt: skip


@pytest.fixture
def client(make, monkeypatch):
    """The daemon's client, in the command's place; nobody sleeps."""
    made = FakeClient(make)
    monkeypatch.setattr(reevaluate, "client_of", lambda args, patience_s: made)
    return made


def test_a_table_and_what_it_comes_to(cli, client):
    """Old reward, new reward, whether they differ; the means are over those that have both."""
    code, out, err = cli("reevaluate", "a", "b", "d", "a", "--reason", "units")
    assert (code, err) == (0, "")
    head, *rows, last = out.splitlines()
    assert head.split() == ["JOB", "BEFORE", "NOW", "CHANGED", "WHY"]
    assert [row.split() for row in rows] == [
        ["a", "0", "1", "yes"],
        ["b", "0.5", "0.5", "no"],
        ["d", "-", "0.25", "yes"],
    ]
    assert last == "3 jobs scored again, 2 changed; mean reward 0.25 before, 0.75 now"
    assert (client.asked, set(client.reasons)) == (Counter(["a", "b", "d"]), {"units"})


def test_json_has_all_of_it(cli, client):
    """For scripts; a grade that failed is null and no zero."""
    client.new["b"] = None
    code, out, _ = cli("reevaluate", "a", "b", "--json")
    found = json.loads(out)
    assert code == Exit.FAILED
    assert found["jobs"][1] == {
        "job_id": "b", "before": 0.5, "now": None, "changed": False, "n": 3, "code": "grader_timeout",
        "message": "too \x1b[2Jslow",
    }  # fmt: skip
    assert {name: found[name] for name in ("scored", "changed", "failed", "mean_before", "mean_now", "in_time")} == {
        "scored": 1, "changed": 1, "failed": 1, "mean_before": 0.0, "mean_now": 1.0, "in_time": True,
    }  # fmt: skip


def test_what_can_not_be_scored_is_told_and_the_others_are(cli, client):
    """Nothing of it steers the terminal; exit 1."""
    client.new |= {"a": refusal(409, "sandbox_gone"), "b": None}
    code, out, _ = cli("reevaluate", "a", "b", "c")
    assert code == Exit.FAILED
    assert "sandbox_gone: because of sandbox_gone" in out
    assert "grader_timeout: too \\x1b[2Jslow" in out
    assert out.splitlines()[-1] == "1 job scored again, 0 changed, 2 not scored; mean reward 1 before, 1 now"


@pytest.mark.parametrize(("status", "code", "exit_code"), [(403, "read_only", Exit.PERMISSION),
                                                           (503, "draining", Exit.FAILED)])  # fmt: skip
def test_what_is_refused_for_all_ends_the_command(cli, client, status, code, exit_code):
    """It would be refused for each of them."""
    client.new["a"] = refusal(status, code)
    ended, _, err = cli("reevaluate", "a", "b")
    assert ended == exit_code
    assert code in err
    assert client.asked["b"] == 0


def test_jobs_of_a_handler_and_a_group(cli, client):
    """Page by page, each once; those of an outcome, and no more than so many."""
    assert cli("reevaluate", "--handler", "calc", "--group", "g")[0] == 0
    assert client.asked == Counter("abcd")
    assert client.filters[0] == {"handler": "calc", "group_id": "g"}
    client.asked.clear()
    assert cli("reevaluate", "--handler", "calc", "--outcome", "grader_error")[0] == 0
    assert client.asked == Counter("d")
    client.asked.clear()
    assert cli("reevaluate", "--handler", "calc", "--limit", "2")[0] == 0
    assert client.asked == Counter("ab")


def test_jobs_of_a_batch(cli, client):
    """Those of its accepted groups; one that is forgotten is told."""
    code, out, _ = cli("reevaluate", "--batch", "step")
    assert code == Exit.FAILED
    assert client.asked == Counter("ab")
    assert "unknown_job" in out


def test_so_many_at_once(cli, client):
    """Never more than asked for, and never more than the daemon gives."""
    client.rewards = dict.fromkeys(map(str, range(40)), 0.0)
    client.new = dict.fromkeys(map(str, range(40)), 1.0)
    assert cli("reevaluate", "--handler", "calc", "--max-inflight", "7")[0] == 0
    assert (client.most, len(client.asked)) == (7, 40)
    client.room, client.most = 3, 0
    code, out, _ = cli("reevaluate", "--handler", "calc")
    assert (code, client.most) == (0, 3)
    assert out.splitlines()[-1].startswith("40 jobs scored again, 40 changed")


def test_a_share_that_others_use_up_is_waited_for(cli, client, monkeypatch):
    """As long as the daemon says."""
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        client.room = 1 if len(slept) == 2 else 0

    client.room = 0
    monkeypatch.setattr("time.sleep", sleep)
    assert cli("reevaluate", "a")[0] == 0
    assert slept == [7.0, 7.0]


def test_the_time_is_over(cli, client, monkeypatch):
    """What has not ended is told so; exit 75, and nothing else is begun."""
    now = iter(range(0, 10_000, 5))
    monkeypatch.setattr(reevaluate, "time", SimpleNamespace(monotonic=lambda: float(next(now)), sleep=None))
    client.never = True
    code, out, _ = cli("reevaluate", "a", "b", "c", "d", "--within", "60", "--max-inflight", "2")
    assert code == Exit.TEMPORARY
    assert "not_ended" in out
    assert "the time is over" in out
    assert client.asked == Counter("ab")


@pytest.mark.parametrize(
    "argv",
    [(), ("a", "--handler", "calc"), ("--batch", "b", "--group", "g"), ("a", "--max-inflight", "257"),
     ("a", "--outcome", "lost")],
)  # fmt: skip
def test_what_is_typed_wrongly(cli, client, argv):
    """Exit 2, and nobody is asked."""
    assert cli("reevaluate", *argv)[0] == Exit.USAGE
    assert not client.asked


def test_nothing_to_score(cli, client):
    """No job of the handler has ended."""
    client.rewards = {}
    client.list = lambda **_: JobPage(items=[])
    assert cli("reevaluate", "--handler", "calc") == (0, "no ended job is among them\n", "")
