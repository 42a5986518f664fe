"""The synchronous client against a small real HTTP server."""

from __future__ import annotations

import json
import socket

import msgspec
import pytest

from prorld.client import Client, ClientError
from prorld.client import http as client_http
from prorld.client.find import Target, parse_address
from prorld.client.flows import Ask
from prorld.domain.job import Timing
from prorld.wire.jobs import JobRecord, SubmitJob
from tests.certificates import own_certificate
from tests.client.serving import error, serving

RECORD = {
    "job_id": "j",
    "handler": "calc",
    "policy": "default",
    "tenant": "default",
    "state": "queued",
    "timing": msgspec.to_builtins(Timing()),
    "created_at": "2026-01-01T00:00:00Z",
}


def refused(client):
    """The error of a call that must not succeed."""
    with pytest.raises(ClientError) as caught:
        client.get("j")
    return caught


def test_a_job_is_submitted_with_an_id_and_the_token():
    """Every submit carries an id, so that a repeat is the same job; the token goes in the header."""
    with serving((201, RECORD)) as (address, script), Client(address, "tok") as client:
        record = client.submit(SubmitJob(handler="calc", instance={"a": 1}))
    method, path, headers, body = script.asked[0]
    sent = json.loads(body)
    assert isinstance(record, JobRecord)
    assert (method, path, headers["Authorization"]) == ("POST", "/v1/jobs", "Bearer tok")
    assert sent["job_id"].startswith("job-")
    assert sent["instance"] == {"a": 1}


def test_the_connection_is_kept_over_calls():
    """Calls reuse one connection."""
    with serving((200, RECORD), (200, RECORD), (200, RECORD)) as (address, _), Client(address) as client:
        client.get("j")
        kept = client._transport._connection
        client.get("j")
        client.get("j")
        assert client._transport._connection is kept


def test_a_connection_that_died_while_idle_is_replaced_at_once():
    """A kept connection that the daemon closed costs the caller nothing, even without patience."""
    with serving((200, RECORD), None, (200, RECORD)) as (address, script), Client(address, patience_s=0) as client:
        client.get("j")
        client.get("j")
    assert len(script.asked) == 3


def test_a_fresh_connection_that_is_cut_is_an_error():
    """Nobody answers twice: the error says so, and that trying again may help."""
    with (
        serving(None, None) as (address, script),
        Client(address, patience_s=0) as client,
        pytest.raises(ClientError) as caught,
    ):
        client.get("j")
    assert (caught.value.stable_code, caught.value.may_retry) == ("connection_lost", True)
    assert len(script.asked) == 1


def test_an_overloaded_daemon_is_asked_again_with_the_same_job():
    """A refusal that is worth a repeat is repeated, after the time the daemon names, with the same body."""
    busy = (503, error("overloaded", retryable=True), {"Retry-After": "0.01"})
    with serving(busy, busy, (201, RECORD)) as (address, script), Client(address) as client:
        client.submit(SubmitJob(handler="calc", instance={}))
    assert len(script.asked) == 3
    assert len({body for *_, body in script.asked}) == 1


def test_without_patience_an_overloaded_daemon_is_told_at_once():
    """The caller decides how long to go on trying."""
    busy = (429, error("overloaded", retryable=True), {"Retry-After": "5"})
    with serving(busy) as (address, _), Client(address, patience_s=0) as client, pytest.raises(ClientError) as caught:
        client.submit(SubmitJob(handler="calc", instance={}))
    assert (caught.value.status, caught.value.retry_after_s) == (429, 5.0)


def test_a_refusal_is_not_repeated():
    """What can't succeed is asked once, and the daemon's words reach the caller."""
    with (
        serving((404, error("not_found", message="no such job"))) as (address, script),
        Client(address) as client,
        pytest.raises(ClientError, match="no such job") as caught,
    ):
        client.get("j")
    assert (caught.value.stable_code, caught.value.status) == ("not_found", 404)
    assert len(script.asked) == 1


@pytest.mark.parametrize("answer", [(200, b"<html>"), (200, {"job_id": 3}), (500, b"oops"), (200, b"\xff")])
def test_an_answer_of_something_else_is_a_clear_error(answer):
    """A body that is not the contract's is never taken for data."""
    with serving(answer) as (address, _), Client(address) as client, pytest.raises(ClientError) as caught:
        client.get("j")
    assert caught.value.stable_code == "bad_reply"


def test_wait_polls_until_the_job_is_done():
    """A wait is as many long-polls as it takes."""
    done = {**RECORD, "state": "done"}
    with serving((200, RECORD), (200, RECORD), (200, done)) as (address, script), Client(address) as client:
        assert client.wait("j").state == "done"
    assert all("wait_s=30" in path for _, path, *_ in script.asked)


def test_wait_gives_the_record_as_it_is_when_its_time_is_over():
    """A bounded wait ends in time with what is known."""
    with serving((200, RECORD)) as (address, _), Client(address) as client:
        assert client.wait("j", within_s=0).state == "queued"


def test_ids_and_filters_are_quoted():
    """What a caller passes can't change the path or the query."""
    with serving((200, RECORD), (200, {"items": [], "next": None})) as (address, script), Client(address) as client:
        client.get("a/../b?c")
        client.list(group_id="g&state=done", limit=3)
    assert script.asked[0][1] == "/v1/jobs/a%2F..%2Fb%3Fc"
    assert script.asked[1][1] == "/v1/jobs?group_id=g%26state%3Ddone&limit=3"


def test_readyz_is_read_though_it_answers_503():
    """Not ready is an answer, not an error."""
    body = {"ready": False, "missing": [{"code": "no_engine", "message": "m", "cure": "c"}]}
    with serving((503, body)) as (address, _), Client(address) as client:
        assert [item.code for item in client.ready().missing] == ["no_engine"]


def test_cancel_many_counts():
    """Cancelling several names them and gives the number on their way out."""
    with serving((202, {"cancelling": 2})) as (address, script), Client(address) as client:
        assert client.cancel_many(job_ids=["a", "b"], reason="r") == 2
    assert json.loads(script.asked[0][3]) == {"job_ids": ["a", "b"], "reason": "r"}


def test_a_unix_socket_serves_as_well(tmp_path):
    """The client talks to a daemon on a Unix socket."""
    with serving((200, RECORD), (200, RECORD), unix=tmp_path / "s") as (address, _), Client(address) as client:
        assert client.get("j").job_id == "j"
        assert client.get("j").job_id == "j"


def test_a_daemon_behind_tls_is_spoken_to_where_it_is_trusted(tmp_path, monkeypatch):
    """By the authority that the machine, or the caller, names; another one is told at once, with the cure."""
    certificate, context = own_certificate(tmp_path)
    with serving((200, RECORD), (200, RECORD), tls=context) as (address, script):
        with Client(address, "tok") as client:
            caught = refused(client)
        assert (caught.value.stable_code, caught.value.may_retry) == ("connection_lost", False)
        assert "SSL_CERT_FILE" in caught.value.message
        # Nor is it waited for where a lost answer would be.
        with Client(address, "tok", patience_s=3600) as client, pytest.raises(ClientError, match="SSL_CERT_FILE"):
            client.remove_backend("b-1")
        assert script.asked == []
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        with Client(address, "tok") as client:
            assert client.get("j").job_id == "j"
            assert client.get("j").job_id == "j"


def test_nobody_listening_is_told_with_the_cure():
    """A refused connection and a socket that is not there are the same to a person: no daemon."""
    for address in ("127.0.0.1:1", "unix:/nowhere/at/all"):
        with Client(address, patience_s=0) as client, pytest.raises(ClientError, match="prorld serve") as caught:
            client.status()
        assert caught.value.stable_code == "no_daemon"


def test_a_reply_without_end_is_cut_off(monkeypatch):
    """A reply over the bound is refused."""
    monkeypatch.setattr(client_http, "REPLY_BYTES_MAX", 1000)
    with (
        serving((200, b"x" * 5000)) as (address, _),
        Client(address) as client,
        pytest.raises(ClientError, match="larger"),
    ):
        client.get("j")


def test_a_server_that_never_answers_is_given_up():
    """Every request has an end in time."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = Target(parse_address(f"127.0.0.1:{silent.getsockname()[1]}"), None)
        transport = client_http.Transport()
        with pytest.raises(ClientError, match="in time"):
            transport.request(Ask(target, "GET", "/", None, 0.1, client_http.JSON))
        transport.close()


def test_an_interrupted_exchange_leaves_nothing_for_the_next(monkeypatch):
    """After Ctrl-C in the middle of a reply the next call gets its own reply on a new connection."""

    def interrupted(response, until):
        raise KeyboardInterrupt

    first = {**RECORD, "job_id": "first"}
    with serving((200, first), (200, RECORD)) as (address, _), Client(address) as client:
        with monkeypatch.context() as patch:
            patch.setattr(client._transport, "_body", interrupted)
            with pytest.raises(KeyboardInterrupt):
                client.get("first")
        assert client._transport._connection is None
        assert client.get("j").job_id == "j"


def test_a_refused_token_says_where_it_came_from(monkeypatch):
    """Whoever has several tokens learns which one was sent; whoever has none, how to give one."""
    refusal = {"error": {"code": "unknown_token", "message": "this token is not known", "retryable": False}}
    with serving((401, refusal), (401, refusal), (401, refusal)) as (address, _):
        for token, variable, words in (
            ("t", "", "the one given"),
            (None, "v", "$PRORLD_TOKEN"),
            (None, "", "no token"),
        ):
            monkeypatch.setenv("PRORLD_TOKEN", variable)
            with Client(address, token) as client, pytest.raises(ClientError) as caught:
                client.status()
            assert words in caught.value.message
            assert (caught.value.stable_code, caught.value.status) == ("unknown_token", 401)


@pytest.mark.parametrize(
    ("how", "path", "words"),
    [
        ("reload", "weights/3", "path must be an absolute path, and not 'weights/3'"),
        ("lora", None, "path is missing: 'lora' loads weights from it"),
        ("none", "/weights/3", "path names the weights of reload and lora"),
    ],
)
def test_a_path_of_weights_that_is_wrong_is_told_in_words(how, path, words):
    """Before the daemon is asked."""
    with Client("127.0.0.1:1", "t") as client, pytest.raises(ClientError, match=words) as caught:
        client.update_policy("default", 3, how, path=path)
    assert caught.value.stable_code == "bad_input"
