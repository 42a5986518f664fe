"""Worlds for the tests of the HTTP room, with every client connection closed at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from tests.http.support import World


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., World]]:
    """Makes applications over the fakes."""
    worlds: list[World] = []

    def build(**options) -> World:
        worlds.append(World(**options))
        return worlds[-1]

    try:
        yield build
    finally:
        for world in worlds:
            world.close()


@pytest.fixture
async def world(make) -> World:
    """One such application."""
    return make()
