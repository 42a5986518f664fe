"""Events as pages, long polls and streams; over a real socket."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import trio

from prorld.http import sse
from prorld.http.guarded import ConnectionLimits
from tests.http.raw_client import Client, until
from tests.http.support import ALICE, BOB

JOB = {"job_id": "a", "instance": {}}
STREAM = {"Accept": "text/event-stream"}


@pytest.fixture
async def client(nursery, world):
    """An admin's connection to a running server, with one job."""
    await world.serve(nursery)
    client = await world.connect()
    await client.call("POST", "/v1/jobs", JOB)
    return client


class Stream:
    """A reader of Server-Sent Events."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.text = b""

    async def open(self, target: str, **headers: str) -> None:
        await self.client.send("GET", target, headers=STREAM | headers)

    async def more(self, seconds: float = 5.0) -> bool:
        """Read one piece; whether there was one."""
        with trio.fail_after(seconds):
            while True:  # noqa: ASYNC913 - h11 hands out bytes until it needs more, and those are awaited
                event: Any = self.client.h11.next_event()
                name = type(event).__name__
                if name == "Response":
                    assert event.status_code == 200, event
                    assert dict(event.headers)[b"content-type"] == b"text/event-stream"
                elif name == "Data":
                    self.text += bytes(event.data)
                    return True
                elif name == "EndOfMessage":
                    return False
                else:
                    self.client.h11.receive_data(await self.client.receive(1 << 16))

    async def events(self, count: int) -> list[tuple[int, str, dict]]:
        """The next so many."""
        while self.text.count(b"\n\n") < count:
            assert await self.more()
        blocks = self.text.split(b"\n\n")
        self.text = b"\n\n".join(blocks[count:])
        return [read(block) for block in blocks[:count]]

    async def end(self) -> None:
        """Until the server ends it."""
        while await self.more():
            pass


def read(block: bytes) -> tuple[int, str, dict]:
    """One event: id, name, data."""
    fields = dict(line.split(b": ", 1) for line in block.split(b"\n"))
    return int(fields[b"id"]), fields[b"event"].decode(), msgspec.json.decode(fields[b"data"])


async def test_a_stream_tells_everything_and_ends_with_the_job(client, world):
    """Old events first, new ones as they happen, ``id`` is the number, and the end of the job is the end."""
    job = world.service.find("a", None)
    stream = Stream(await world.connect())
    await stream.open("/v1/jobs/a/events")
    assert [(seq, name) for seq, name, _ in await stream.events(1)] == [(1, "job.queued")]
    job.tell("job.stage")
    ((seq, name, data),) = await stream.events(1)
    assert (seq, name, data["seq"], data["event"]) == (2, "job.stage", 2, "job.stage")
    job.finish()
    assert [name for _, name, _ in await stream.events(1)] == ["job.done"]
    await stream.end()
    assert (await client.call("GET", "/healthz")).status == 200


async def test_a_stream_goes_on_after_the_last_event_that_was_seen(client, world):
    """``Last-Event-ID`` wins over ``after``; what is over and has nothing left is 204, so that nobody comes back."""
    world.service.find("a", None).finish()
    stream = Stream(await world.connect())
    await stream.open("/v1/jobs/a/events?after=0", **{"Last-Event-ID": "1"})
    assert [seq for seq, _, _ in await stream.events(1)] == [2]
    await stream.end()
    reply = await client.call("GET", "/v1/jobs/a/events", headers=STREAM | {"Last-Event-ID": "2"})
    assert (reply.status, reply.body) == (204, b"")
    for wrong in ("x", "-1", "1.5", "9" * 30):
        reply = await client.call("GET", "/v1/jobs/a/events", headers=STREAM | {"Last-Event-ID": wrong})
        assert (reply.status, reply.json["error"]["details"]["path"]) == (400, "Last-Event-ID")
    assert (await client.call("GET", "/v1/jobs/none/events", headers=STREAM)).status == 404


async def test_a_quiet_stream_beats(client, world, monkeypatch):
    """A comment now and then, so that nobody between takes the connection for dead."""
    monkeypatch.setattr(sse, "HEARTBEAT_S", 0.02)
    stream = Stream(await world.connect())
    await stream.open("/v1/jobs/a/events?after=-1")
    while stream.text.count(b": still there\n\n") < 2:
        assert await stream.more()
    world.service.find("a", None).finish()
    await stream.end()
    assert b"event: job.done" in stream.text


@pytest.mark.parametrize("query", ["limit=2", "max_bytes=150"])
async def test_bounds_end_a_stream_and_cut_a_page(client, world, query):
    """So many events or bytes and at least one; the rest comes after the last number."""
    job = world.service.find("a", None)
    for _ in range(5):
        job.tell("job.turn")
    stream = Stream(await world.connect())
    await stream.open(f"/v1/jobs/a/events?{query}")
    seen = await stream.events(2 if query == "limit=2" else 1)
    await stream.end()
    assert stream.text == b""
    page = (await client.call("GET", f"/v1/jobs/a/events?{query}")).json
    assert page["next"] == str(page["items"][-1]["seq"])
    assert 1 <= len(page["items"]) <= 2
    assert seen[0][0] == 1
    tiny = (await client.call("GET", "/v1/jobs/a/events?max_bytes=1&after=3")).json
    assert ([item["seq"] for item in tiny["items"]], tiny["next"]) == ([4], "4")


async def test_all_events_are_those_that_the_caller_may_see(client, world):
    """A tenant sees its own, an admin all; numbers are of the whole; nothing visible is left out."""
    alice, bob = await world.connect(ALICE), await world.connect(BOB)
    await alice.call("POST", "/v1/jobs", JOB)
    await bob.call("POST", "/v1/jobs", JOB)
    page = (await client.call("GET", "/v1/events")).json
    assert [(e["seq"], e["tenant"]) for e in page["items"]] == [(1, "default"), (2, "alice"), (3, "bob")]
    mine = (await alice.call("GET", "/v1/events")).json
    assert ([(e["seq"], e["job_id"], e["job_seq"]) for e in mine["items"]], mine["last"]) == ([(2, "a", 1)], 3)
    await alice.send("GET", "/v1/events?after=3&wait_s=30")
    await until(lambda: len(world.app.holds) == 1)
    world.service.find("a", "bob").tell("job.turn")
    world.service.find("a", "alice").tell("job.stage")
    with trio.fail_after(2):
        assert [(e["seq"], e["event"]) for e in (await alice.reply()).json["items"]] == [(5, "job.stage")]


async def test_all_events_stream(client, world):
    """The same as a stream, which does not end with a job."""
    stream = Stream(await world.connect())
    await stream.open("/v1/events?after=-1")
    await until(lambda: len(world.app.holds) == 1)
    world.service.find("a", None).finish()
    await client.call("POST", "/v1/jobs", {"job_id": "b", "instance": {}})
    seen = await stream.events(2)
    assert [(seq, name, data["job_id"]) for seq, name, data in seen] == [(2, "job.done", "a"), (3, "job.queued", "b")]


async def test_the_end_of_the_server_ends_streams(world):
    """A stream does not hold a shutdown up, and its end is a clean one."""
    async with trio.open_nursery() as nursery:
        server = await world.serve(nursery, grace_s=30)
        await (await world.connect()).call("POST", "/v1/jobs", JOB)
        stream = Stream(await world.connect())
        await stream.open("/v1/jobs/a/events")
        await stream.events(1)
        server.close()
        with trio.fail_after(2):
            await stream.end()
        nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_a_reader_that_stops_is_cut_and_holds_nobody_up(nursery, make):
    """Events go on being emitted and told to others; the one that stalls loses its connection."""
    world = make()
    server = await world.serve(nursery, limits=ConnectionLimits(send_stall_s=0.2))
    client = await world.connect()
    await client.call("POST", "/v1/jobs", JOB)
    job = world.service.find("a", None)
    stalled = await world.connect(receive_bytes=4096)
    await stalled.send("GET", "/v1/events", headers=STREAM)
    await stalled.stream.receive_some(100)
    for _ in range(60_000):
        job.tell("job.turn")
    assert (await client.call("GET", "/healthz")).status == 200
    await until(lambda: server.count.live == 1, within_s=60)
    assert len(world.app.holds) == 0
    page = (await client.call("GET", "/v1/events?after=60000")).json
    assert page["last"] == 60_001
