"""Callers that leave in the middle, and what they send that is no such thing, on the listener for other trainers."""

from __future__ import annotations

import pytest
import trio

from prorld.errors import Forgotten
from tests.http.compat_support import ENGINE, OTHER, TENANT, compat_world
from tests.http.raw_client import until


@pytest.mark.parametrize("place", ["/" + "a" * 300, "/" + "a/" * 2000, "/a\0b", "relative", "/etc/shadow/x"])
async def test_a_tokenizer_that_can_be_no_path_is_only_noted(place):
    """The policy's own is used, and the result says so."""
    async with compat_world() as world:
        await world.ready()
        reply = await world.process(params={"custom_tokenizer": place})
        assert reply.status == 200, reply.body
        assert "policy's own tokenizer" in reply.json["noted"]["custom_tokenizer"]


async def test_engines_are_cleared_although_the_trainer_leaves():
    """Whoever hangs up in the middle of it leaves no engine behind, in the pool or on the disk."""
    async with compat_world() as world:
        await world.ready(ENGINE, OTHER)
        with trio.CancelScope() as leaving:
            leaving.cancel()
            await world.service.clear_engines()
        assert world.room.pool.list(TENANT).items == []
        assert world.service._kept._file.load().addresses == []
        assert (await world.process()).code == "no_backend"


async def test_a_start_that_nobody_waited_for_is_not_written_down_later():
    """It was given up before it was on the disk, so a next life must not be started either."""
    async with compat_world() as world:
        file = world.service._kept._file
        async with trio.open_nursery() as nursery, file._turn:
            nursery.start_soon(world.service.start)
            await until(lambda: file._turn.statistics().tasks_waiting == 1)
            nursery.cancel_scope.cancel()
        world.engine(ENGINE)
        await world.call("POST", "/add_llm_server", {"address": ENGINE})
        assert (await world.call("GET", "/status")).code == "not_started"
        assert not file.load().started


async def test_a_result_that_was_forgotten_is_asked_for_once(monkeypatch):
    """The daemon kept it no longer than it keeps any; the next try runs the job anew."""
    async with compat_world() as world:
        await world.ready()
        client = await world.connect()
        body = {"instance": {"data_source": "task", "seconds": {"run": 0.2}}, "job_id": "x"}
        await client.send("POST", "/process", body)
        await until(lambda: len(world.service._jobs.tries) == 1)
        client.stream.socket.close()
        await until(lambda: len(world.service._jobs.tries) == 0)

        async def stored(*_: object) -> None:
            await trio.lowlevel.checkpoint()
            raise Forgotten("job x is not kept any more")

        with monkeypatch.context() as patched:
            patched.setattr(world.room.supervisor, "stored", stored)
            assert (await world.call("POST", "/process", body)).status == 410
        reply = await world.call("POST", "/process", body)
        assert (reply.status, reply.json["prorld_job_id"] != "x") == (200, True)


@pytest.mark.parametrize("headers", [{"Origin": "http://["}, {"Host": "["}, {"Host": "[::1"}, {"Origin": "null"}])
async def test_what_is_no_origin_is_a_foreign_one(headers):
    """It is refused as one, and is no error of the daemon."""
    async with compat_world() as world:
        reply = await world.call("POST", "/start", headers=headers)
        assert (reply.status, reply.code.startswith("foreign_")) == (403, True)
