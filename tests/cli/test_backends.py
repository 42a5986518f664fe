"""``prorld backends``: what is typed becomes the call that it says, and the answer is readable and says what failed."""

from __future__ import annotations

import json
from typing import Any, Self

import pytest

from prorld.cli import backends
from prorld.cli.exits import Exit
from prorld.client import ClientError
from prorld.wire.ops import (
    AddBackend,
    BackendInfo,
    BackendList,
    BackendSet,
    FailedBackend,
    SetBackends,
)


class Daemon:
    """A daemon's engines, as the client sees them; an address with ``dead`` in it fails its probe."""

    def __init__(self) -> None:
        self.rows: list[BackendInfo] = []
        self.asked: list[Any] = []
        self.refusal: ClientError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def row(self, url: str, **fields: Any) -> BackendInfo:
        """One more engine."""
        made = BackendInfo(
            backend_id=f"b-{len(self.rows) + 1}", url=url, kind="vllm", policy="default", state="up",
            model="smol\x1b[2J", max_context_tokens=4096, **fields,
        )  # fmt: skip
        self.rows.append(made)
        return made

    def backends(self, policy: str | None = None) -> BackendList:
        self.asked.append(policy)
        return BackendList(items=self.rows, generation=len(self.rows))

    def add_backend(self, request: AddBackend) -> BackendInfo:
        self.asked.append(request)
        return self.row(request.url)

    def replace_backends(self, wanted: SetBackends) -> BackendSet:
        self.asked.append(wanted)
        if self.refusal is not None:
            raise self.refusal
        self.rows = []
        failed = [
            FailedBackend(url=b.url, code="engine_unreachable", message="no")
            for b in wanted.backends
            if "dead" in b.url
        ]
        for engine in wanted.backends:
            if "dead" not in engine.url:
                self.row(engine.url)
        return BackendSet(policy=wanted.policy, generation=9, items=self.rows, failed=failed, removed=["b-1"])

    def drain_backend(self, backend_id: str) -> BackendInfo:
        self.asked.append(backend_id)
        return self.rows[0]

    def remove_backend(self, backend_id: str) -> None:
        self.asked.append(backend_id)


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Daemon:
    """In the place of a real one."""
    made = Daemon()
    monkeypatch.setattr(backends, "client_of", lambda _args: made)
    return made


def test_the_list_shows_load_limit_and_cached_share(cli, daemon):
    """For people and for scripts; what an engine calls itself can't steer the terminal."""
    daemon.row(
        "http://a:1", leases=3, inflight=2, call_limit=32, queued=5, calls_total=70, errors_total=1,
        tokens_prompted_total=200, tokens_cached_total=150, version=4,
    )  # fmt: skip
    code, out, _ = cli("backends", "list", "--policy", "default")
    head, row, end = out.splitlines()
    assert (code, daemon.asked, end) == (0, ["default"], "generation 1")
    assert dict(zip(head.split(), row.split(), strict=True)) == {
        "ENGINE": "b-1", "POLICY": "default", "KIND": "vllm", "STATE": "up", "JOBS": "3", "CALLS": "2/32", "WAIT": "5",
        "DONE": "70", "FAILED": "1", "CACHED": "75%", "VERSION": "4", "MODEL": "smol\\x1b[2J", "URL": "http://a:1",
    }  # fmt: skip
    assert cli("backends", "--policy", "default")[1] == out
    # What stands before the action belongs to it; a word that is an option's value is no action.
    assert cli("backends", "--policy", "default", "list")[1] == out
    cli("backends", "--policy", "add")
    assert daemon.asked[-1] == "add"
    code, out, _ = cli("backends", "list", "--json")
    assert json.loads(out)["items"][0]["call_limit"] == 32


def test_an_empty_list_says_what_to_do(cli, daemon):
    """Nobody is left with a blank page."""
    code, out, _ = cli("backends", "list")
    assert code == 0
    assert "backends add" in out


def test_one_is_added_drained_and_removed(cli, daemon):
    """With the settings that were typed."""
    flags = ("--max-inflight", "8", "--weight", "2", "--node", "n1", "--policy", "p", "--model", "m")
    assert cli("backends", "add", "vllm=http://a:1", *flags)[0] == 0
    assert cli("backends", "drain", "b-1")[0] == 0
    assert cli("backends", "remove", "b-1")[0] == 0
    wanted = AddBackend(url="http://a:1", kind="vllm", policy="p", model="m", max_inflight=8, weight=2.0, node="n1")
    assert daemon.asked == [wanted, "b-1", "b-1"]


def test_a_set_takes_the_generation_that_there_is_or_the_one_that_is_named(cli, daemon):
    """And tells who is there, who went, and what failed, by exit code too."""
    daemon.row("http://old:1")
    code, out, _ = cli("backends", "set", "vllm=http://a:1", "vllm=http://b:1", "--removed", "migrate")
    assert (code, daemon.asked[-1].generation, daemon.asked[-1].removed) == (0, 1, "migrate")
    assert [line.split()[0] for line in out.splitlines()] == ["ENGINE", "b-1", "b-2", "generation", "removed:"]
    code, out, _ = cli(
        "backends", "set", "vllm=http://dead:1", "vllm=http://b:1", "--generation", "7", "--version", "3"
    )
    assert (code, daemon.asked[-1].generation, daemon.asked[-1].version) == (Exit.FAILED, 7, 3)
    assert "failed: http://dead:1: no (engine_unreachable)" in out


def test_a_set_that_is_refused_says_what_each_engine_lacks(cli, daemon):
    """For people every one with its reason, which can't steer the terminal; for scripts the details as they came."""
    rows = [
        {"url": "http://a:1", "code": "engine_unreachable", "message": "refused\x1b[2J"},
        {"url": "http://b:1", "code": "model_differs", "message": "serves other"},
    ]
    daemon.refusal = ClientError("none could be taken", code="no_backend", status=503, details={"failed": rows})
    code, _, err = cli("backends", "set", "vllm=http://a:1", "vllm=http://b:1")
    assert code == Exit.FAILED
    assert err.splitlines() == [
        "prorld: none could be taken",
        "failed: http://a:1: refused\\x1b[2J (engine_unreachable)",
        "failed: http://b:1: serves other (model_differs)",
    ]
    _, _, err = cli("backends", "set", "vllm=http://a:1", "--json")
    assert json.loads(err)["error"]["details"] == {"failed": rows}


def test_a_set_by_an_old_list_tells_the_generation(cli, daemon):
    """The one that there is, from the details; what the daemon says beside it is its own affair."""
    daemon.refusal = ClientError("changed", code="generation_moved", status=409, details={"generation": 12})
    code, _, err = cli("backends", "set", "vllm=http://a:1", "--generation", "7")
    assert (code, err.splitlines()[1].split(":")[0]) == (Exit.FAILED, "generation 12")


def test_a_set_under_a_pause_can_name_it(cli, daemon):
    """And is told how where it did not."""
    daemon.refusal = ClientError("paused by 'x'", code="policy_busy", status=409, details={"holder": "x"})
    _, _, err = cli("backends", "set", "vllm=http://a:1")
    assert "give its --pause-id" in err
    daemon.refusal = None
    assert cli("backends", "set", "vllm=http://a:1", "--pause-id", "p-1")[0] == 0
    assert daemon.asked[-1].pause_id == "p-1"


def test_what_is_no_engine_is_a_usage_error(cli, daemon):
    """Before anybody is asked."""
    assert cli("backends", "add", "abacus=http://a:1")[0] == Exit.USAGE
    assert daemon.asked == []
