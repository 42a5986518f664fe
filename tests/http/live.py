"""The application over a real supervisor with fake engines and sandboxes, for tests that need jobs which really run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio

from tests.http.support import World
from tests.rollout.support import Room, room


class LiveWorld(World):
    """A server in front of a room."""

    def __init__(self, made: Room, **options: Any) -> None:
        super().__init__(service=made.supervisor, looks=made.looks, policies=made.policies, **options)
        self.room = made


@asynccontextmanager
async def live_world(*, room_options: dict[str, Any] | None = None, **options: Any) -> AsyncIterator[LiveWorld]:
    """A running server; everything is gone when the block ends."""
    async with room(**room_options or {}) as made, trio.open_nursery() as nursery:
        world = LiveWorld(made, **options)
        try:
            await world.serve(nursery)
            yield world
        finally:
            nursery.cancel_scope.cancel()
            world.close()
