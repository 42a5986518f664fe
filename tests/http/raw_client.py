"""A raw client over a real socket, which can also say what no proper client would; and what its tests wait with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import h11
import msgspec
import trio


class Reply(NamedTuple):
    """One answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def code(self) -> str:
        """The code of an error; fails when the body is not of the contract's shape."""
        error = self.json["error"]
        assert error.keys() >= {"code", "message", "retryable"}
        return str(error["code"])


class Client:
    """One connection."""

    def __init__(self, stream: trio.SocketStream, token: str | None) -> None:
        self.stream = stream
        self.receive: Callable[[int], Awaitable[bytes]] = stream.receive_some
        self.token = token
        self.h11 = h11.Connection(h11.CLIENT)

    async def send(self, method: str, target: str, body: Any = None, headers: dict[str, str] | None = None) -> None:
        """A request: bytes as they are, anything else as JSON."""
        data = b"" if body is None else body if isinstance(body, bytes) else msgspec.json.encode(body)
        lines = {"Host": "localhost"} | ({"Authorization": f"Bearer {self.token}"} if self.token else {})
        if body is not None:
            lines |= {"Content-Type": "application/json", "Content-Length": str(len(data))}
        request = h11.Request(method=method, target=target, headers=list((lines | (headers or {})).items()))
        parts = [
            self.h11.send(request),
            self.h11.send(h11.Data(data)) if data else b"",
            self.h11.send(h11.EndOfMessage()),
        ]
        await self.stream.send_all(b"".join(part or b"" for part in parts))

    async def reply(self) -> Reply:
        """The next answer; the connection is ready for another request when both sides kept it."""
        head: h11.Response | None = None
        body = bytearray()
        while True:
            event = self.h11.next_event()
            if event is h11.NEED_DATA:
                data = await self.receive(1 << 16)
                if not data:
                    raise EOFError("the server closed the connection")
                self.h11.receive_data(data)
            elif isinstance(event, h11.Response):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                break
        assert head is not None
        if self.h11.our_state is h11.DONE and self.h11.their_state is h11.DONE:
            self.h11.start_next_cycle()
        return Reply(head.status_code, {k.decode(): v.decode() for k, v in head.headers}, bytes(body))

    async def call(self, method: str, target: str, body: Any = None, headers: dict[str, str] | None = None) -> Reply:
        """A request and its answer."""
        with trio.fail_after(10):
            await self.send(method, target, body, headers)
            return await self.reply()

    async def wait_closed(self) -> None:
        """Until the server has closed the connection."""
        with trio.fail_after(10):
            await trio.lowlevel.checkpoint()
            try:
                while await self.stream.receive_some(1 << 16):
                    pass
            except trio.BrokenResourceError:
                return


async def until(condition: Any, within_s: float = 5.0) -> None:
    """Until something that real sockets do has happened."""
    with trio.fail_after(within_s):
        await trio.lowlevel.checkpoint()
        while not condition():  # noqa: ASYNC110 - sockets tell nobody when the other side has seen something
            await trio.sleep(0.002)


def open_fds() -> int:
    """How many file descriptors this process has."""
    return len(list(Path("/proc/self/fd").iterdir()))
