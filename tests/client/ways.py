"""One scenario, three ways: a client that blocks, and one that awaits, under trio and under asyncio.

A scenario is written as a coroutine over an ``AsyncClient``. For ``sync`` it gets a ``Client`` in that form; then it
never waits for an event loop, and is run without one.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any

import anyio

from prorld.client import AsyncClient, Client

WAYS = ("sync", "trio", "asyncio")
Scenario = Callable[[AsyncClient], Coroutine[Any, Any, Any]]


class Awaited:
    """A ``Client`` whose calls are awaited."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @property
    def address(self):
        return self._client.address

    def __getattr__(self, name):
        method = getattr(self._client, name)

        def called(*args, **kwargs):
            if name in ("groups", "rollouts", "batch_events"):
                return _items(method(*args, **kwargs))
            found = method(*args, **kwargs) if name == "policy_update" else None
            return _awaited(method, args, kwargs) if found is None else _opened(found)

        return called


async def _awaited(method, args, kwargs):
    return method(*args, **kwargs)


async def _items(items):  # noqa: ASYNC900 - it never awaits
    for item in items:
        yield item


@asynccontextmanager
async def _opened(manager: AbstractContextManager[Any]):
    with manager as inside:
        yield inside


def run(way: str, scenario: Scenario, *args: Any, **options: Any) -> Any:
    """What a scenario comes to with a client of this kind; the client is closed then."""
    if way == "sync":
        with Client(*args, **options) as client:
            return _without_a_loop(scenario(Awaited(client)))  # type: ignore[arg-type]

    async def main():
        async with AsyncClient(*args, **options) as client:
            return await scenario(client)

    return anyio.run(main, backend=way)


def _without_a_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise AssertionError("it waits for an event loop")
