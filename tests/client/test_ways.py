"""What holds of every call, whichever way it waits: nothing is duplicated, nothing is lost, every refusal is told."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from prorld.client import ClientError
from prorld.client import http as client_http
from prorld.wire.batches import SubmitBatch
from prorld.wire.jobs import SubmitJob
from tests.certificates import own_certificate
from tests.client.serving import error, serving
from tests.client.test_batches import CLOSING, Unreliable, asked_fields, event, events, group, page, record
from tests.client.test_sync import RECORD
from tests.client.ways import WAYS, run
from tests.daemon.support import until

DONE = {**RECORD, "state": "done"}

pytestmark = pytest.mark.parametrize("way", WAYS)


def sockets():
    """How many of them this process has."""
    names = [entry.readlink() for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return sum(str(name).startswith("socket:") for name in names)


@pytest.fixture
def quick(monkeypatch):
    """Repeats come at once."""
    monkeypatch.setattr("prorld.client.caller._BACKOFF_S", (0.001,))


def test_a_lost_reply_is_asked_for_again_as_the_same_thing(way, quick):
    """Jobs and batches get their ids before they are sent, so a repeat is no second one."""

    async def scenario(client):
        await client.submit(SubmitJob(handler="calc", instance={}))
        await client.submit_batch(SubmitBatch(handler="calc", instances=[{}]))

    with serving(None, (201, RECORD), None, (201, record())) as (address, script):
        run(way, scenario, address, "tok")
    bodies = [json.loads(body) for *_, body in script.asked]
    assert bodies[0] == bodies[1]
    assert bodies[2] == bodies[3]
    assert bodies[0]["job_id"].startswith("job-")
    assert bodies[2]["batch_id"].startswith("batch-")
    assert {headers["Authorization"] for _, _, headers, _ in script.asked} == {"Bearer tok"}


RESCORED = {"n": 1, "job_id": "j", "tenant": "default", "state": "evaluating", "created_at": RECORD["created_at"]}


@pytest.mark.parametrize("was_begun", [True, False])
def test_a_rollout_is_scored_again_once_where_the_answer_is_lost(way, was_begun):
    """Nothing names a repeat, so it is looked up and never sent a second time, on a kept connection either."""
    page_after = (200, {"items": [RESCORED] if was_begun else []})

    async def scenario(client):
        return await client.reevaluate("j")

    with serving((200, {"items": []}), None, page_after) as (address, script):
        if was_begun:
            assert run(way, scenario, address, "tok").n == 1
        else:
            with pytest.raises(ClientError) as caught:
                run(way, scenario, address, "tok")
            assert caught.value.stable_code == "connection_lost"
    assert [method for method, *_ in script.asked] == ["GET", "POST", "GET"]


@pytest.mark.parametrize("status", [429, 503])
def test_a_daemon_without_room_is_asked_again_when_it_says(way, status):
    """The same body, after the time that it names."""
    busy = (status, error("overloaded", retryable=True), {"Retry-After": "0.01"})

    async def scenario(client):
        return await client.submit(SubmitJob(handler="calc", instance={}))

    with serving(busy, busy, (201, RECORD)) as (address, script):
        assert run(way, scenario, address).job_id == "j"
    assert len({body for *_, body in script.asked}) == 1
    assert len(script.asked) == 3


@pytest.mark.parametrize(
    ("answer", "code", "status"),
    [
        ((429, error("overloaded", retryable=True), {"Retry-After": "5"}), "overloaded", 429),
        ((404, error("not_found")), "not_found", 404),
        (None, "connection_lost", None),
        ((200, b"<html>"), "bad_reply", 200),
        ((500, b"oops"), "bad_reply", 500),
    ],
)
def test_what_goes_wrong_is_told(way, answer, code, status):
    """With the daemon's code, or one of the client; without patience, at once."""

    async def scenario(client):
        with pytest.raises(ClientError) as caught:
            await client.get("j")
        return caught.value

    with serving(answer) as (address, script):
        found = run(way, scenario, address, patience_s=0)
    assert (found.stable_code, found.status) == (code, status)
    assert len(script.asked) == 1


def test_nobody_listening_is_told_with_the_cure(way):
    """A refused connection and a socket that is not there are the same to a person: no daemon."""

    async def scenario(client):
        with pytest.raises(ClientError, match="prorld serve") as caught:
            await client.status()
        return caught.value.stable_code

    for address in ("127.0.0.1:1", "unix:/nowhere/at/all"):
        assert run(way, scenario, address, patience_s=0) == "no_daemon"


def test_a_connection_that_died_while_idle_is_replaced_at_once(way):
    """A kept connection that the daemon closed costs the caller nothing, even without patience."""

    async def scenario(client):
        await client.get("j")
        await client.get("j")

    with serving((200, RECORD), None, (200, RECORD)) as (address, script):
        run(way, scenario, address, patience_s=0)
    assert len(script.asked) == 3


def test_unix_sockets_and_tls_serve_as_well(way, tmp_path, monkeypatch):
    """The same calls; a certificate that nobody vouches for is refused before anything is sent."""

    async def twice(client):
        await client.get("j")
        return (await client.get("j")).job_id

    async def refused(client):
        with pytest.raises(ClientError, match="SSL_CERT_FILE") as caught:
            await client.get("j")
        return caught.value.may_retry

    with serving((200, RECORD), (200, RECORD), unix=tmp_path / "s") as (address, _):
        assert run(way, twice, address) == "j"
    certificate, context = own_certificate(tmp_path)
    with serving((200, RECORD), (200, RECORD), tls=context) as (address, script):
        assert run(way, refused, address, "tok") is False
        assert script.asked == []
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert run(way, twice, address, "tok") == "j"


def test_a_reply_without_end_is_cut_off(way, monkeypatch):
    """A reply over the bound is refused."""
    monkeypatch.setattr(client_http, "REPLY_BYTES_MAX", 1000)

    async def scenario(client):
        with pytest.raises(ClientError, match="larger"):
            await client.get("j")

    with serving((200, b"x" * 5000)) as (address, _):
        run(way, scenario, address)


def test_a_server_that_never_answers_is_given_up(way, monkeypatch):
    """Every request has an end in time."""
    monkeypatch.setattr("prorld.client.jobs.REQUEST_S", 0.1)

    async def scenario(client):
        with pytest.raises(ClientError, match="in time"):
            await client.events("j")

    with socket.create_server(("127.0.0.1", 0)) as silent:
        run(way, scenario, f"127.0.0.1:{silent.getsockname()[1]}", patience_s=0)


@pytest.mark.parametrize("seed", range(3))
def test_groups_come_once_and_in_order_whatever_happens(way, quick, seed):
    """Cut connections, a daemon that closes, pages that overlap; and each is acknowledged before the next is asked."""
    daemon = Unreliable(seed, total=12)

    async def scenario(client):
        seen: list[int] = []
        async for found in client.groups("b", after=0, ack=True):
            assert sorted(set(daemon.acks)) == seen
            seen.append(found.seq)
        return seen

    with serving(daemon) as (address, _):
        assert run(way, scenario, address, patience_s=0) == [found.seq for found in daemon.groups]


def test_a_wait_for_a_group_ends_when_the_caller_says(way):
    """It is told apart from the end of the batch, and the same call goes on later."""

    async def scenario(client):
        seen = []

        async def read(after):
            async for found in client.groups("b", after=after, within_s=0):
                seen.append(found.seq)  # noqa: PERF401 - it does not come to its end

        with pytest.raises(ClientError) as caught:
            await read(0)
        assert caught.value.stable_code == "nothing_new"
        await read(1)
        return seen

    with serving(page(group(1)), page(), page(group(2), is_over=True)) as (address, _):
        assert run(way, scenario, address) == [1, 2]


def test_events_are_followed_to_the_end(way, quick):
    """By number, over everything that happens to the daemon; ``batch.end`` is the last."""
    end = events(event(2, "group.done"), event(3, "batch.end"), event(4, "never"))

    async def scenario(client):
        return [one.seq async for one in client.batch_events("b")]

    with serving(events(event(1, "batch.wants"), event(2, "group.done")), None, CLOSING, end) as (address, script):
        assert run(way, scenario, address, patience_s=0) == [1, 2, 3]
    assert [asked_fields(path)["after"] for _, path, *_ in script.asked] == ["0", "2", "2", "2"]


def test_a_daemon_that_comes_back_elsewhere_is_found(way, tmp_path, quick, monkeypatch):
    """It writes its new address, and its new token, into its state directory; the iteration goes on there."""
    monkeypatch.delenv("PRORLD_ADDRESS", raising=False)
    monkeypatch.delenv("PRORLD_TOKEN", raising=False)

    def lives_at(address, token):
        words = {"address": address, "pid": 1, "version": "0", "boot_id": token, "started_at": "2026-01-01T00:00:00Z"}
        (tmp_path / "endpoint.json").write_text(json.dumps(words))
        (tmp_path / "token").write_text(token)
        (tmp_path / "token").chmod(0o600)

    with serving(page(group(2), is_over=True)) as (second, script):

        async def scenario(client):
            seen = []
            async for found in client.groups("b", after=0):
                seen.append(found.seq)
                lives_at(second, "two")
            return seen

        def gone(*_):
            return None

        with serving(page(group(1)), gone) as (first, _):
            lives_at(first, "one")
            assert run(way, scenario, state_dir=tmp_path, patience_s=0) == [1, 2]
    assert script.asked[0][2]["Authorization"] == "Bearer two"


def test_rollouts_run_at_once_and_come_in_their_order(way, quick):
    """All are handed in before the first is waited for; a reply that was lost is asked for again."""
    answers = [(201, RECORD), None, (201, RECORD), (200, RECORD), (200, DONE), None, (200, {**DONE, "job_id": "k"})]

    async def scenario(client):
        jobs = [SubmitJob(job_id="j", handler="calc", instance={}), SubmitJob(handler="calc", instance={})]
        return [found.record.job_id async for found in client.rollouts(jobs, trajectories=False)]

    with serving(*answers) as (address, script):
        assert run(way, scenario, address, patience_s=0) == ["j", "k"]
    posted = [json.loads(body)["job_id"] for method, _, _, body in script.asked if method == "POST"]
    assert posted[0] == "j"
    assert posted[1] == posted[2]
    assert len(script.asked) == 7


def test_no_descriptor_is_left(way, quick):
    """Not of calls that went well, nor of any that failed in whatever way."""
    answers = [(200, RECORD), None, (503, error("closing")), (200, b"<html>"), (200, RECORD)]

    async def scenario(client):
        for _ in answers:
            try:
                await client.get("j")
            except ClientError:
                continue

    with serving(*answers, lambda *_: (200, RECORD)) as (address, _):
        before = sockets()
        run(way, scenario, address, patience_s=0)
        # The other end is of this process, too, and closes when it hears of it.
        until(lambda: sockets() <= before, 10, "its sockets are closed")


def test_imports_are_light(way):
    """Neither an event loop nor arrays are imported with the client; the asynchronous one brings anyio when used."""
    heavy = {"trio", "asyncio", "anyio", "h11", "numpy", "torch"}
    more = "" if way == "sync" else "; prorld.client.AsyncClient"
    code = f"import sys, prorld.client{more}; print(*sorted({heavy!r} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ({"trio", "numpy", "torch"} if more else heavy).isdisjoint(found.stdout.split())
    assert ("anyio" in found.stdout) is bool(more)
