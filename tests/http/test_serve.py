"""The server actor: where it listens, and how it ends."""

from __future__ import annotations

import os
import stat

import pytest
import trio

from prorld.errors import ConfigError
from prorld.http.auth import NoAuth
from tests.http.raw_client import until
from tests.http.support import ADMIN

JOB = {"job_id": "a", "instance": {}}


async def test_port_0_gives_the_address_it_really_got(nursery, world):
    """``started`` carries an address that answers."""
    server = await world.serve(nursery, bind="127.0.0.1:0")
    assert server.address.startswith("http://127.0.0.1:")
    assert not server.address.endswith(":0")
    await world.is_alive()


async def test_names_are_resolved(nursery, world):
    """A name of the host can be listened on."""
    assert (await world.serve(nursery, bind="localhost:0")).address.startswith("http://")


async def test_a_unix_socket_is_private_and_goes_away(world, tmp_path):
    """It can be used by its owner alone, and its file ends with the server."""
    path = tmp_path / "http.sock"
    async with trio.open_nursery() as nursery:
        server = await world.serve(nursery, bind=f"unix:{path}")
        assert server.address == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        await world.is_alive()
        nursery.cancel_scope.cancel()
    assert not path.exists()


async def test_the_socket_of_a_dead_server_is_replaced(nursery, world, tmp_path):
    """A file that nobody listens on does not keep the server from starting."""
    path = tmp_path / "http.sock"
    with trio.socket.socket(trio.socket.AF_UNIX) as dead:
        await dead.bind(str(path))
    await world.serve(nursery, bind=f"unix:{path}")
    await world.is_alive()


async def test_the_socket_of_a_living_server_is_left_alone(nursery, make, tmp_path):
    """A second server on the same path is refused, and the first goes on."""
    first, bind = make(), f"unix:{tmp_path / 'http.sock'}"
    await first.serve(nursery, bind=bind)
    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match="another server"), allow_unwrapped=True):
        async with trio.open_nursery() as inner:
            await make().serve(inner, bind=bind)
    await first.is_alive()


async def refused(world, bind: str) -> str:
    """The words with which ``bind`` is refused."""
    with pytest.RaisesGroup(ConfigError, flatten_subgroups=True) as caught:
        async with trio.open_nursery() as nursery:
            await world.serve(nursery, bind=bind)
            nursery.cancel_scope.cancel()
    return str(caught.value.exceptions[0])


@pytest.mark.parametrize(
    "bind", ["", "nonsense", "host:", ":80", "127.0.0.1:99999", "127.0.0.1:-1", "127.0.0.1:8x", "unix:"]
)
async def test_an_address_that_is_none_is_refused(world, bind):
    """A readable line instead of a traceback."""
    assert await refused(world, bind)


async def test_a_taken_port_and_a_wrong_file_are_refused(nursery, make, tmp_path):
    """Somebody else's port, file or missing directory end the start with a readable line."""
    first = make()
    server = await first.serve(nursery)
    assert "in use; use another --port" in await refused(make(), server.address.removeprefix("http://"))
    (tmp_path / "file").write_text("keep me")
    assert "not a socket" in await refused(make(), f"unix:{tmp_path / 'file'}")
    assert (tmp_path / "file").read_text() == "keep me"
    assert "can't listen" in await refused(make(), f"unix:{tmp_path / 'none' / 'x'}")


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "[::]:0"])
async def test_without_authentication_only_this_machine_gets_in(make, bind):
    """Authentication off and an address that others reach: refused."""
    assert "without authentication" in await refused(make(auth=NoAuth()), bind)


async def test_without_authentication_a_unix_socket_is_fine(nursery, make, tmp_path):
    """Its permissions are the authentication."""
    world = make(auth=NoAuth())
    await world.serve(nursery, bind=f"unix:{tmp_path / 'x'}")
    assert (await (await world.connect(token=None)).call("GET", "/v1/jobs")).status == 200


@pytest.mark.parametrize("how", ["close", "cancel"])
async def test_the_end_answers_held_requests_and_takes_no_new_ones(world, how):
    """Closed or cancelled: held requests get 503 with ``Retry-After`` at once, the port is gone, the job is not."""
    async with trio.open_nursery() as nursery:
        server = await world.serve(nursery, grace_s=30)
        client = await world.connect()
        await client.call("POST", "/v1/jobs", JOB)
        await client.send("GET", "/v1/jobs/a?wait_s=60")
        await until(lambda: len(world.app.holds) == 1)
        (server.close if how == "close" else nursery.cancel_scope.cancel)()
        with trio.CancelScope(shield=True), trio.fail_after(2):
            reply = await client.reply()
            with pytest.raises(OSError):  # noqa: PT011 - the kernel says it in its own words
                await (await world.connect()).call("GET", "/healthz")
    assert (reply.status, reply.code, reply.headers["retry-after"]) == (503, "closing", "2")
    assert world.service.find("a", None).record.state == "queued"
    assert server.count.live == 0


async def test_what_is_being_answered_is_finished_in_the_grace_period(world, monkeypatch):
    """A request that the service is working on when the end begins still gets its answer."""
    entered, go = trio.Event(), trio.Event()
    submit = world.service.submit

    async def slow(*args, **options):
        entered.set()
        await go.wait()
        return await submit(*args, **options)

    monkeypatch.setattr(world.service, "submit", slow)
    async with trio.open_nursery() as nursery:
        server = await world.serve(nursery, grace_s=5)
        client = await world.connect()
        await client.send("POST", "/v1/jobs", JOB)
        await entered.wait()
        server.close()
        await trio.testing.wait_all_tasks_blocked()
        go.set()
        with trio.fail_after(2):
            assert (await client.reply()).status == 201


@pytest.mark.slow
async def test_the_grace_period_is_the_bound(world, monkeypatch):
    """A request that does not end is cut, and the server ends."""
    entered = trio.Event()

    async def stuck(*args, **options):
        entered.set()
        await trio.sleep_forever()

    monkeypatch.setattr(world.service, "submit", stuck)
    async with trio.open_nursery() as nursery:
        server = await world.serve(nursery, grace_s=0.1)
        client = await world.connect()
        await client.send("POST", "/v1/jobs", JOB)
        await entered.wait()
        began = trio.current_time()
        server.close()
    assert 0.05 < trio.current_time() - began < 1.5
    with pytest.raises(EOFError):
        await client.reply()


async def test_a_cancelled_start_leaves_nothing(make, tmp_path):
    """At whichever step the start is cancelled, the server ends and its socket is gone."""
    path = tmp_path / "x.sock"
    for steps in range(12):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(make().serve, nursery, f"unix:{path}")
            for _ in range(steps):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert not path.exists(), steps


async def test_it_knows_only_its_own_tokens(nursery, world):
    """The door of the real server is the one of its application."""
    await world.serve(nursery)
    assert (await (await world.connect(ADMIN)).call("GET", "/v1/jobs")).status == 200
    assert (await (await world.connect(ADMIN + "x")).call("GET", "/v1/jobs")).code == "unknown_token"
    assert os.getpid() == (await (await world.connect()).call("GET", "/v1/status")).json["pid"]
