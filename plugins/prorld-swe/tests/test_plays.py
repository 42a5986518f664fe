"""Every play's reward, in real sandboxes: the repair, nothing, a harmless change, and each known cheat."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from prorld.testing.jobs import HandlerRun
from prorld_swe.cheats import CHEATS
from prorld_swe.config import SweConfig

pytestmark = pytest.mark.slow

Played = Callable[..., Awaitable[HandlerRun]]
NAMES = ["empty", "malformed", "gold", "wrong", *(f"cheat:{name}" for name in CHEATS)]


@pytest.mark.parametrize("name", NAMES)
async def test_each_play_gets_its_reward(row: dict[str, Any], played: Played, name: str) -> None:
    """As it is told before any engine is paid for."""
    run = await played(row, name)
    assert ("suspicious.history" in run.metrics) == (name == "cheat:history")
    assert ("suspicious.environment" in run.metrics) == (name == "cheat:environment")
    assert not any(metric.startswith("suspicious.") for metric in run.metrics) or name.startswith("cheat:")


UNSEEN = {
    "patched_pytest": "tampered",
    "patched_pytest_hidden": "tampered",
    "swallowed_failures": "tampered",
    "patched_unittest": "tampered",
    "early_exit": "",
    "system_exit": "",
    "skipped_asserts": "",
}


@pytest.mark.parametrize(("name", "what"), UNSEEN.items(), ids=list(UNSEEN))
async def test_the_run_itself_withstands_what_the_look_at_the_code_does_not_see(
    row: dict[str, Any], played: Played, name: str, what: str
) -> None:
    """As if the code of the cheat were written so that nobody understands it."""
    run = await played(row, f"cheat:{name}", SweConfig(forbidden=(), test_least_s=15.0, test_limit_s=15.0))
    assert f"suspicious.{what}" in run.metrics or not what
