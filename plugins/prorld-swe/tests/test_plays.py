"""Every play's reward, in real sandboxes: the repair, nothing, a harmless change, and each known cheat."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from prorld.domain.messages import ToolCall
from prorld.handlers import Play, Turn
from prorld.sandbox.runtime import Runtime
from prorld.testing.jobs import HandlerRun, run_handler
from prorld_swe.cheats import CHEATS
from prorld_swe.config import SweConfig
from prorld_swe.handler import SweHandler
from prorld_swe.instance import SweInstance

pytestmark = pytest.mark.slow

NAMES = ["empty", "malformed", "gold", "wrong", *(f"cheat:{name}" for name in CHEATS)]
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


def spoken(text: str) -> Turn:
    """A turn of a play, with the call that is written in it."""
    match = _CALL.search(text)
    try:
        call = json.loads(match.group(1)) if match else None
    except ValueError:
        call = None
    if call is None:
        return Turn(content=text, sampled=len(text))
    written = ToolCall(id="1", name=call["name"], arguments=call["arguments"])
    return Turn(content="", tool_calls=(written,), sampled=len(text))


async def played(row: dict[str, Any], runtime: Runtime, play: str | Play, config: SweConfig | None = None) -> HandlerRun:
    """The run of one play."""
    handler = SweHandler(config or SweConfig(test_least_s=4.0, test_limit_s=4.0))
    if isinstance(play, str):
        import msgspec

        plays = {each.name: each for each in handler.plays(msgspec.convert(row, SweInstance))}
        play = plays[play]
    async with handler.open():
        run = await run_handler(handler, row, turns=[spoken(turn) for turn in play.turns], runtime=runtime)
    print(play.name, run.grade, run.metrics, run.events)
    assert run.grade.reward == play.reward, (play.name, run.grade, run.metrics, run.events)
    return run


@pytest.mark.parametrize("name", NAMES)
async def test_each_play_gets_its_reward(row: dict[str, Any], runtime: Runtime, name: str) -> None:
    await played(row, runtime, name)
