"""What an old trainer hears of engines that don't serve: in /status, at once where waiting is in vain, at its end."""

from __future__ import annotations

import pytest
import trio

from prorld.errors import (
    BackendError,
    EngineBusy,
    HandlerError,
    Impossible,
    MalformedReply,
    Overloaded,
    ProrldError,
    Unsupported,
)
from prorld.rollout.compat.troubles import NAMED_MAX, is_final, sentence
from prorld.wire.ops import AddBackend
from tests.http.compat_support import ENGINE, OTHER, TENANT, compat_world
from tests.http.raw_client import Reply, until


@pytest.mark.parametrize(
    ("error", "final"),
    [
        (Impossible("no such policy"), True),
        (Overloaded("the pool is full"), False),
        (BackendError("nobody listens", code="engine_unreachable"), False),
        (BackendError("no such path", status=404), True),
        (BackendError("a key is wanted", status=401), True),
        (BackendError("later", status=429), False),
        (BackendError("it starts", status=503), False),
        (EngineBusy("paused", status=409), False),
        (MalformedReply("a web page"), True),
        (Unsupported("no token ids"), True),
        (HandlerError("not of an engine"), False),
    ],
)
def test_what_is_worth_waiting_for(error: ProrldError, final: bool) -> None:
    """An engine that is not up, or busy; not what answers and is none."""
    assert is_final(error) is final


def test_not_all_of_many_are_named() -> None:
    """A thousand addresses are one line still."""
    assert sentence(["a", "b"]) == "a; b"
    assert sentence([str(n) for n in range(NAMED_MAX + 3)]) == "0; 1; 2; 3; 4; and 3 more"


async def test_status_says_which_engine_does_not_answer_as_long_as_it_does_not():
    """And why; there is no word of it where all serve, and the other fields are what they were."""
    async with compat_world() as world:
        other = world.engine(OTHER)
        other.die()
        await world.ready(ENGINE)
        serves = (await world.call("GET", "/status")).json
        assert "detail" not in serves
        reply = await world.call("POST", "/add_llm_server", {"address": OTHER})
        assert (reply.status, reply.json) == (200, {"status": f"Added LLM server address: {OTHER}"})
        status = (await world.call("GET", "/status")).json
        assert status == {**serves, "detail": f"{OTHER}: {OTHER} can't be reached"}
        # One of two is enough.
        assert (await world.process()).status == 200
        other.revive()
        await until(lambda: len(world.room.pool.list(TENANT).items) == 2)
        assert (await world.call("GET", "/status")).json == serves


async def test_an_engine_that_nobody_can_wait_for_is_503_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What answers at the address is no engine; when one is there after all, jobs are taken again."""
    async with compat_world() as world:
        engine = world.engine(ENGINE)
        wrong = BackendError(f"GET /models of {ENGINE} was answered with 404", status=404)
        monkeypatch.setattr(engine, "probe", failing(wrong))
        await world.ready(ENGINE)
        for reply in (await world.process(), await world.call("POST", "/run", row())):
            assert (reply.status, reply.code) == (503, "no_backend")
            assert "was answered with 404" in reply.json["detail"]
        assert await world.jobs() == []
        monkeypatch.undo()
        await until(lambda: bool(world.room.pool.list(TENANT).items))
        assert (await world.process()).status == 200


async def test_engines_of_the_configuration_are_waited_for_after_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come by themselves a moment later: what a trainer asks again after a restart waits, but not for ever."""
    async with compat_world(expects=True) as world:
        engine = world.engine(ENGINE)
        replies: list[Reply] = []

        async def ask() -> None:
            replies.append(await world.call("POST", "/run", row()))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await until(lambda: len(world.app._gym._runs) == 1)
            await world.room.pool.add(AddBackend(url=engine.url, kind="openai", policy=TENANT))
        assert [reply.status for reply in replies] == [200]
        await world.room.pool.remove(world.room.pool.list(TENANT).items[0].backend_id)
        monkeypatch.setattr("prorld.rollout.compat.service.COME_S", 0.0)
        assert (await world.call("POST", "/run", row())).code == "no_backend"


async def test_a_job_that_waited_in_vain_is_told_why():
    """The engine may come yet, so the job waits; when its time is up, the reason is in the words."""
    async with compat_world(total_s=0.3) as world:
        world.engine(ENGINE).die()
        await world.ready(ENGINE)
        reply = await world.process("x")
        assert (reply.status, reply.code) == (504, "job_timeout")
        assert f"{ENGINE} can't be reached" in reply.json["detail"]


async def test_an_engine_that_was_taken_away_is_said_to_be():
    """By an operator: it does not come back by itself, so nobody waits for it."""
    async with compat_world() as world:
        await world.ready(ENGINE)
        await world.room.pool.remove(world.room.pool.list(TENANT).items[0].backend_id)
        reply = await world.process()
        assert (reply.status, reply.code) == (503, "no_backend")
        assert f"{ENGINE} was removed" in reply.json["detail"]


def failing(error: BackendError):
    """A probe that ends like this."""

    async def probe():
        raise error

    return probe


def row() -> dict[str, object]:
    """A row of NeMo Gym."""
    return {"responses_create_params": {"input": "x"}, "data_source": "task"}
