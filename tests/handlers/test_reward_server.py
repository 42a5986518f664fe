"""A score of a server elsewhere is a number that it said, and everything else is a grader error and no zero."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import h11
import pytest
import trio
import trio.testing

from prorld.errors import GraderError
from prorld.handlers import reward_server as module
from prorld.handlers.reward_server import open_reward_server

Answer = Callable[[trio.SocketStream, bytes], Awaitable[None]]


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[str]:
    """A listener on the loopback; ``answer`` gets each request's body, and writes what it likes."""

    async def connection(stream: trio.SocketStream) -> None:
        async with stream:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                while (body := await request_on(stream)) is not None:
                    await answer(stream, body)

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, connection, [listener])
        yield f"127.0.0.1:{listener.socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


async def request_on(stream: trio.SocketStream) -> bytes | None:
    reader, body = h11.Connection(h11.SERVER), b""
    while True:
        event = reader.next_event()
        if event is h11.NEED_DATA:
            try:
                reader.receive_data(await stream.receive_some(65536))
            except trio.BrokenResourceError:
                return None
        elif isinstance(event, h11.Request):
            assert (event.method, event.target) == (b"POST", b"/compute_score")
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            return body
        else:
            return None


def saying(body: bytes, status: int = 200) -> Answer:
    async def answer(stream: trio.SocketStream, _: bytes) -> None:
        await stream.send_all(b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))

    return answer


async def scored(answer: Answer, *, limit_s: float = 20.0, **asked: Any) -> float:
    question = {"solution": "4", "truth": "4", "data_source": "sums", **asked}
    # Raised where no nursery makes a group of it.
    outcome: list[float | GraderError] = []
    async with serving(answer) as address, open_reward_server(address, limit_s=limit_s) as server:
        try:
            outcome.append(await server.score(**question))
        except GraderError as exc:
            outcome.append(exc)
    if isinstance(outcome[0], GraderError):
        raise outcome[0]
    return outcome[0]


@pytest.mark.parametrize(
    ("body", "score"),
    [
        (b'{"score": 0.25}', 0.25),
        (b'{"score": 1}', 1.0),
        (b'{"score": true}', 1.0),
        (b'{"score": -1.0, "took": 3}', -1.0),
        (b'{"score": [0.5]}', 0.5),
        (b'{"score": [false, {"why": "wrong"}]}', 0.0),
    ],
)
async def test_a_score_is_the_number_that_was_said(body: bytes, score: float) -> None:
    """Or the first of a list of them."""
    assert await scored(saying(body)) == score


async def test_the_question_is_that_of_the_protocol() -> None:
    """Three fields by their names; what no wire can carry is replaced, and a truth may be any JSON."""
    asked: list[Any] = []

    async def noting(stream: trio.SocketStream, body: bytes) -> None:
        asked.append(json.loads(body))
        await saying(b'{"score": 1}')(stream, body)

    await scored(noting, solution="ü\ud800", truth={"inputs": ["1"]}, data_source="taco")
    assert asked == [{"solution_str": "ü?", "ground_truth": {"inputs": ["1"]}, "data_source": "taco"}]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"0", b"null", b"[]", b'"1"', b"{}", b'{"score": null}', b'{"score": "1"}', b'{"score": []}',
        b'{"score": ["1"]}', b'{"score": [[1]]}', b'{"score": NaN}', b'{"score": 1e999}', b'{"score": {"x": 1}}',
        b"\xff\xfe", b"[" * 100_000, b"<html>it works</html>",
    ],
)  # fmt: skip
async def test_nonsense_is_no_score(body: bytes) -> None:
    """It would be the same again, so it is not tried again."""
    with pytest.raises(GraderError) as caught:
        await scored(saying(body))
    assert (caught.value.stable_code, caught.value.may_retry) == ("reward_server_bad_answer", False)


@pytest.mark.parametrize(("status", "retryable"), [(500, True), (503, True), (429, True), (400, False), (404, False),
                                                   (302, False), (204, False)])  # fmt: skip
async def test_another_status_is_no_score(status: int, retryable: bool) -> None:
    """Not even with a score in its body; what may pass by itself may be tried again."""
    body = b"" if status == 204 else b'{"score": 1}'
    with pytest.raises(GraderError) as caught:
        await scored(saying(body, status))
    assert (caught.value.stable_code, caught.value.may_retry) == ("reward_server_failed", retryable)
    assert str(status) in caught.value.message


async def test_a_server_that_is_away(unused_tcp_address: str) -> None:
    """Nobody listens, and that may pass."""
    with pytest.raises(GraderError) as caught:
        async with open_reward_server(unused_tcp_address) as server:
            await server.score(solution="", truth="", data_source="")
    assert (caught.value.stable_code, caught.value.may_retry) == ("reward_server_unreachable", True)


@pytest.fixture
async def unused_tcp_address() -> str:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        return f"http://127.0.0.1:{listener.socket.getsockname()[1]}"


async def silence(stream: trio.SocketStream, _: bytes) -> None:
    await trio.sleep_forever()


async def drip(stream: trio.SocketStream, _: bytes) -> None:
    await stream.send_all(b"HTTP/1.1 200 x\r\ncontent-length: 100000\r\n\r\n")
    while True:
        await stream.send_all(b"x")
        await trio.sleep(0.01)


@pytest.mark.parametrize("answer", [silence, drip])
async def test_a_slow_server_is_given_up(answer: Answer) -> None:
    """The limit bounds the whole of it, and it may be tried again."""
    with pytest.raises(GraderError, match=r"within 0\.2 s") as caught:
        await scored(answer, limit_s=0.2)
    assert (caught.value.stable_code, caught.value.may_retry) == ("reward_server_timeout", True)


async def hang_up(stream: trio.SocketStream, _: bytes) -> None:
    await stream.send_all(b'HTTP/1.1 200 x\r\ncontent-length: 100\r\n\r\n{"score": 1}')
    await stream.aclose()


async def garbage(stream: trio.SocketStream, _: bytes) -> None:
    await stream.send_all(b"\x00\x01\x02 220 smtp\r\n\r\n")


@pytest.mark.parametrize("answer", [hang_up, garbage])
async def test_an_answer_that_breaks_off_is_none(answer: Answer) -> None:
    """A score in the part that came is not believed."""
    with pytest.raises(GraderError) as caught:
        await scored(answer)
    assert (caught.value.stable_code, caught.value.may_retry) == ("reward_server_failed", True)


async def test_what_goes_and_comes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply without an end is not read to it, and no endless question is sent."""
    monkeypatch.setattr(module, "REPLY_BYTES_MAX", 1000)
    with pytest.raises(GraderError, match="too much") as caught:
        await scored(saying(b'{"score": 1, "x": "' + b"x" * 1000 + b'"}'))
    assert caught.value.stable_code == "reward_server_bad_answer"
    monkeypatch.setattr(module, "REQUEST_BYTES_MAX", 1000)
    for asked in ({"solution": "x" * 1000}, {"truth": object()}):
        with pytest.raises(GraderError) as caught:
            await scored(saying(b'{"score": 1}'), **asked)
        assert caught.value.stable_code == "grader_bad_payload"


async def test_so_many_at_a_time() -> None:
    """The others wait, and all are answered."""
    now = most = 0

    async def counting(stream: trio.SocketStream, body: bytes) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await trio.sleep(0.01)
        now -= 1
        await saying(b'{"score": 1}')(stream, body)

    scores: list[float] = []
    async with serving(counting) as address, open_reward_server(address, connections=3) as server:

        async def one() -> None:
            scores.append(await server.score(solution="", truth="", data_source=""))

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(one)
    assert (scores, most) == ([1.0] * 10, 3)


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("graders", "http://graders:8388"),
        ("graders:9000", "http://graders:9000"),
        ("http://graders/v1", "http://graders:8388/v1"),
        ("https://graders", "https://graders"),
    ],
)
async def test_an_address_may_be_short(address: str, url: str) -> None:
    """The port of the protocol stands in where none is named."""
    async with open_reward_server(address) as server:
        assert url in repr(server)


async def test_what_is_no_address_is_refused() -> None:
    """When the handler is opened, and not with every grade."""
    for address in ("ftp://graders", "", "http://"):
        with pytest.raises(ValueError, match="not an http"):
            async with open_reward_server(address):
                pass
