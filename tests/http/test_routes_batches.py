"""The routes of batches, over a real socket, on real batches of jobs that end when the test says so."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import trio

from prorld.kit.lanes import Lane
from prorld.rollout.batches.settings import BatchSettings
from prorld.store.batch_keeping import EventsForgotten
from prorld.store.reader import Reader
from prorld.wire.batches import BatchEventPage, BatchGroupPage, BatchRecord, PackedBatchGroupPage
from tests.http.support import ALICE, BOB, READER
from tests.rollout.batches.support import Life, life

BATCH = {
    "batch_id": "b", "handler": "fake", "samples_per_group": 2, "target_groups": 2,
    "instances": [{"prompt": f"q{n}"} for n in range(4)],
}  # fmt: skip


class Here(NamedTuple):
    """A client, and the batches behind the server."""

    client: Any
    one: Life

    async def finish(self, group: str, *rewards: float) -> None:
        """The samples of a group end."""
        with trio.fail_after(10):
            while ("default", f"{group}:0") not in self.one.jobs.live:  # noqa: ASYNC110 - nobody tells of it
                await trio.sleep(0.01)
        for sample, reward in enumerate(rewards):
            await self.one.jobs.finish(f"{group}:{sample}", reward=reward)

    async def over(self, batch_id: str = "b") -> BatchRecord:
        """The record of the batch once it has ended."""
        with trio.fail_after(10):
            while True:
                reply = await self.client.call("GET", f"/v1/batches/{batch_id}")
                record = msgspec.json.decode(reply.body, type=BatchRecord)
                if record.state != "running":
                    return record
                await trio.sleep(0.01)


@pytest.fixture
async def here(nursery, make, tmp_path: Path) -> AsyncIterator[Here]:
    """An admin's connection."""
    async with life(tmp_path) as one:
        one.room.__dict__["reader"] = one.reader = Reader(one.journal.path, lane=Lane("readers", 2))
        world = make(batches=one.batches)
        await world.serve(nursery)
        yield Here(await world.connect(), one)


async def test_submit_is_201_then_200_then_409(here: Here) -> None:
    """The same id with the same body is the same batch."""
    first = await here.client.call("POST", "/v1/batches", BATCH)
    assert first.status == 201
    record = msgspec.json.decode(first.body, type=BatchRecord)
    assert (record.batch_id, record.handler, record.tenant, record.target_groups) == ("b", "fake", "default", 2)
    assert (await here.client.call("POST", "/v1/batches", BATCH)).status == 200
    reply = await here.client.call("POST", "/v1/batches", BATCH | {"target_groups": 3})
    assert (reply.status, reply.code) == (409, "batch_exists")
    reply = await here.client.call("GET", "/v1/batches")
    assert [item["batch_id"] for item in reply.json["items"]] == ["b"]
    assert reply.json["next"] is None


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"handler": "none"}, 422, "unknown_handler"),
        ({"policy": "none"}, 422, "unknown_policy"),
        ({"quorum": {"min_usable": 5}}, 422, "impossible_quorum"),
        ({"informative": {"rule": "mean_between", "low": 1, "high": 0}}, 422, "impossible_rule"),
        ({"samples_per_group": 0}, 400, "invalid_field"),
        ({"what": 1}, 400, "invalid_field"),
        ({"batch_id": "../x"}, 400, "invalid_field"),
        ({"batch_id": "cancel"}, 400, "invalid_field"),
        ({"instances": [{}, {"prompt": 1}]}, 400, "bad_instance"),
        ({"carry_from": "nobody"}, 404, "unknown_batch"),
    ],
)
async def test_a_wrong_submit_is_refused_by_name(here: Here, change: dict[str, Any], status: int, code: str) -> None:
    reply = await here.client.call("POST", "/v1/batches", BATCH | change)
    assert (reply.status, reply.code) == (status, code)
    assert (await here.client.call("GET", "/v1/batches")).json["items"] == []


async def test_groups_come_in_order_with_what_they_are_asked_for(here: Here) -> None:
    await here.client.call("POST", "/v1/batches", BATCH)
    await here.finish("b:1", 1.0, 0.0)
    await here.finish("b:0", 0.0, 1.0)
    await here.over()
    reply = await here.client.call("GET", "/v1/batches/b/groups")
    page = msgspec.json.decode(reply.body, type=BatchGroupPage)
    assert [group.group_id for group in page.items] == ["b:1", "b:0"]
    assert (page.next, page.is_over, page.state) == (None, True, "complete")
    assert page.items[0].instance is msgspec.UNSET
    assert page.items[0].trajectories is msgspec.UNSET
    reply = await here.client.call("GET", "/v1/batches/b/groups?trajectories=true&instances=true&limit=1")
    page = msgspec.json.decode(reply.body, type=BatchGroupPage)
    (group,) = page.items
    assert (group.instance, page.next, page.is_over) == ({"prompt": "q1"}, str(group.seq), False)
    assert isinstance(group.trajectories, list)
    assert [one is not None and one.job.job_id for one in group.trajectories] == group.job_ids
    reply = await here.client.call(
        "GET", f"/v1/batches/b/groups?trajectories=true&after={page.next}", headers={"Accept": "application/msgpack"}
    )
    packed = msgspec.msgpack.decode(reply.body, type=PackedBatchGroupPage)
    assert [one.group_id for one in packed.items] == ["b:0"]
    assert isinstance(packed.items[0].trajectories, list)
    assert packed.items[0].trajectories[0] is not None
    assert isinstance(packed.items[0].trajectories[0].branches[0].token_ids, bytes)
    reply = await here.client.call("GET", "/v1/batches/b/groups?max_bytes=1")
    assert len(reply.json["items"]) == 1


async def test_groups_and_events_are_waited_for(here: Here, nursery: trio.Nursery) -> None:
    await here.client.call("POST", "/v1/batches", BATCH)

    async def later() -> None:
        await trio.sleep(0.2)
        await here.finish("b:2", 1.0, 0.0)

    nursery.start_soon(later)
    reply = await here.client.call("GET", "/v1/batches/b/groups?wait_s=20")
    (group,) = reply.json["items"]
    reply = await here.client.call("GET", f"/v1/batches/b/events?after={group['seq'] - 1}&wait_s=20&limit=1")
    page = msgspec.json.decode(reply.body, type=BatchEventPage)
    assert [(event.event, event.seq) for event in page.items] == [("group.done", group["seq"])]
    reply = await here.client.call("GET", f"/v1/batches/b/groups?after={group['seq']}&wait_s=0.1")
    assert (reply.json["items"], reply.json["is_over"]) == ([], False)


async def test_events_are_a_stream_that_resumes_and_ends(here: Here) -> None:
    """With the batch; after its end there is nothing to come back for."""
    await here.client.call("POST", "/v1/batches", BATCH)
    await here.finish("b:0", 1.0, 0.0)
    await here.finish("b:1", 1.0, 0.0)
    record = await here.over()
    stream = {"Accept": "text/event-stream"}
    reply = await here.client.call("GET", "/v1/batches/b/events", headers=stream)
    ids = [int(line[4:]) for line in reply.body.decode().splitlines() if line.startswith("id: ")]
    assert ids == list(range(1, record.last_seq + 1))
    assert "event: batch.end" in reply.body.decode()
    reply = await here.client.call("GET", "/v1/batches/b/events", headers=stream | {"Last-Event-ID": str(ids[-2])})
    assert [line for line in reply.body.decode().splitlines() if line.startswith("id: ")] == [f"id: {ids[-1]}"]
    reply = await here.client.call("GET", f"/v1/batches/b/events?after={ids[-1]}", headers=stream)
    assert reply.status == 204


async def test_bounds_end_an_answer_and_a_stream_after_at_least_one(here: Here) -> None:
    await here.client.call("POST", "/v1/batches", BATCH)
    await here.finish("b:0", 1.0, 0.0)
    await here.finish("b:1", 1.0, 0.0)
    last = (await here.over()).last_seq
    stream = {"Accept": "text/event-stream", "Last-Event-ID": "2"}
    for bound, seqs in (("limit=2", [3, 4]), ("max_bytes=1", [3])):
        reply = await here.client.call("GET", f"/v1/batches/b/events?{bound}", headers=stream)
        assert [line for line in reply.body.decode().splitlines() if line.startswith("id: ")] == [
            f"id: {seq}" for seq in seqs
        ]
        reply = await here.client.call("GET", f"/v1/batches/b/events?after=2&{bound}")
        assert ([event["seq"] for event in reply.json["items"]], reply.json["next"]) == (seqs, str(seqs[-1]))
    with trio.fail_after(5):
        for what in ("events", "groups"):
            reply = await here.client.call("GET", f"/v1/batches/b/{what}?after={last}&wait_s=30")
            assert (reply.status, reply.json["items"]) == (200, [])


async def test_forgotten_events_are_410_in_every_form(here: Here) -> None:
    """With where to go on from."""
    await here.client.call("POST", "/v1/batches", BATCH | {"target_groups": None, "max_running_groups": 4})
    for group in range(4):
        await here.finish(f"b:{group}", 1.0, 0.0)
        await here.client.call("GET", f"/v1/batches/b/groups?after={group + 1}&wait_s=10")
    last = (await here.client.call("GET", "/v1/batches/b")).json["last_seq"]
    await here.client.call("POST", "/v1/batches/b/ack", {"through": last})
    await here.one.journal.owe(EventsForgotten(serial=1, keep=1, most=100))
    for headers in ({}, {"Accept": "text/event-stream"}, {"Accept": "text/event-stream", "Last-Event-ID": "1"}):
        reply = await here.client.call("GET", "/v1/batches/b/events", headers=headers)
        assert (reply.status, reply.code) == (410, "events_forgotten")
        assert reply.json["error"]["details"] == {"after": last - 1}
    reply = await here.client.call("GET", f"/v1/batches/b/events?after={last - 1}")
    assert [event["seq"] for event in reply.json["items"]] == [last]


async def test_over_quota_and_over_the_window_say_when_to_come_back(here: Here) -> None:
    asked = BATCH | {"target_groups": 9, "max_running_groups": 1}
    await here.client.call("POST", "/v1/batches", asked)
    here.one.room.__dict__["settings"] = BatchSettings(waiting_max=4)
    reply = await here.client.call("POST", "/v1/batches/b/instances", {"offset": 4, "instances": [{}, {}, {}]})
    assert (reply.status, reply.code, int(reply.headers["retry-after"]) > 0) == (429, "window_full", True)
    await here.finish("b:0", 1.0, 0.0)
    here.one.room.__dict__["settings"] = BatchSettings(unacknowledged_bytes_max=1)
    await here.client.call("GET", "/v1/batches/b/groups?wait_s=10")
    for path, body in (("/b/instances", {"offset": 4, "instances": [{}]}), ("", BATCH | {"batch_id": "c"})):
        reply = await here.client.call("POST", f"/v1/batches{path}", body)
        assert (reply.status, reply.code, int(reply.headers["retry-after"]) > 0) == (429, "quota", True)
    assert (await here.client.call("POST", "/v1/batches", asked)).status == 200


async def test_append_and_ack_and_cancel(here: Here) -> None:
    await here.client.call("POST", "/v1/batches", BATCH | {"target_groups": 9})
    more = {"offset": 4, "instances": [{"prompt": "q4"}]}
    reply = await here.client.call("POST", "/v1/batches/b/instances", more)
    assert (reply.status, reply.json) == (200, {"accepted": 1, "next_offset": 5})
    reply = await here.client.call("POST", "/v1/batches/b/instances", more)
    assert (reply.status, reply.json) == (200, {"accepted": 1, "next_offset": 5})
    reply = await here.client.call("POST", "/v1/batches/b/instances", more | {"offset": 9})
    assert (reply.status, reply.json["error"]["details"]) == (409, {"expected_offset": 5})
    reply = await here.client.call("POST", "/v1/batches/b/instances", {"offset": 5, "instances": [{}, {"prompt": 1}]})
    assert (reply.status, reply.json["error"]["details"]["index"]) == (400, 1)
    await here.finish("b:0", 1.0, 0.0)
    reply = await here.client.call("GET", "/v1/batches/b/groups?wait_s=10")
    seq = reply.json["items"][0]["seq"]
    for _ in range(2):
        reply = await here.client.call("POST", "/v1/batches/b/ack", {"through": seq})
        assert (reply.status, reply.json) == (200, {"through": seq, "ready": 0})
    reply = await here.client.call("POST", "/v1/batches/b/ack", {"through": 10_000})
    assert (reply.status, reply.code) == (409, "beyond_last")
    reply = await here.client.call("POST", "/v1/jobs/cancel", {"batch_id": "b"})
    assert (reply.status, reply.json["cancelling"]) == (202, 8)
    reply = await here.client.call("POST", "/v1/batches/b/cancel", {"reason": "enough"})
    assert reply.status == 202
    assert (await here.over()).reason == "enough"
    assert (await here.client.call("POST", "/v1/batches/b/cancel")).status == 202
    reply = await here.client.call("POST", "/v1/batches/b/instances", more | {"offset": 6})
    assert (reply.status, reply.code) == (409, "batch_ended")
    reply = await here.client.call("POST", "/v1/jobs/cancel", {"batch_id": "nobody"})
    assert (reply.status, reply.code) == (404, "unknown_batch")


async def test_a_batch_is_its_tenants_alone(here: Here) -> None:
    mine = {"Authorization": f"Bearer {ALICE}"}
    theirs = {"Authorization": f"Bearer {BOB}"}
    assert (await here.client.call("POST", "/v1/batches", BATCH, headers=mine)).status == 201
    reads = {"Authorization": f"Bearer {READER}"}
    assert (await here.client.call("GET", "/v1/batches/b", headers=reads)).status == 200
    assert (await here.client.call("POST", "/v1/batches/b/cancel", headers=reads)).status == 403
    for method, path, body in [
        ("GET", "", None), ("GET", "/events", None), ("GET", "/groups", None), ("POST", "/ack", {"through": 0}),
        ("POST", "/instances", {"offset": 4}), ("POST", "/cancel", {}),
    ]:  # fmt: skip
        reply = await here.client.call(method, f"/v1/batches/b{path}", body, headers=theirs)
        assert (reply.status, reply.code) == (404, "unknown_batch")
    assert (await here.client.call("GET", "/v1/batches", headers=theirs)).json["items"] == []
    assert (await here.client.call("POST", "/v1/batches", BATCH, headers=theirs)).status == 201
