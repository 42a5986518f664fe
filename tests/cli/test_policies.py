"""``prorld policies``: what is typed becomes the call that it says, and what can't be done is told with its cure."""

from __future__ import annotations

import json
from typing import Any, Self

import msgspec
import pytest

from prorld.cli import policies
from prorld.cli.exits import Exit
from prorld.client import ClientError
from prorld.domain.policy import BackendResult
from prorld.wire.policies import PausedPolicy, PauseView, PolicyInfo, PolicyUpdate

PAUSE = PauseView(pause_id="pause-1", holder="t1", mode="abort", since="2026-01-01T00:00:00Z")
HELD = ClientError("policy 'a' is paused by 't1'", code="policy_busy", status=409, details={"holder": "t1"})
RUNS = ClientError(
    "policy 'a' is being updated", code="policy_busy", status=409, details={"update_id": "u", "holder": "t1"}
)


def update(policy: str, n: int, **fields: Any) -> PolicyUpdate:
    """The ``n``-th of a policy, begun in the ``n``-th second."""
    whole: dict[str, Any] = {
        "update_id": f"u-{n}", "policy": policy, "state": "done", "version": n, "epoch": 0, "how": "reload",
        "path": f"/w/{n}", "mode": "abort", "created_at": f"2026-01-01T00:00:{n:02}Z", **fields,
    }  # fmt: skip
    return PolicyUpdate(**whole)


class Daemon:
    """Two policies, as the client sees them; ``refusal`` meets whatever changes one."""

    def __init__(self) -> None:
        self.infos = {
            "a": PolicyInfo(name="a", version=3, epoch=0, backends={"up": 1}),
            "b": PolicyInfo(name="b", version=0, epoch=0),
        }
        self.remembered = {
            "a": [update("a", 3), update("a", 1, state="failed", message="no\x1b[2J weights", path=None)],
            "b": [update("b", 2, epoch=1, backends=[BackendResult(id="b-1", ok=True)])],
        }
        self.refusal: ClientError | None = None
        self.asked: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def policies(self) -> list[PolicyInfo]:
        return [*self.infos.values()]

    def policy(self, policy: str) -> PolicyInfo:
        return self.infos[policy]

    def updates(self, policy: str) -> list[PolicyUpdate]:
        return self.remembered[policy]

    def pause_policy(self, policy: str, **fields: Any) -> PausedPolicy:
        self._called(fields)
        return PausedPolicy(pause_id=fields["pause_id"] or "made", backends=[])

    def update_policy(self, policy: str, *args: Any, **fields: Any) -> PolicyUpdate:
        self._called(fields)
        return update(policy, 4)

    def wait_update(self, policy: str, update_id: str) -> PolicyUpdate:
        return update(policy, 4)

    def _called(self, fields: dict[str, Any]) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.asked.append(fields)


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Daemon:
    """In the place of a real one."""
    made = Daemon()
    monkeypatch.setattr(policies, "client_of", lambda _args: made)
    return made


@pytest.mark.parametrize(
    ("backends", "state"),
    [
        ({"up": 1}, "serving"),
        ({"suspect": 1}, "serving"),
        ({}, "no engine"),
        ({"down": 2, "quarantined": 1, "draining": 1}, "no engine"),
    ],
)
def test_only_a_policy_with_an_engine_that_takes_jobs_serves(cli, daemon, backends, state):
    """The command alone is the list."""
    daemon.infos = {"a": PolicyInfo(name="a", version=3, epoch=0, backends=backends)}
    code, out, _ = cli("policies")
    assert (code, state in out, ("serving" in out) == (state == "serving")) == (0, True, True)


@pytest.mark.parametrize(("pause_id", "shown"), [("pause-1", True), (None, False)])
def test_a_pause_is_shown_with_the_id_to_give(cli, daemon, pause_id, shown):
    """Where the daemon tells it."""
    pause = msgspec.structs.replace(PAUSE, pause_id=pause_id)
    daemon.infos = {"a": PolicyInfo(name="a", version=3, epoch=0, pause=pause)}
    _, out, _ = cli("policies", "list")
    assert "paused by t1 since 2026-01-01T00:00:00Z" in out
    assert ("--pause-id pause-1" in out) == shown


def test_updates_are_listed_newest_first(cli, daemon):
    """Of all policies or one, with the path or what went wrong."""
    code, out, _ = cli("policies", "updates")
    head, *rows = out.splitlines()
    assert (code, head.split()[:6]) == (0, ["UPDATE", "POLICY", "VERSION", "HOW", "STATE", "ENGINES"])
    assert [row.split()[0] for row in rows] == ["u-3", "u-2", "u-1"]
    assert rows[0].endswith("/w/3")
    assert "2 (epoch 1)" in rows[1]
    assert "1/1" in rows[1]
    assert rows[2].endswith("no\\x1b[2J weights")
    _, out, _ = cli("policies", "updates", "a", "--json")
    assert [row["update_id"] for row in json.loads(out)] == ["u-3", "u-1"]
    daemon.remembered["b"] = []
    assert cli("policies", "updates", "b") == (0, "no update is remembered\n", "")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--path", "weights/3"), "PATH must be an absolute path, and not 'weights/3'"),
        ((), "--path is missing: --how reload"),
        (("--how", "lora"), "--path is missing: --how lora"),
        (("--how", "none", "--path", "/w"), "it takes no --path"),
    ],
)
def test_a_path_that_is_wrong_is_a_usage_error(cli, daemon, flags, words):
    """Before anybody is asked."""
    code, _, err = cli("policies", "update", "a", "--version", "4", *flags)
    assert (code, daemon.asked) == (Exit.USAGE, [])
    assert words in err


def test_settings_that_are_wrong_are_a_usage_error(cli, daemon):
    """As one line."""
    code, _, err = cli("policies", "set", "a", "--model", "")
    assert (code, err.count("\n")) == (Exit.USAGE, 1)


def test_a_pause_can_be_repeated_by_its_id(cli, daemon):
    """The one that was typed goes along."""
    assert cli("policies", "pause", "a", "--pause-id", "mine")[0] == 0
    assert cli("policies", "pause", "a")[0] == 0
    assert [fields["pause_id"] for fields in daemon.asked] == ["mine", None]


@pytest.mark.parametrize("argv", [("update", "a", "--version", "4", "--how", "none"), ("pause", "a")])
def test_a_policy_that_is_held_names_the_flag(cli, daemon, argv):
    """Only where the flag would help: an update that runs ends by itself."""
    daemon.refusal = HELD
    code, _, err = cli("policies", *argv)
    assert code == Exit.FAILED
    assert "is paused by 't1'; if the pause is yours, give its --pause-id (`prorld policies list` shows it)" in err
    daemon.refusal = RUNS
    assert "--pause-id" not in cli("policies", *argv)[2]


def test_to_resume_what_nobody_holds_is_refused(cli, daemon):
    """A matter of state, not of typing; what somebody else holds without showing it is one of typing."""
    code, _, err = cli("policies", "resume", "a")
    assert (code, err) == (Exit.FAILED, "prorld: policy a is not paused: nobody holds it\n")
    code, _, err = cli("policies", "resume", "a", "--json")
    assert (code, json.loads(err)["error"]["code"]) == (Exit.FAILED, "not_paused")
    pause = msgspec.structs.replace(PAUSE, pause_id=None)
    daemon.infos["a"] = PolicyInfo(name="a", version=3, epoch=0, pause=pause)
    code, _, err = cli("policies", "resume", "a")
    assert code == Exit.USAGE
    assert "--pause-id" in err
