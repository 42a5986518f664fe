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
<<<<<<< HEAD
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


async def played(
    row: dict[str, Any], runtime: Runtime, play: str | Play, config: SweConfig | None = None
) -> HandlerRun:
    """The run of one play."""
    handler = SweHandler(config or SweConfig(test_least_s=4.0, test_limit_s=4.0))
    if isinstance(play, str):
        plays = {each.name: each for each in handler.plays(msgspec.convert(row, SweInstance))}
        play = plays[play]
    async with handler.open():
        run = await run_handler(handler, row, turns=[spoken(turn) for turn in play.turns], runtime=runtime)
    assert run.grade.reward == play.reward, (play.name, run.grade, run.metrics, run.events)
    return run
=======
>>>>>>> swe


@pytest.mark.parametrize("name", NAMES)
async def test_each_play_gets_its_reward(row: dict[str, Any], played: Played, name: str) -> None:
    """As it is told before any engine is paid for."""
    await played(row, name)


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
