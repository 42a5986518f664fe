"""Sandboxes of every wall for the hostile suites."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from prorld.sandbox.contract import Sandbox, SandboxRuntime
from prorld.sandbox.warden_client import Warden
from prorld.testing.sandbox_contract import open_sandbox
from tests.sandbox.walls import Wall, wall_parameters


@pytest.fixture(params=wall_parameters())
def wall(request: pytest.FixtureRequest) -> Wall:
    """Every wall, one after the other."""
    given: Wall = request.param
    return given


@pytest.fixture
async def runtime(wall: Wall, warden: Warden, runtime_dir: Path) -> SandboxRuntime:
    """The wall's runtime, in place of the one that the tests beside this directory use."""
    return wall.make(warden, runtime_dir)


@pytest.fixture
async def sandbox(wall: Wall, runtime: SandboxRuntime) -> AsyncIterator[Sandbox]:
    """One sandbox of it."""
    async with open_sandbox(runtime, wall.spec()) as opened:
        yield opened


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Says a figure that was measured, whatever is captured."""

    def say(figure: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n    {figure}")

    return say
