"""The engine HTTP client against servers that behave, and against servers that do not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from prorld.kit.http_client import (
    BodyMalformed,
    ConnectFailed,
    HttpClient,
    HttpError,
    Response,
    ResponseTooLarge,
    TransportFailed,
    decode_json,
)
from tests.certificates import own_certificate

Handler = Callable[[trio.SocketStream], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Server:
    """A raw server on loopback: one handler per connection, and what it saw."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.accepted = 0
        self.open = 0
        self.requests: list[bytes] = []
        self.changed = trio.Event()

    def note(self) -> None:
        """Wake whoever waits for something to happen here."""
        self.changed.set()
        self.changed = trio.Event()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Until it holds, looked at after each event; the test fails if it takes long."""
        with trio.fail_after(10):
            await trio.lowlevel.checkpoint()
            while not condition():
                await self.changed.wait()


@asynccontextmanager
async def serving(handler: Callable[[Server, trio.SocketStream], Awaitable[None]]) -> AsyncIterator[Server]:
    """A server with this handler for the length of the block."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    server = Server(f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}")

    async def connection(stream: trio.SocketStream) -> None:
        server.accepted += 1
        server.open += 1
        try:
            await handler(server, stream)
        except trio.BrokenResourceError:
            return
        finally:
            server.open -= 1
            stream.socket.close()
            server.note()

    async with trio.open_nursery() as nursery:
        await nursery.start(partial(trio.serve_listeners, connection, listeners))
        yield server
        nursery.cancel_scope.cancel()


async def read_request(server: Server, stream: trio.SocketStream) -> bytes | None:
    """One request with its body; ``None`` at the end of the connection."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = await stream.receive_some()
        if not more:
            return None
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
    )
    while len(body) < length:
        body += await stream.receive_some()
    server.requests.append(head + b"\r\n\r\n" + body)
    server.note()
    return body


async def echo(server: Server, stream: trio.SocketStream) -> None:
    """Answer every request with its own body."""
    while (body := await read_request(server, stream)) is not None:
        await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)


def answering(reply: bytes) -> Callable[[Server, trio.SocketStream], Awaitable[None]]:
    """Answer the first request with these bytes and hang up."""

    async def handler(server: Server, stream: trio.SocketStream) -> None:
        await read_request(server, stream)
        await stream.send_all(reply)

    return handler


async def silent(server: Server, stream: trio.SocketStream) -> None:
    """Read a request and never answer."""
    await read_request(server, stream)
    await stream.receive_some()


async def test_sequential_requests_share_one_socket() -> None:
    """Requests one after another use one socket, and each gets its own answer."""
    async with serving(echo) as server:
        client = HttpClient(server.url)
        bodies = [(await client.request("POST", "/x", str(n).encode())).body for n in range(5)]
        stats = client.statistics()
        client.close()
    assert bodies == [b"0", b"1", b"2", b"3", b"4"]
    assert (stats.opened, stats.reused, stats.live, stats.idle) == (1, 4, 1, 1)
    assert client.statistics().live == 0


async def test_256_at_once_get_their_own_answers_within_the_bound() -> None:
    """Concurrent requests never mix up, and never open more sockets than allowed."""
    async with serving(echo) as server:
        client = HttpClient(server.url, connections_max=64)
        got: dict[int, bytes] = {}

        async def one(n: int) -> None:
            got[n] = (await client.request("POST", "/", b"%d" % n * 50)).body

        async with trio.open_nursery() as nursery:
            for n in range(256):
                nursery.start_soon(one, n)
        assert got == {n: b"%d" % n * 50 for n in range(256)}
        assert client.statistics().opened <= 64
        client.close()


async def test_a_kept_socket_that_the_server_closed_is_replaced() -> None:
    """A server that hangs up after its answer costs a new socket, never an error."""
    async with serving(answering(OK)) as server:
        client = HttpClient(server.url)
        for _ in range(3):
            assert (await client.request("GET", "/")).body == b"ok"
            await trio.testing.wait_all_tasks_blocked(0.01)
        assert server.accepted == 3
        client.close()


async def test_a_kept_socket_that_dies_under_the_request_is_tried_again_once() -> None:
    """A hang-up that races with the request is retried on a fresh socket, and the server acted on one request only."""
    acted: list[int] = []

    async def handler(server: Server, stream: trio.SocketStream) -> None:
        await read_request(server, stream)
        acted.append(server.accepted)
        await stream.send_all(OK)
        if server.accepted == 1:
            await stream.receive_some(1)

    async with serving(handler) as server:
        client = HttpClient(server.url)
        await client.request("GET", "/")
        assert (await client.request("POST", "/", b"x")).status == 200
        assert client.statistics().retried == 1
        assert acted == [1, 2]
        client.close()


async def test_a_fresh_socket_that_dies_is_not_tried_again() -> None:
    """Without a kept socket there is one try."""

    async def handler(server: Server, stream: trio.SocketStream) -> None:
        await read_request(server, stream)

    async with serving(handler) as server:
        client = HttpClient(server.url)
        with pytest.raises(TransportFailed):
            await client.request("POST", "/")
        assert server.accepted == 1
        assert client.statistics().live == 0


async def test_a_reply_that_breaks_off_on_a_kept_socket_is_not_sent_again() -> None:
    """Once a byte of the answer came, the server has acted; sending again could act twice."""

    async def handler(server: Server, stream: trio.SocketStream) -> None:
        await read_request(server, stream)
        await stream.send_all(OK)
        await read_request(server, stream)
        await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf")

    async with serving(handler) as server:
        client = HttpClient(server.url)
        await client.request("GET", "/")
        with pytest.raises(TransportFailed):
            await client.request("POST", "/")
        assert server.accepted == 1
        assert client.statistics().live == 0


async def test_idle_sockets_are_dropped_before_servers_drop_them(autojump_clock: trio.testing.MockClock) -> None:
    """A socket idle for longer than the bound is not used again."""
    async with serving(echo) as server:
        client = HttpClient(server.url, idle_seconds_max=4.0)
        await client.request("GET", "/")
        await trio.sleep(3.9)
        await client.request("GET", "/")
        assert server.accepted == 1
        await trio.sleep(4.1)
        await client.request("GET", "/")
        assert server.accepted == 2
        assert client.statistics().live == 1
        client.close()


async def test_a_cancellation_storm_leaves_no_socket() -> None:
    """Cancelled requests close their sockets at both ends, and the client goes on working."""
    async with serving(silent) as server:
        client = HttpClient(server.url, connections_max=50)
        async with trio.open_nursery() as nursery:
            for _ in range(200):
                nursery.start_soon(client.request, "POST", "/", b"x")
            await server.wait_until(lambda: len(server.requests) == 50)
            nursery.cancel_scope.cancel()
        assert client.statistics().live == 0
        await server.wait_until(lambda: not server.open)
    async with serving(echo) as server:
        client = HttpClient(server.url)
        assert (await client.request("POST", "/", b"y")).body == b"y"
        client.close()


@pytest.mark.parametrize("step", range(1, 12))
async def test_cancelling_at_any_moment_leaks_nothing(step: int) -> None:
    """Whatever instant the caller gives up at, no socket stays open."""
    async with serving(echo) as server:
        client = HttpClient(server.url)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.request, "POST", "/", b"x" * 10)
            for _ in range(step):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        stats = client.statistics()
        assert stats.live == stats.idle
        client.close()
        assert client.statistics().live == 0


async def test_a_drip_feeding_server_is_bounded_by_the_caller(autojump_clock: trio.testing.MockClock) -> None:
    """The caller's deadline ends a response that never ends."""

    async def handler(server: Server, stream: trio.SocketStream) -> None:
        await read_request(server, stream)
        await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
        while True:
            await stream.send_all(b"x")
            await trio.sleep(1)

    async with serving(handler) as server:
        client = HttpClient(server.url)
        with trio.move_on_after(10) as scope:
            await client.request("GET", "/")
        assert scope.cancelled_caught
        assert client.statistics().live == 0


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"\x00\x01\x02\r\n\r\n",
        b"220 mail.example ESMTP\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: ten\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 100,
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000,
    ],
)
async def test_garbage_is_a_transport_failure(reply: bytes) -> None:
    """Whatever comes back that is not one whole response is a typed error and a closed socket."""
    async with serving(answering(reply)) as server:
        client = HttpClient(server.url)
        with pytest.raises(TransportFailed):
            await client.request("GET", "/")
        assert client.statistics().live == 0


@given(st.binary(max_size=200))
def test_random_bytes_are_a_response_or_a_typed_error(reply: bytes) -> None:
    """No answer of a server raises anything outside the client's own errors."""

    async def main() -> None:
        async with serving(answering(reply)) as server:
            try:
                await HttpClient(server.url).request("GET", "/")
            except HttpError:
                return

    trio.run(main)


async def test_bytes_after_the_response_end_the_socket() -> None:
    """A server that says more than it was asked for is not asked again on that socket."""
    async with serving(answering(OK + b"HTTP/1.1 200 OK\r\n")) as server:
        client = HttpClient(server.url)
        assert (await client.request("GET", "/")).body == b"ok"
        assert client.statistics().live == 0


async def test_a_response_over_the_bound_is_refused() -> None:
    """Neither a declared nor an endless body is read past the bound."""
    endless = b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 5000
    for reply in (endless, b"HTTP/1.1 200 OK\r\ncontent-length: 5000\r\n\r\n" + b"x" * 5000):
        async with serving(answering(reply)) as server:
            client = HttpClient(server.url, response_bytes_max=1000)
            with pytest.raises(ResponseTooLarge):
                await client.request("GET", "/")
            assert client.statistics().live == 0


async def test_a_body_that_ends_with_the_connection_is_complete() -> None:
    """Without a length the end of the connection ends the body, and the socket is not kept."""
    async with serving(answering(b"HTTP/1.0 200 OK\r\n\r\nall of it")) as server:
        client = HttpClient(server.url)
        assert (await client.request("GET", "/")).body == b"all of it"
        assert client.statistics().live == 0


async def test_refused_and_slow_connections_are_connect_failures(autojump_clock: trio.testing.MockClock) -> None:
    """Nobody listening fails at once; a connect that hangs fails at its deadline."""
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    port = listener.socket.getsockname()[1]
    await listener.aclose()
    with pytest.raises(ConnectFailed):
        await HttpClient(f"http://127.0.0.1:{port}").request("GET", "/")

    client = HttpClient("http://192.0.2.1:9", connect_seconds_max=5)
    with pytest.raises(ConnectFailed):
        await client.request("GET", "/")
    assert client.statistics().live == 0


async def test_unix_sockets_work(tmp_path: object) -> None:
    """An engine behind a Unix socket is reached by unix:/path."""
    path = f"{tmp_path}/engine.sock"
    listening = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
    await listening.bind(path)
    listening.listen(5)
    listener = trio.SocketListener(listening)
    server = Server(f"unix:{path}")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(trio.serve_listeners, partial(echo, server), [listener]))
        client = HttpClient(server.url)
        assert (await client.request("POST", "/", b"hello")).body == b"hello"
        client.close()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", "/a b", ()),
        ("GET", "/\r\nx: y", ()),
        ("GE T", "/", ()),
        ("GET", "/", (("x", "a\r\nb: c"),)),
        ("GET", "/", (("x y", "a"),)),
        ("GET", "/", (("Content-Length", "7"),)),
        ("GET", "/", (("host", "elsewhere"),)),
    ],
)
async def test_requests_that_could_smuggle_are_refused(
    method: str, path: str, headers: tuple[tuple[str, str], ...]
) -> None:
    """Nothing that a caller passes can end a line or speak for the client."""
    with pytest.raises(ValueError, match="not"):
        await HttpClient("http://127.0.0.1:1").request(method, path, b"", headers)


@pytest.mark.parametrize("url", ["https://", "ftp://x", "x:1", "http://", "http://a/?q", "unix:relative", "http://u@h"])
def test_addresses_of_something_else_are_refused(url: str) -> None:
    """An address the client can't speak to is refused when it is configured."""
    with pytest.raises(ValueError, match="address"):
        HttpClient(url)


async def test_a_closed_client_refuses() -> None:
    """After close no socket is opened any more."""
    client = HttpClient("http://127.0.0.1:1")
    client.close()
    with pytest.raises(ConnectFailed):
        await client.request("GET", "/")


def test_json_is_decoded_into_the_wanted_type() -> None:
    """A body of another shape is a typed error that says where."""
    decoder = msgspec.json.Decoder(dict[str, int])
    assert decode_json(Response(status=200, headers=(), body=b'{"a":1}'), decoder) == {"a": 1}
    for body in (b'{"a":"x"}', b"{", b"\xff"):
        with pytest.raises(BodyMalformed):
            decode_json(Response(status=200, headers=(), body=body), decoder)


async def test_a_server_behind_tls_is_spoken_to_where_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a kept connection; one that nobody vouches for is told before anything is sent."""
    certificate, context = own_certificate(tmp_path)

    async def behind(server: Server, stream: trio.SocketStream) -> None:
        secret = trio.SSLStream(stream, context, server_side=True, https_compatible=True)
        while request := await secret.receive_some():
            server.requests.append(bytes(request))
            await secret.send_all(OK)

    async with serving(behind) as server:
        url = server.url.replace("http://", "https://")
        with pytest.raises(ConnectFailed, match="CERTIFICATE_VERIFY_FAILED"):
            await HttpClient(url).request("GET", "/")
        assert server.requests == []
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        client = HttpClient(url)
        for _ in range(3):
            assert (await client.request("GET", "/")).body == b"ok"
        assert (client.statistics().opened, client.statistics().live) == (1, 1)
        client.close()
        await server.wait_until(lambda: server.open == 0)


async def test_a_handshake_that_does_not_end_is_given_up() -> None:
    """The connect deadline is for all of it, and no socket stays behind."""

    async def silent(server: Server, stream: trio.SocketStream) -> None:
        while await stream.receive_some():
            server.note()

    async with serving(silent) as server:
        client = HttpClient(server.url.replace("http://", "https://"), connect_seconds_max=0.05)
        with pytest.raises(ConnectFailed, match="within"):
            await client.request("GET", "/")
        await server.wait_until(lambda: server.open == 0)
        assert client.statistics().live == 0
