"""An HTTP/1.1 server on trio and h11, only as large as a scripted engine needs.

A request whose client hangs up is cancelled at once. One task a connection, no pipelining.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import h11
import msgspec
import trio

__all__ = ["HangUp", "Reply", "Request", "serve_connection"]

REQUEST_BYTES_MAX = 64 * 1024 * 1024
_RECEIVE_BYTES = 64 * 1024


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A whole request."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A whole response. With ``cut`` only half of the body is sent, and the socket is closed."""

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    cut: bool = False


class HangUp(Exception):
    """Close the socket after these bytes, which are no answer."""

    def __init__(self, said: bytes = b"") -> None:
        super().__init__(said)
        self.said = said


Answer = Callable[[Request], Awaitable[Reply]]


async def serve_connection(answer: Answer, stream: trio.SocketStream) -> None:
    """Serve one connection to its end; for ``trio.serve_listeners``."""
    protocol = h11.Connection(h11.SERVER)
    try:
        while True:
            request = await _read(protocol, stream)
            if request is None:
                return
            reply = await _answer_or_gone(answer, request, stream)
            if reply is None or not await _send(protocol, stream, reply):
                return
    except HangUp as hang_up:
        with suppress(trio.BrokenResourceError):
            await stream.send_all(hang_up.said)
    except (h11.ProtocolError, trio.BrokenResourceError):
        return
    finally:
        stream.socket.close()


async def _read(protocol: h11.Connection, stream: trio.SocketStream) -> Request | None:
    head: h11.Request | None = None
    body = bytearray()
    while True:  # noqa: ASYNC913 - it awaits whenever it lacks data
        event = protocol.next_event()
        if event is h11.NEED_DATA:
            protocol.receive_data(await stream.receive_some(_RECEIVE_BYTES))
        elif isinstance(event, h11.Request):
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > REQUEST_BYTES_MAX:
                raise HangUp
        elif isinstance(event, h11.EndOfMessage) and head is not None:
            return _request(head, bytes(body))
        else:
            return None


def _request(head: h11.Request, body: bytes) -> Request:
    path, _, query = head.target.decode("latin-1").partition("?")
    pairs = (pair.partition("=") for pair in query.split("&") if pair)
    return Request(
        method=head.method.decode("ascii"),
        path=path,
        query={key: value for key, _, value in pairs},
        headers={key.decode("latin-1"): value.decode("latin-1") for key, value in head.headers},
        body=body,
    )


async def _answer_or_gone(answer: Answer, request: Request, stream: trio.SocketStream) -> Reply | None:
    """The reply; ``None`` when the client hung up meanwhile, and the work on it has ended."""
    replies: list[Reply] = []
    failures: list[HangUp] = []
    async with trio.open_nursery() as nursery:

        async def work() -> None:
            try:
                replies.append(await answer(request))
            except HangUp as exc:
                failures.append(exc)
            nursery.cancel_scope.cancel()

        nursery.start_soon(work)
        nursery.start_soon(partial(_until_closed, stream, nursery.cancel_scope))
    if failures:
        raise failures[0]
    return replies[0] if replies else None


async def _until_closed(stream: trio.SocketStream, scope: trio.CancelScope) -> None:
    # Readable in the middle of an exchange: the client has closed, or talks out of turn. Either ends it.
    await trio.lowlevel.wait_readable(stream.socket)
    scope.cancel()


async def _send(protocol: h11.Connection, stream: trio.SocketStream, reply: Reply) -> bool:
    """Send it; whether the connection can take another request."""
    headers = [("content-type", reply.content_type), ("content-length", str(len(reply.body)))]
    data = protocol.send(h11.Response(status_code=reply.status, headers=headers)) or b""
    if reply.cut:
        await stream.send_all(data + reply.body[: len(reply.body) // 2])
        return False
    if reply.body:
        data += protocol.send(h11.Data(data=reply.body)) or b""
    data += protocol.send(h11.EndOfMessage()) or b""
    await stream.send_all(data)
    if protocol.our_state is not h11.DONE or protocol.their_state is not h11.DONE:
        return False
    protocol.start_next_cycle()
    return True
