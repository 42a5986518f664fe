"""The routes of policies over a real socket: who may, what is refused, what is waited for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from prorld.testing.fake_backend import FakeBackend
from prorld.testing.scripted_engine.script import Latency, Script
from tests.http.live import LiveWorld, live_world
from tests.http.raw_client import until
from tests.http.support import ADMIN, ALICE, BOB, READER

DEFAULT = "/v1/policies/default"
RELOAD = {"version": 1, "how": "reload", "path": "/weights"}


@pytest.fixture
async def world() -> AsyncIterator[LiveWorld]:
    """A daemon with one engine that takes a moment to load weights."""
    backend = FakeBackend(Script(turns=["hello"], latency=Latency(reload_s=0.2)))
    async with live_world(room_options={"backends": [backend]}) as made:
        yield made


async def test_an_update_is_waited_for(world: LiveWorld) -> None:
    """202 at once, then the same by its id; a repeat is the same one, another body is refused."""
    client = await world.connect(ALICE)
    begun = await client.call("POST", f"{DEFAULT}/updates", RELOAD)
    assert (begun.status, begun.json["state"], begun.json["ended_at"]) == (202, "running", None)
    update_id = begun.json["update_id"]
    listed = await client.call("GET", DEFAULT)
    assert listed.json["update"]["update_id"] == update_id
    ended = await client.call("GET", f"{DEFAULT}/updates/{update_id}?wait_s=10")
    assert (ended.status, ended.json["state"]) == (200, "done")
    assert ended.json["backends"] == [{"id": "b-1", "version": 1, "ok": True, "error": None, "code": None}]
    again = await client.call("POST", f"{DEFAULT}/updates", {**RELOAD, "mode": "abort"})
    assert (again.status, again.json["update_id"]) == (202, update_id)
    other = await client.call("POST", f"{DEFAULT}/updates", {**RELOAD, "path": "/other"})
    assert (other.status, other.code) == (409, "version_too_low")
    assert other.json["error"]["details"] == {"version": 1, "epoch": 0}
    assert [item["update_id"] for item in (await client.call("GET", f"{DEFAULT}/updates")).json["items"]] == [update_id]
    (engine,) = world.room.pool.list().items
    assert (engine.version, engine.state) == (1, "up")


async def test_an_update_outlives_its_client(world: LiveWorld) -> None:
    """The connection is cut right after the request."""
    client = await world.connect(ALICE)
    await client.send("POST", f"{DEFAULT}/updates", RELOAD)
    await until(lambda: world.room.policies.get("default", None).update is not None)
    client.stream.socket.close()
    await until(lambda: world.room.policies.get("default", None).version == 1)


async def test_a_pause_has_a_holder(world: LiveWorld) -> None:
    """Others see who it is and not the id; an admin sees it, and may resume."""
    alice, bob, admin = [await world.connect(token) for token in (ALICE, BOB, ADMIN)]
    paused = await alice.call("POST", f"{DEFAULT}/pause", {"mode": "keep", "timeout_s": 5})
    pause_id = paused.json["pause_id"]
    seen = {
        name: (await client.call("GET", DEFAULT)).json["pause"]
        for name, client in (("alice", alice), ("bob", bob), ("admin", admin))
    }
    assert {name: view["pause_id"] for name, view in seen.items()} == {
        "alice": pause_id, "bob": None, "admin": pause_id,
    }  # fmt: skip
    assert {view["holder"] for view in seen.values()} == {"alice"}
    theirs: list[tuple[str, Any]] = [
        ("pause", {"mode": "abort"}),
        ("updates", RELOAD),
        ("resume", {"pause_id": "guessed", "version": 1}),
    ]
    for target, wish in theirs:
        refused = await bob.call("POST", f"{DEFAULT}/{target}", wish)
        assert (refused.status, refused.code) == (409, "policy_busy")
        assert pause_id not in refused.body.decode()
    busy = await admin.call("PUT", DEFAULT, {"model": "m"})
    assert (busy.status, busy.code) == (409, "policy_busy")
    assert (await admin.call("PUT", DEFAULT, {"model": "m", "pause_id": pause_id})).status == 200
    resumed = await admin.call("POST", f"{DEFAULT}/resume", {"pause_id": pause_id, "version": 1})
    assert (resumed.status, resumed.json["backends"][0]["ok"]) == (200, True)
    late = await alice.call("POST", f"{DEFAULT}/resume", {"pause_id": pause_id, "version": 2})
    assert (late.status, late.code) == (409, "not_paused")


@pytest.mark.parametrize(
    ("target", "body", "path"),
    [
        ("updates", {**RELOAD, "path": "relative"}, "$.path"),
        ("updates", {**RELOAD, "path": "/" + "x" * 5000}, "$.path"),
        ("updates", {**RELOAD, "path": "/a\u0000b"}, "$.path"),
        ("updates", {"version": 1, "how": "reload"}, "$"),
        ("updates", {"version": 1, "how": "none", "path": "/w"}, "$"),
        ("updates", {**RELOAD, "version": -1}, "$.version"),
        ("updates", {**RELOAD, "version": "1"}, "$.version"),
        ("updates", {**RELOAD, "how": "magic"}, "$.how"),
        ("updates", {**RELOAD, "backends": []}, "$.backends"),
        ("pause", {"mode": "stop"}, "$.mode"),
        ("pause", {"mode": "wait", "timeout_s": 1e9}, "$.timeout_s"),
        ("resume", {"version": 1}, "$"),
    ],
)
async def test_nonsense_is_refused(world: LiveWorld, target: str, body: object, path: str) -> None:
    """With the path of the field, and nothing is changed."""
    client = await world.connect(ALICE)
    refused = await client.call("POST", f"{DEFAULT}/{target}", body)
    assert (refused.status, refused.json["error"].get("details", {}).get("path")) == (400, path)
    assert (await client.call("GET", DEFAULT)).json["pause"] is None


async def test_what_can_t_be_done_says_so(world: LiveWorld) -> None:
    """Memory of engines, engines that are not there, tokenizers that can't be loaded, policies that are not there."""
    admin = await world.connect()
    refusals: list[tuple[str, str, Any, int, str]] = [
        ("POST", f"{DEFAULT}/pause", {"mode": "keep", "release": ["weights"]}, 422, "release_unsupported"),
        ("POST", f"{DEFAULT}/updates", {**RELOAD, "backends": ["b-9"]}, 422, "unknown_backend"),
        ("PUT", "/v1/policies/mine", {"tokenizer": "/nothing/here"}, 422, "no_tokenizer"),
        ("PUT", "/v1/policies/mine", {"renderer": "crayon"}, 422, "renderer_refused"),
        ("PUT", "/v1/policies/%2e%2e", {}, 400, "invalid_field"),
        ("POST", "/v1/policies/mine/pause", {"mode": "keep"}, 404, "unknown_policy"),
        ("POST", "/v1/policies/mine/updates", RELOAD, 404, "unknown_policy"),
        ("GET", f"{DEFAULT}/updates/u-1", None, 404, "unknown_update"),
        ("POST", "/v1/jobs", {"handler": "fake", "instance": {}, "policy": "mine"}, 422, "unknown_policy"),
    ]
    for method, target, body, status, code in refusals:
        reply = await admin.call(method, target, body)
        assert (reply.status, reply.code) == (status, code), target
    assert (await admin.call("GET", "/v1/policies/mine")).status == 404
    assert (await admin.call("PUT", "/v1/policies/mine", {})).status == 201
    job = await admin.call("POST", "/v1/jobs", {"handler": "fake", "instance": {}, "policy": "mine"})
    assert job.status == 201


async def test_who_may(world: LiveWorld) -> None:
    """Trainers change weights, admins make policies, readers look."""
    alice, reader = await world.connect(ALICE), await world.connect(READER)
    made = await alice.call("PUT", "/v1/policies/mine", {})
    assert (made.status, made.code) == (403, "admin_only")
    assert (await reader.call("GET", "/v1/policies")).status == 200
    wishes: list[tuple[str, Any]] = [("pause", {"mode": "keep"}), ("updates", RELOAD)]
    for target, body in wishes:
        refused = await reader.call("POST", f"{DEFAULT}/{target}", body)
        assert (refused.status, refused.code) == (403, "read_only")


async def test_a_job_says_how_old_it_may_get(world: LiveWorld) -> None:
    """``max_staleness`` of a job: a number, or null for no limit."""
    client = await world.connect(ALICE)
    limits: list[tuple[Any, int]] = [(0, 201), (None, 201), (-1, 400), ("1", 400)]
    for limit, status in limits:
        body = {"handler": "fake", "instance": {}, "max_staleness": limit}
        assert (await client.call("POST", "/v1/jobs", body)).status == status


async def test_a_wait_ends_when_its_time_is_over(world: LiveWorld) -> None:
    """With the update as it is then."""
    client = await world.connect(ALICE)
    with trio.fail_after(10):
        begun = await client.call("POST", f"{DEFAULT}/updates", RELOAD)
        found = await client.call("GET", f"{DEFAULT}/updates/{begun.json['update_id']}?wait_s=0.01")
    assert found.json["state"] == "running"
