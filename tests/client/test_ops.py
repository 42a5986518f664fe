"""Engines are taken in and out once, and a refusal of a repeat is not told for what the first call did."""

from __future__ import annotations

import pytest

from prorld.client import ClientError
from prorld.wire.ops import AddBackend
from tests.client.serving import error, serving
from tests.client.ways import WAYS, run

pytestmark = pytest.mark.parametrize("way", WAYS)

WANTED = AddBackend(url="http://127.0.0.1:8000", kind="vllm", weight=2.0)
EXISTS = (409, error("backend_exists"))
NOT_THERE = (404, error("not_found"))


def engine(**more):
    return {
        "backend_id": "b-1", "id": "b-1", "url": WANTED.url, "kind": "vllm", "policy": "default", "state": "ready",
        "model": "m", "max_context_tokens": 4096, "weight": 2.0, **more,
    }  # fmt: skip


def engines(*items):
    return (200, {"items": [*items], "generation": 3})


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Repeats come at once."""
    monkeypatch.setattr("prorld.client.caller._BACKOFF_S", (0.001,))


async def added(client):
    return (await client.add_backend(WANTED)).backend_id


@pytest.mark.parametrize(
    "answers",
    [
        [None, EXISTS, engines(engine(backend_id="b-0", url="http://127.0.0.1:1"), engine())],
        # It is being looked at still by the call whose answer was lost.
        [None, EXISTS, engines(), EXISTS, engines(engine())],
        [None, None, (201, engine())],
    ],
)
def test_an_engine_whose_taking_in_was_not_heard_is_taken_in_once(way, answers):
    """What the first call did is the answer."""
    with serving(*answers) as (address, script):
        assert run(way, added, address) == "b-1"
    assert len(script.asked) == len(answers)


@pytest.mark.parametrize("more", [{"weight": 1.0}, {"kind": "sglang"}, {"node": "n"}])
def test_an_engine_that_is_there_otherwise_is_a_refusal(way, more):
    """Somebody else added it, in another way than was asked."""

    async def scenario(client):
        with pytest.raises(ClientError) as caught:
            await added(client)
        return caught.value.stable_code

    with serving(None, lambda method, *_: EXISTS if method == "POST" else engines(engine(**more))) as (address, _):
        assert run(way, scenario, address, patience_s=0.05) == "backend_exists"


def test_an_engine_that_was_there_before_is_a_refusal(way):
    """No answer was lost, so it was not this call."""

    async def scenario(client):
        with pytest.raises(ClientError) as caught:
            await added(client)
        return caught.value.stable_code

    with serving(EXISTS) as (address, script):
        assert run(way, scenario, address) == "backend_exists"
    assert len(script.asked) == 1


def test_an_engine_whose_taking_out_was_not_heard_is_gone(way):
    """That it is not there any more is what was wanted; one that never was is a refusal."""

    async def scenario(client):
        await client.remove_backend("b-1")
        with pytest.raises(ClientError) as caught:
            await client.remove_backend("b-2")
        return caught.value.stable_code

    with serving(None, NOT_THERE, NOT_THERE) as (address, script):
        assert run(way, scenario, address) == "not_found"
    assert len(script.asked) == 3
