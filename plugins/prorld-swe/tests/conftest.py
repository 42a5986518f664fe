"""Real sandboxes, and a small package of our own with a bug, as a distribution in a cache of packages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prorld.handlers import Play
from prorld.sandbox.runtime import Runtime
from prorld.testing.jobs import HandlerRun, run_handler
from prorld.testing.real_sandboxes import real_sandboxes
from prorld_swe.config import SweConfig
from prorld_swe.handler import SweHandler
from prorld_swe.instance import SweInstance
from tests.tasks.tinycalc import row_of, write_sdist

LIMIT_S = 15.0


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The distribution, in a cache of packages of its own."""
    return write_sdist(tmp_path_factory.mktemp("packages"))


@pytest.fixture
def row(sdist: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An instance of the package with its bug."""
    monkeypatch.setenv("PRORLD_PACKAGES", str(sdist.parent.parent))
    return row_of(sdist)


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    """Real sandboxes."""
    async with real_sandboxes() as opened:
        yield opened


@pytest.fixture
def played(runtime: Runtime) -> Callable[..., Awaitable[HandlerRun]]:
    """Runs a play, by its name or as it is given, and holds the grade to its reward."""

    async def play_it(row: dict[str, Any], play: str | Play, config: SweConfig | None = None) -> HandlerRun:
        handler = SweHandler(config or SweConfig(test_least_s=LIMIT_S, test_limit_s=LIMIT_S))
        if isinstance(play, str):
            play = {each.name: each for each in handler.plays(msgspec.convert(row, SweInstance))}[play]
        async with handler.open():
            run = await run_handler(handler, row, turns=play, runtime=runtime)
        assert run.grade.reward == play.reward, (play.name, run.grade, run.metrics, run.events)
        return run

    return play_it
