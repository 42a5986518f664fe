"""Every runtime keeps the promises of the contract: the fake under a virtual clock, bubblewrap in real time."""

from __future__ import annotations

import pytest
import trio.testing

from prorld.sandbox.bubblewrap import BubblewrapRuntime
from prorld.testing.fake_sandbox import FakeRuntime
from prorld.testing.sandbox_contract import SandboxCheck, sandbox_checks


@pytest.mark.parametrize("check", sandbox_checks(shell=False), ids=lambda check: check.name)
async def test_fake(check: SandboxCheck, autojump_clock: trio.testing.MockClock) -> None:
    """The fake answers as the contract says, so what is tested against it holds against the real ones."""
    runtime = FakeRuntime()
    await check.run(runtime)
    assert runtime.live == {}


@pytest.mark.parametrize("check", sandbox_checks(), ids=lambda check: check.name)
async def test_bubblewrap(check: SandboxCheck, runtime: BubblewrapRuntime) -> None:
    """Bubblewrap answers as the contract says."""
    await check.run(runtime)
