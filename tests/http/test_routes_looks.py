"""The routes of second looks, of requeueing and of the tree of tasks: statuses, tenants, roles."""

from __future__ import annotations

import pytest
import trio

from tests.http.live import live_world
from tests.http.raw_client import until
from tests.http.support import ALICE, BOB, READER

JOB = {"job_id": "a", "handler": "fake", "instance": {}}


@pytest.fixture
async def alice(nursery, world):
    """A trainer with an ended job."""
    await world.serve(nursery)
    client = await world.connect(ALICE)
    await client.call("POST", "/v1/jobs", JOB)
    world.service.find("a", None).finish()
    return client


async def test_reevaluations_are_numbered_listed_waited_for_and_cancelled(alice, world):
    """202 with a record; newest first; a long poll ends with it; cancel is 202; a number that is none is 404."""
    reply = await alice.call("POST", "/v1/jobs/a/reevaluate", {"reason": "why"})
    assert (reply.status, reply.json["n"], reply.json["reason"]) == (202, 1, "why")
    assert (await alice.call("POST", "/v1/jobs/a/reevaluate")).json["n"] == 2
    assert [r["n"] for r in (await alice.call("GET", "/v1/jobs/a/reevaluations")).json["items"]] == [2, 1]
    await alice.send("GET", "/v1/jobs/a/reevaluations/2?wait_s=30")
    await until(lambda: len(world.app.holds) == 1)
    other = await world.connect(ALICE)
    assert (await other.call("POST", "/v1/jobs/a/reevaluations/2/cancel", {"reason": "no"})).status == 202
    assert (await alice.reply()).json["state"] == "done"
    for n in ("9", "x", "-1", "1.0", "9" * 40):
        reply = await alice.call("GET", f"/v1/jobs/a/reevaluations/{n}")
        assert (reply.status, reply.code) == (404, "unknown_reevaluation"), n


async def test_a_share_that_is_used_up_is_429(alice):
    """The daemon has room, the caller has not: 429 with Retry-After, and 503 is kept for the daemon's own state."""
    for _ in range(3):
        assert (await alice.call("POST", "/v1/jobs/a/reevaluate")).status == 202
    reply = await alice.call("POST", "/v1/jobs/a/reevaluate")
    assert (reply.status, reply.code, reply.headers["retry-after"]) == (429, "too_many", "3")
    assert reply.json["error"]["retryable"] is True


@pytest.mark.parametrize("verb", ["verify", "reevaluations", "reevaluations/1"])
async def test_looks_are_for_their_tenant(alice, world, verb):
    """Another tenant's job is not there; a reader of the same tenant may look and not act."""
    await alice.call("POST", "/v1/jobs/a/reevaluate")
    bob, reader = await world.connect(BOB), await world.connect(READER)
    assert (await bob.call("GET", f"/v1/jobs/a/{verb}")).status == 404
    assert (await reader.call("GET", f"/v1/jobs/a/{verb}")).status == 200
    for act in ("reevaluate", "requeue", "reevaluations/1/cancel"):
        assert (await bob.call("POST", f"/v1/jobs/a/{act}")).status == 404
        assert (await reader.call("POST", f"/v1/jobs/a/{act}")).code == "read_only"


async def test_scoring_again_is_asked_for_by_parameters(alice):
    """Those that make no sense are refused by name before anything is scored."""
    for query in ("rescore=true", "rescore=false", "rescore=true&tolerance=0&tolerance_max=2.5"):
        assert (await alice.call("GET", f"/v1/jobs/a/verify?{query}")).status == 200
    for query, name in (
        ("rescore=maybe", "rescore"),
        ("tolerance=-1", "tolerance"),
        ("tolerance_max=x", "tolerance_max"),
    ):
        reply = await alice.call("GET", f"/v1/jobs/a/verify?{query}")
        assert (reply.status, reply.json["error"]["details"]["path"]) == (400, f"$.{name}")
    assert (await alice.call("GET", "/v1/jobs/a/verify?rescored=true")).code == "unknown_parameter"


async def test_requeue_is_201_then_200(alice):
    """With an id of the client the call may be repeated; an id that is no id is refused by name."""
    assert (await alice.call("POST", "/v1/jobs/a/requeue", {"job_id": "b"})).status == 201
    assert (await alice.call("POST", "/v1/jobs/a/requeue", {"job_id": "b"})).status == 200
    assert (await alice.call("POST", "/v1/jobs/a/requeue")).status == 201
    for wrong in ("../x", "cancel", ""):
        reply = await alice.call("POST", "/v1/jobs/a/requeue", {"job_id": wrong})
        assert (reply.status, reply.json["error"]["details"]["path"]) == (400, "$.job_id")


async def test_the_tree_of_tasks_is_for_admins(alice, world):
    """It shows everybody's jobs."""
    assert (await alice.call("GET", "/v1/debug/tasks")).code == "admin_only"
    admin = await world.connect()
    assert (await admin.call("GET", "/v1/debug/tasks")).json["root"]["name"] == "root"


async def test_a_word_that_is_a_verb_is_no_job(alice):
    """``/v1/jobs/cancel`` takes POST alone, and no job may be called so."""
    reply = await alice.call("GET", "/v1/jobs/cancel")
    assert (reply.status, reply.headers["allow"]) == (405, "OPTIONS, POST")
    reply = await alice.call("POST", "/v1/jobs", JOB | {"job_id": "cancel"})
    assert (reply.status, reply.json["error"]["details"]["path"]) == (400, "$.job_id")


async def test_forgotten_jobs_are_410_on_every_route():
    """A real job that was forgotten: every route says so, and its id never runs again."""
    async with live_world() as world:
        client = await world.connect()
        assert (await client.call("POST", "/v1/jobs", JOB)).status == 201
        assert (await client.call("GET", "/v1/jobs/a?wait_s=10")).json["reward"] == 1.0
        await world.room.forget("a")
        for target in ("", "/trajectory", "/events", "/verify", "/reevaluations", "/reevaluations/1"):
            reply = await client.call("GET", f"/v1/jobs/a{target}")
            assert (reply.status, reply.code) == (410, "forgotten"), target
        for target in ("/cancel", "/requeue", "/reevaluate", "/reevaluations/1/cancel"):
            assert (await client.call("POST", f"/v1/jobs/a{target}")).status == 410, target
        assert (await client.call("POST", "/v1/jobs", JOB)).status == 410


async def test_a_real_job_is_verified_scored_again_and_requeued():
    """The whole way over HTTP, with the events of it in the feed."""
    async with live_world() as world:
        client = await world.connect()
        await client.call("POST", "/v1/jobs", JOB)
        record = (await client.call("GET", "/v1/jobs/a?wait_s=10")).json
        verified = (await client.call("GET", "/v1/jobs/a/verify")).json
        assert (verified["ok"], verified["result"], verified["sampled"]) == (True, "ok", record["tokens"]["sampled"])
        assert (await client.call("POST", "/v1/jobs/a/reevaluate")).status == 202
        found = (await client.call("GET", "/v1/jobs/a/reevaluations/1?wait_s=10")).json
        assert (found["state"], found["reward"], found["outcome"]["kind"]) == ("done", 1.0, "ok")
        assert (await client.call("POST", "/v1/jobs/a/requeue", {"job_id": "b"})).json["requeued_from"] == "a"
        await client.call("GET", "/v1/jobs/b?wait_s=10")
        assert (await client.call("GET", "/v1/jobs/a")).json == record
        seen = (await client.call("GET", "/v1/events")).json["items"]
        assert [e["seq"] for e in seen] == list(range(1, len(seen) + 1))
        assert [e["job_id"] for e in seen if e["event"] == "job.done"] == ["a", "b"]
        with trio.fail_after(5):
            await world.room.supervisor.wait_idle()
