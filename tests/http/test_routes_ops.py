"""The routes of operations and of engines, over a real socket."""

from __future__ import annotations

from typing import Any

import pytest

from prorld.wire.ops import Condition, SandboxRow
from tests.http.support import ADMIN, ALICE, BOB


@pytest.fixture
async def client(nursery, world):
    """An admin's connection to a running server."""
    await world.serve(nursery)
    return await world.connect()


async def test_ready_says_what_is_missing(client, world):
    """Ready is 200; not ready is 503, names each cure, and reads as an error as well."""
    assert (await client.call("GET", "/readyz")).json == {"ready": True, "missing": []}
    world.missing.append(Condition(code="no_engine", message="no engine is up", cure="add one"))
    reply = await client.call("GET", "/readyz")
    assert (reply.status, reply.code, reply.headers["retry-after"]) == (503, "not_ready", "1")
    assert reply.json["missing"] == [{"code": "no_engine", "message": "no engine is up", "cure": "add one"}]
    assert reply.json["error"]["message"] == "no engine is up"


async def test_metrics_are_text(client):
    """Prometheus gets its own format, unchanged."""
    reply = await client.call("GET", "/metrics?name[]=x")
    assert (reply.status, reply.body) == (200, b"# HELP x y\nx 1\n")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")


async def test_status_and_handlers(client):
    """What the daemon does and knows."""
    assert (await client.call("GET", "/v1/status")).json["boot_id"] == "boot"
    assert [h["name"] for h in (await client.call("GET", "/v1/handlers")).json["items"]] == ["fake"]


async def test_stages_are_resized_in_part(client):
    """A patch changes what it names; 0 pauses; nonsense changes nothing."""
    reply = await client.call("PATCH", "/v1/stages", {"run": {"workers": 0}, "eval": {"workers": 9}})
    assert {name: stage["workers"] for name, stage in reply.json.items()} == {"init": 2, "run": 0, "eval": 9}
    for wrong in ({"run": {"workers": -1}}, {"runs": {"workers": 1}}, {"run": 3}):
        assert (await client.call("PATCH", "/v1/stages", wrong)).status == 400
    assert (await client.call("GET", "/v1/stages")).json["eval"]["workers"] == 9


async def test_sandboxes_are_shown_to_their_tenants(client, world):
    """An admin sees all of them, a tenant those of its own jobs, even where others have jobs of the same id."""
    for token in (ALICE, BOB):
        await (await world.connect(token)).call("POST", "/v1/jobs", {"job_id": "same", "instance": {}})
    world.sandboxes = [
        SandboxRow(
            sandbox_id=f"s-{tenant}-same", job_id="same", runtime="r", image=None, state="up", age_s=1.0, rss_bytes=1
        )
        for tenant in ("alice", "bob", "gone")
    ]
    seen = {}
    for token in (ADMIN, ALICE, BOB):
        rows = (await (await world.connect(token)).call("GET", "/v1/sandboxes")).json["items"]
        seen[token] = [row["sandbox_id"] for row in rows]
    assert seen[ADMIN] == ["s-alice-same", "s-bob-same", "s-gone-same"]
    assert (seen[ALICE], seen[BOB]) == (["s-alice-same"], ["s-bob-same"])


async def test_drain_refuses_new_jobs_from_then_on(client, world):
    """202 at once; what was accepted goes on."""
    await client.call("POST", "/v1/jobs", {"job_id": "a", "instance": {}})
    reply = await client.call("POST", "/v1/drain")
    assert (reply.status, reply.json) == (202, {"draining": True, "jobs": {"queued": 1}})
    assert (await client.call("POST", "/v1/jobs", {"instance": {}})).status == 503
    assert (await client.call("GET", "/v1/jobs/a")).status == 200


async def test_engines_come_and_go(client):
    """Add, list by policy, drain, remove; a second removal is 404."""
    reply = await client.call("POST", "/v1/backends", {"url": "http://engine:1/", "kind": "vllm", "policy": "p"})
    assert (reply.status, reply.json["backend_id"]) == (201, "b-0")
    assert len((await client.call("GET", "/v1/backends?policy=p")).json["items"]) == 1
    assert (await client.call("GET", "/v1/backends?policy=other")).json["items"] == []
    reply = await client.call("POST", "/v1/backends/b-0/drain")
    assert (reply.status, reply.json["state"]) == (202, "draining")
    reply = await client.call("DELETE", "/v1/backends/b-0")
    assert (reply.status, reply.body) == (204, b"")
    assert (await client.call("DELETE", "/v1/backends/b-0")).status == 404


async def test_a_whole_set_is_replaced(client):
    """200 with what is there now; 409 with the generation that there is; a set of nobody, or of anything, is 400."""
    body = {"policy": "p", "generation": 0, "backends": [{"url": "http://engine:1", "kind": "vllm", "policy": "p"}]}
    reply = await client.call("PUT", "/v1/backends", body)
    assert (reply.status, reply.json["generation"], reply.json["failed"]) == (200, 1, [])
    assert [item["url"] for item in reply.json["items"]] == ["http://engine:1"]
    reply = await client.call("PUT", "/v1/backends", body)
    assert (reply.status, reply.code) == (409, "generation_moved")
    assert reply.json["error"]["details"] == {"generation": 1}
    wrongs: tuple[dict[str, Any], ...] = ({"backends": []}, {"generation": None}, {"removed": "kill"}, {"version": -1})
    for wrong in wrongs:
        assert (await client.call("PUT", "/v1/backends", {**body, **wrong})).status == 400


async def test_an_engine_that_does_not_answer_is_422_with_the_reason(client):
    """The request is fine, the engine is not; the causes are told."""
    reply = await client.call("POST", "/v1/backends", {"url": "http://dead:1/", "kind": "vllm"})
    assert (reply.status, reply.code) == (422, "engine_failed")
    assert "nobody there" in reply.json["error"]["message"]
    assert (await client.call("POST", "/v1/backends", {"url": "http://x:1/", "kind": "abacus"})).status == 400
