"""The guard around hypercorn: each of its five faults, the bounds of a connection, and what is hostile."""

from __future__ import annotations

import random

import pytest
import trio

from prorld.http.guarded import Connection, ConnectionLimits
from tests.http.raw_client import Client, open_fds, until
from tests.http.support import World

UPGRADE = (
    b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
)


async def test_a_malformed_upgrade_with_a_trailing_byte_ends_nothing(nursery, world):
    """Fault 1: the request that ends a bare hypercorn is answered as a plain request, and the server lives."""
    await world.serve(nursery)
    client = await world.connect()
    await client.stream.send_all(UPGRADE + b"Sec-WebSocket-Key: no\r\n\r\nx")
    assert (await client.stream.receive_some(12)) == b"HTTP/1.1 200"
    await client.stream.aclose()
    await world.is_alive()


async def test_http_2_is_not_offered(nursery, world):
    """A request to upgrade to HTTP/2 is answered in HTTP/1.1, and so is the preface of HTTP/2 itself."""
    await world.serve(nursery)
    client = await world.connect()
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n"
    await client.stream.send_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + upgrade)
    assert (await client.stream.receive_some(12)) == b"HTTP/1.1 200"
    client = await world.connect()
    await client.stream.send_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    assert (await client.stream.receive_some(12)) == b"HTTP/1.1 401"


async def test_an_exception_in_one_connection_stays_there(nursery, world):
    """Fault 1: whatever a connection raises, the others and the server go on, and its socket is closed."""

    class Exploding(Connection):
        async def _read_data(self) -> None:
            if self.count_of_all() == 2:
                raise RuntimeError("a bug in the protocol")
            await super()._read_data()

        def count_of_all(self) -> int:
            return self._count.live

    server = await world.serve(nursery, connection=Exploding)
    first = await world.connect()
    assert (await first.call("GET", "/healthz")).status == 200
    second = await world.connect()
    await second.wait_closed()
    assert (await first.call("GET", "/healthz")).status == 200
    await until(lambda: server.count.live == 1)


async def stalled(world: World) -> Client:
    """A client that asked for far more than the buffers hold and reads nothing of it."""
    world.service.tokens = 400_000
    client = await world.connect(receive_bytes=4096)
    await client.call("POST", "/v1/jobs", {"job_id": "big", "instance": {}})
    world.service.find("big", None).finish()
    await client.send("GET", "/v1/jobs/big/trajectory")
    await client.stream.receive_some(100)
    return client


async def close_after(client: Client, seconds: float) -> None:
    """So that a shutdown that waits for the client ends as a failure and not as a test that hangs."""
    await trio.sleep(seconds)
    await client.stream.aclose()


@pytest.mark.slow
async def test_a_stalled_reader_does_not_block_the_shutdown(world):
    """Fault 2: the grace period is the bound, whatever a peer does not read."""
    async with trio.open_nursery() as watch:
        async with trio.open_nursery() as nursery:
            await world.serve(nursery, grace_s=0.2)
            client = await stalled(world)
            began = trio.current_time()
            watch.start_soon(close_after, client, 3.0)
            nursery.cancel_scope.cancel()
        took = trio.current_time() - began
        watch.cancel_scope.cancel()
    assert took < 1.5


@pytest.mark.slow
async def test_a_stalled_reader_is_dropped(nursery, world):
    """Fault 2: a peer that takes nothing for the bound loses its connection; the others notice nothing."""
    server = await world.serve(nursery, limits=ConnectionLimits(send_stall_s=0.2))
    await stalled(world)
    assert server.count.live == 1
    await world.is_alive()
    await until(lambda: server.count.live == 0)


@pytest.mark.slow
async def test_a_slow_reader_gets_everything(nursery, world):
    """The bound on sending is per progress: who takes longer, but goes on reading, gets the whole answer."""
    await world.serve(nursery, limits=ConnectionLimits(send_stall_s=0.1))
    world.service.tokens = 300_000
    client = await world.connect()
    await client.call("POST", "/v1/jobs", {"job_id": "big", "instance": {}})
    world.service.find("big", None).finish()
    began = trio.current_time()
    await client.send("GET", "/v1/jobs/big/trajectory")
    receive = client.receive

    async def slowly(most: int) -> bytes:
        await trio.sleep(0.01)
        return await receive(most)

    client.receive = slowly
    reply = await client.reply()
    assert reply.json["branches"][0]["token_ids"][-1] == 299_999
    assert trio.current_time() - began > 0.3


async def test_a_connection_is_usable_after_an_early_refusal(nursery, world):
    """Fault 3: a 404 that did not look at the body leaves the connection for the next request."""
    await world.serve(nursery)
    client = await world.connect()
    for _ in range(20):
        assert (await client.call("POST", "/v1/nothing", {"a": 1})).status == 404
    assert (await client.call("GET", "/healthz")).status == 200


@pytest.mark.parametrize(("target", "status"), [("/v1/nothing", 404), ("/v1/jobs", 413)])
async def test_an_answer_before_the_body_arrives_and_ends_the_connection(nursery, target, status, make):
    """Fault 3: the client gets its refusal although it still sends, and then the end, not a dead socket."""
    world = make(body_bytes_max=1000)
    server = await world.serve(nursery, limits=ConnectionLimits(linger_s=0.1))
    client = await world.connect()
    head = f"POST {target} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.token}\r\nContent-Length: 5000000\r\n"
    await client.stream.send_all(head.encode() + b"Content-Type: application/json\r\n\r\n" + b"x" * 10)
    with trio.fail_after(5):
        assert f"HTTP/1.1 {status}".encode() in await client.stream.receive_some(4096)
    await client.wait_closed()
    await until(lambda: server.count.live == 0)


async def test_a_client_that_sends_all_before_it_reads_gets_its_413(nursery, make):
    """The rest of a refused upload is read and thrown away, so that the kernel does not reset the answer away."""
    world = make(body_bytes_max=1000)
    await world.serve(nursery)
    client = await world.connect()
    reply = await client.call("POST", "/v1/jobs", b"x" * 3_000_000)
    assert (reply.status, reply.code) == (413, "too_large")


@pytest.mark.slow
@pytest.mark.parametrize("requests", [0, 1, 3])
async def test_the_idle_timer_runs_before_and_after_requests(nursery, requests, world):
    """Fault 4: a connection that idles for ``keep_alive_s`` is closed, also after its first request."""
    server = await world.serve(nursery, limits=ConnectionLimits(keep_alive_s=0.2))
    client = await world.connect()
    for _ in range(requests):
        await client.call("GET", "/healthz")
    began = trio.current_time()
    await client.wait_closed()
    assert 0.1 < trio.current_time() - began < 2
    await until(lambda: server.count.live == 0)


async def test_a_client_that_leaves_is_forgotten_at_once(nursery, world):
    """The idle timer of a connection does not keep it after its client has closed it."""
    server = await world.serve(nursery, limits=ConnectionLimits(keep_alive_s=60))
    client = await world.connect()
    await client.call("GET", "/healthz")
    await client.stream.aclose()
    await until(lambda: server.count.live == 0, within_s=2)


async def test_shutdown_does_not_wait_for_idle_connections(world):
    """Fault 5: connections without a request end with the server, not with the grace period."""
    async with trio.open_nursery() as nursery:
        await world.serve(nursery, grace_s=30)
        for requests in (0, 1, 2):
            client = await world.connect()
            for _ in range(requests):
                await client.call("GET", "/healthz")
        began = trio.current_time()
        nursery.cancel_scope.cancel()
    assert trio.current_time() - began < 1


async def test_the_number_of_connections_is_bounded(nursery, world):
    """One connection too many is told so in the contract's words, and room comes back when another ends."""
    server = await world.serve(nursery, limits=ConnectionLimits(connections_max=2))
    kept = [await world.connect() for _ in range(2)]
    for client in kept:
        await client.call("GET", "/healthz")
    reply = await (await world.connect()).call("GET", "/healthz")
    assert (reply.status, reply.code, reply.headers["retry-after"]) == (503, "too_many_connections", "1")
    await kept[0].stream.aclose()
    await until(lambda: server.count.live == 1)
    await world.is_alive()


async def test_pipelined_requests_are_answered_in_order(nursery, world):
    """Requests that arrive together are answered one after the other on the same connection."""
    await world.serve(nursery)
    client = await world.connect()
    one = f"GET /v1/%s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.token}\r\n\r\n"
    await client.stream.send_all((one % "stages" + one % "nothing" + one % "handlers").encode())
    with trio.fail_after(5):
        seen = await client.stream.receive_some(4096)
        while seen.count(b"HTTP/1.1 ") < 3:
            seen += await client.stream.receive_some(4096)
    assert [part[:3] for part in seen.split(b"HTTP/1.1 ")[1:]] == [b"200", b"404", b"200"]


async def test_a_client_that_leaves_with_requests_in_the_queue_is_forgotten(nursery, world):
    """A connection that waits with its next request for the end of the first ends with its client, and at once."""
    server = await world.serve(nursery)
    await (await world.connect()).call("POST", "/v1/jobs", {"job_id": "a", "instance": {}})
    client = await world.connect()
    wait = f"GET /v1/jobs/a?wait_s=0.05 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.token}\r\n\r\n"
    await client.stream.send_all((wait + wait).encode())
    await until(lambda: world.service.waiting == 1)
    await client.stream.aclose()
    await until(lambda: server.count.live == 1, within_s=1)


def hostile(seed: int) -> bytes:
    """One request that is wrong in one of many ways."""
    rng = random.Random(seed)
    noise = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 200)))
    host = b"Host: x\r\n"
    return rng.choice(
        [
            noise,
            b"GET " + noise + b" HTTP/1.1\r\n" + host + b"\r\n",
            b"GET / HTTP/9.9\r\n" + host + b"\r\n",
            b"GET ?x HTTP/1.1\r\n" + host + b"\r\n",
            b"OPTIONS * HTTP/1.1\r\n" + host + b"\r\n",
            b"CONNECT example.org:443 HTTP/1.1\r\n" + host + b"\r\n",
            b"GET http://[ HTTP/1.1\r\n" + host + b"\r\n",
            b"GET /%ff%00%2e%2e HTTP/1.1\r\nHost: \xff\xfe[[\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: [::1:::\r\n\r\n",
            b"GET / HTTP/1.1\r\n\r\n",
            b"POST /v1/jobs HTTP/1.1\r\n" + host + b"Content-Length: -5\r\n\r\n",
            b"POST /v1/jobs HTTP/1.1\r\n" + host + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
            b"POST /v1/jobs HTTP/1.1\r\n" + host + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + noise,
            b"POST /v1/jobs HTTP/1.1\r\n" + host + b"Transfer-Encoding: gzip\r\n\r\n" + noise,
            b"POST /v1/jobs HTTP/1.1\r\n" + host + b"Expect: 100-continue\r\nContent-Length: 9999\r\n\r\n" + noise,
            b"GET / HTTP/1.1\r\n" + host + b"A: " + b"x" * 70_000,
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + noise,
            b"GET / HTTP/1.1\r\n" + host + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n" + noise,
            UPGRADE + b"\r\n" + noise,
            UPGRADE + b"Content-Length: 3\r\n\r\n" + noise,
        ]
    )


@pytest.mark.slow
async def test_three_hundred_malformed_requests_leave_the_server_as_it_was(nursery, world):
    """Hostile bytes never end the server, never crash a request, and leave no connection and no descriptor."""
    server = await world.serve(nursery, limits=ConnectionLimits(linger_s=0.1))
    await world.is_alive()
    await until(lambda: server.count.live == 0)
    before = open_fds()
    for seed in range(300):
        client = await world.connect(token=None)
        try:
            await client.stream.send_all(hostile(seed))
            with trio.move_on_after(0.01):
                answer = await client.stream.receive_some(4096)
                assert not answer.startswith(b"HTTP/1.1 500"), (seed, answer)
        except trio.BrokenResourceError:
            pass
        await client.stream.aclose()
    await until(lambda: server.count.live == 0)
    assert open_fds() <= before
    await world.is_alive()


async def test_a_small_answer_is_one_write(nursery, world):
    """Head and body go out together: each write is a call of the kernel and wakes the peer."""
    written: list[bytes] = []

    class Listening(Connection):
        async def _send_all(self, data: bytes) -> bool:
            written.append(data)
            return await super()._send_all(data)

    await world.serve(nursery, connection=Listening)
    client = await world.connect()
    for _ in range(2):
        assert (await client.call("GET", "/healthz")).status == 200
    assert (await client.call("HEAD", "/healthz")).status == 200
    assert len(written) == 3
    assert [data.partition(b"\r\n\r\n")[2] for data in written] == [b'{"status":"ok"}', b'{"status":"ok"}', b""]
