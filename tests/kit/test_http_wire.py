"""The plain form of responses is read as h11 reads it, and requests are what h11 takes them for."""

from __future__ import annotations

import h11
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prorld.kit.http_wire import HEAD_BYTES_MAX, Head, plain_head, request_head

STATUS = st.sampled_from([
    b"HTTP/1.1 200 OK", b"HTTP/1.1 200", b"HTTP/1.1 404 Not Found", b"HTTP/1.1 503 \xff", b"HTTP/1.1 204 No Content",
    b"HTTP/1.1 304 x", b"HTTP/1.1 100 Continue", b"HTTP/1.0 200 OK", b"HTTP/1.1 20 OK", b"HTTP/1.1  200 OK",
    b"HTTP/1.1 200 O\nK", b"", b"http/1.1 200 OK", b"HTTP/1.1 999 x", b"HTTP/1.1 200 \x00",
])  # fmt: skip
LINE = st.sampled_from([
    b"content-length: 2", b"Content-Length:2", b"content-length: 02", b"content-length: 2, 2", b"content-length: +2",
    b"content-length: 3", b"content-length: -1", b"content-length: 2 ", b"content-length:\t2", b"content-length : 2",
    b"content-length: 99999999999999999999", b"content-length:", b"content-length: 2\nx: y",
    b"content-type: application/json", b"x: \xe4 y", b"x:", b"x: a\rb", b" folded", b"x", b": y", b"x y: z", b"x: \x0b",
    b"Connection: keep-alive", b"connection: Keep-Alive", b"connection: close", b"connection: upgrade", b"upgrade: h2c",
    b"transfer-encoding: chunked", b"Transfer-Encoding: identity",
])  # fmt: skip
ASCII = st.text(st.characters(max_codepoint=127), min_size=1, max_size=8)
LENGTHS = st.sampled_from([b"content-length: 2", b"content-length: 2", b"Content-Length:\t1 ", b"content-length: 4"])
LINES = st.tuples(LENGTHS, st.lists(LINE, max_size=2)).map(lambda both: [both[0], *both[1]]).flatmap(st.permutations)
BODIES = st.sampled_from([b"", b"o", b"ok", b"ok", b"ok!", b"2\r\nok\r\n0\r\n\r\n", b"\r\n\r\n"])
ENDINGS = st.sampled_from([b"\r\n", b"\r\n", b"\r\n", b"\n"])
RESPONSES = st.builds(
    lambda status, lines, ending, body: ending.join([status, *lines, b"", b""]) + body, STATUS, LINES, ENDINGS, BODIES
)


def by_h11(data: bytes) -> tuple[int, tuple[tuple[bytes, bytes], ...], bytes, bool | None]:
    """Status, headers, what there is of the body, and if it is all: whether the socket may be used again."""
    protocol = h11.Connection(h11.CLIENT)
    protocol.send(h11.Request(method="POST", target="/", headers=[("host", "x")]))
    protocol.send(h11.EndOfMessage())
    protocol.receive_data(data)
    head = protocol.next_event()
    assert isinstance(head, h11.Response)
    body, is_open = b"", None
    while isinstance(event := protocol.next_event(), h11.Data):
        body += event.data
    if isinstance(event, h11.EndOfMessage):
        is_open = protocol.their_state is h11.DONE and not protocol.trailing_data[0]
    return head.status_code, tuple(head.headers), body, is_open


@settings(max_examples=600)
@given(RESPONSES)
@example(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
@example(b"HTTP/1.1 204 No Content\r\ncontent-length: 2\r\n\r\nok")
@example(b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok")
@example(b"HTTP/1.1 100 Continue\r\ncontent-length: 2\r\n\r\nok")
@example(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n")
@example(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok")
def test_what_is_read_here_is_read_by_h11_in_the_same_way(data: bytes) -> None:
    """The same status, headers, body and end: nobody is made to see another response than a strict reader does."""
    head = plain_head(data)
    if head is not None:
        size = len(data) - head.body_at
        is_open = None if size < head.length else size == head.length
        body = data[head.body_at : head.body_at + head.length]
        assert by_h11(data) == (head.status, head.headers, body, is_open)


def test_the_form_that_engines_answer_in_is_plain() -> None:
    """As uvicorn and llama.cpp write it."""
    data = b"HTTP/1.1 200 OK\r\nDate: x\r\nServer: uvicorn\r\ncontent-length: 2\r\nConnection: keep-alive\r\n\r\nok"
    assert plain_head(data) == Head(
        200,
        ((b"date", b"x"), (b"server", b"uvicorn"), (b"content-length", b"2"), (b"connection", b"keep-alive")),
        2,
        len(data) - 2,
    )


@pytest.mark.parametrize("cut", range(len(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n")))
def test_half_a_head_is_none(cut: int) -> None:
    """However far it came, it is not guessed at; a head without an end is not looked for in all there is."""
    assert plain_head(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"[:cut]) is None
    long = b"HTTP/1.1 200 OK\r\nx: " + b"y" * HEAD_BYTES_MAX + b"\r\ncontent-length: 2\r\n\r\n"
    assert plain_head(long) is None


@given(
    st.text(max_size=8),
    st.text(max_size=12),
    st.lists(st.tuples(st.text(max_size=6), st.text(max_size=12)), max_size=3),
)
@example("POST", "/a?b=c", [("X-Request-Id", "a b")])
@example("GET", "/ HTTP/1.1\r\nx: y\r\n", [])
@example("GET", "/", [("x", "a\r\ny: z")])
def test_a_request_is_refused_or_means_what_it_says(method: str, target: str, headers: list[tuple[str, str]]) -> None:
    """A server reads the very method, target and headers that were given, and nothing beside them."""
    try:
        data = request_head(method, target, "host:1", 0, headers)
    except ValueError:
        return
    protocol = h11.Connection(h11.SERVER)
    protocol.receive_data(data)
    seen = protocol.next_event()
    assert isinstance(seen, h11.Request)
    said = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    assert list(seen.headers) == [(b"host", b"host:1"), (b"content-length", b"0"), *said]
    assert (seen.method, seen.target) == (method.encode(), target.encode())
    assert not protocol.trailing_data[0]


def test_names_of_headers_are_checked() -> None:
    """A name with a line break in it could begin a request of its own."""
    for name in ("", "a b", "a:", "a\r\nb", "ä"):
        with pytest.raises(ValueError, match="not a valid request"):
            request_head("GET", "/", "x", 0, [(name, "v")])
    with pytest.raises(ValueError, match="not a valid request"):
        request_head("GET", "/", "x", 0, [("a", "snowman \u2603")])
