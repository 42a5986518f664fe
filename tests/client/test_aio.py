"""What only the asynchronous client can do: be cancelled anywhere, and be shared by tasks."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager

import anyio
import pytest

from prorld.client import AsyncClient, ClientError, aio_http
from tests.client.serving import serving
from tests.client.test_batches import group, page
from tests.client.test_sync import RECORD
from tests.daemon.support import until

pytestmark = pytest.mark.parametrize("way", ["trio", "asyncio"])


class Mute:
    """Takes requests and answers none: what was asked, and how many connections were closed by the other side."""

    def __init__(self, listener):
        self.asked = 0
        self.closed = 0
        self._listener = listener

    def serve(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._hold, args=(connection,), daemon=True).start()

    def _hold(self, connection):
        with connection:
            if connection.recv(1 << 16):
                self.asked += 1
            try:
                while connection.recv(1 << 16):
                    pass
            except OSError:
                pass
            self.closed += 1


@contextmanager
def mute():
    """Its address, and what it saw."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Mute(listener)
        threading.Thread(target=server.serve, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", server
        listener.shutdown(socket.SHUT_RDWR)


async def when(condition):
    """Wait for something that another thread does."""
    with anyio.fail_after(10):
        while not condition():  # noqa: ASYNC110 - it has no event of this loop
            await anyio.sleep(0.01)


async def asked(server, count):
    """Wait until so many requests came in."""
    await when(lambda: server.asked >= count)


def test_a_long_poll_that_is_cancelled_closes_its_connection(way):
    """At once, and nothing of it is left: neither a connection nor a place."""

    async def main(address, server):
        async with AsyncClient(address) as client:
            for count in range(1, 4):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(client.wait, "j")
                    await asked(server, count)
                    tasks.cancel_scope.cancel()
            return client._connections._idle, client._connections._places.value

    with mute() as (address, server):
        idle, places = anyio.run(main, address, server, backend=way)
        until(lambda: server.closed == 3, 10, "all connections are closed")
    assert idle == []
    assert places == aio_http.CONNECTIONS_MAX


def test_a_wait_for_an_item_that_is_cancelled_loses_nothing(way):
    """The same iterator goes on with what it asked for."""
    turn = threading.Event()
    hanging = threading.Event()

    def second(method, path, headers, body):
        if not turn.is_set():
            hanging.set()
            turn.wait(10)
        return page(group(2), is_over=True)

    async def main(address):
        async with AsyncClient(address) as client:
            groups = client.groups("b", after=0)
            seen = [(await anext(groups)).seq]
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(anext, groups)
                await when(hanging.is_set)
                tasks.cancel_scope.cancel()
            turn.set()
            return seen + [found.seq async for found in groups]

    with serving(page(group(1)), second) as (address, _):
        assert anyio.run(main, address, backend=way) == [1, 2]


def test_an_iterator_is_for_one_task(way):
    """A second one is told, and does not take the first one's answer."""

    async def main(address, server):
        async with AsyncClient(address) as client, anyio.create_task_group() as tasks:
            groups = client.groups("b", after=0)
            tasks.start_soon(anext, groups)
            await asked(server, 1)
            with pytest.raises(RuntimeError, match="another task"):
                await anext(groups)
            tasks.cancel_scope.cancel()

    with mute() as (address, server):
        anyio.run(main, address, server, backend=way)


def test_an_iterator_may_be_dropped_or_closed_anywhere(way):
    """It holds nothing between two items."""

    async def main(address):
        async with AsyncClient(address) as client:
            async for found in client.groups("b", after=0):
                assert found.seq == 1
                break
            groups = client.groups("b", after=0)
            await anext(groups)
            await groups.aclose()
            return [found.seq async for found in groups]

    with serving(lambda *_: page(group(1), group(2))) as (address, _):
        assert anyio.run(main, address, backend=way) == []


def test_tasks_share_a_bounded_set_of_connections(way):
    """Each gets its own answer, and no more connections are open than were allowed."""

    def named(method, path, headers, body):
        return (200, {**RECORD, "job_id": path.rpartition("/")[2]})

    async def main(address):
        found: dict[int, str] = {}

        async def ask(n):
            found[n] = (await client.get(f"j{n}")).job_id

        async with AsyncClient(address, connections_max=4) as client:
            async with anyio.create_task_group() as tasks:
                for n in range(40):
                    tasks.start_soon(ask, n)
            kept = len(client._connections._idle)
        return found, kept, len(client._connections._idle)

    with serving(named) as (address, _):
        found, kept, left = anyio.run(main, address, backend=way)
    assert found == {n: f"j{n}" for n in range(40)}
    assert 1 <= kept <= 4
    assert left == 0


def test_long_polls_leave_room_for_calls_that_are_answered_at_once(way, monkeypatch):
    """An acknowledgement never waits for a group; a long-poll that gets no room is told."""
    monkeypatch.setattr(aio_http, "ROOM_S", 0.05)

    async def main(address, server):
        async with AsyncClient(address, patience_s=0, connections_max=4) as client:
            async with anyio.create_task_group() as tasks:
                for n in range(3):
                    tasks.start_soon(client.wait, f"j{n}")
                await asked(server, 3)
                with pytest.raises(ClientError) as caught:
                    await client.wait("one more")
                tasks.start_soon(client.get, "quick")
                await asked(server, 4)
                tasks.cancel_scope.cancel()
            return caught.value.stable_code

    with mute() as (address, server):
        assert anyio.run(main, address, server, backend=way) == "too_many_calls"
