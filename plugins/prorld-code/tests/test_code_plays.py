"""The plays in real sandboxes: gold wins, and nothing else does."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from prorld.handlers import Play
from prorld.sandbox.runtime import Runtime
from prorld_code import examples
from tests.tasks import code_support
from tests.tasks.code_support import graded, plays, turns_of, why

runtime, runtime_dir = code_support.runtime, code_support.runtime_dir

KINDS = dict(zip(("program", "function", "check"), examples(), strict=True))
CASES = [
    pytest.param(instance, play, id=f"{kind}-{play.name}")
    for kind, instance in KINDS.items()
    for play in plays(instance)
]


@pytest.mark.slow
@pytest.mark.parametrize(("instance", "play"), CASES)
async def test_a_play_gets_its_reward(instance: dict[str, Any], play: Play, runtime: Runtime) -> None:
    """And what it did leads to a grade, never to an error; the events say why."""
    run = await graded(runtime, instance, *turns_of(play), test_s=1.0)
    assert run.grade.reward == play.reward
    assert (why(run) is None) == (play.reward == 1.0)
    assert runtime.list() == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gold", "wrong", "cheat:exit"])
async def test_a_play_can_hand_in_a_file(name: str, runtime: Runtime) -> None:
    """Where the configuration wants one, the same plays write it."""
    play = next(play for play in plays(KINDS["program"], answer="file") if play.name == name)
    run = await graded(runtime, KINDS["program"], *turns_of(play), answer="file")
    assert run.grade.reward == play.reward
    assert run.tool_calls == ["python"]


def test_every_example_has_a_full_set_of_plays() -> None:
    """So that preflight has something to prove."""
    for instance in KINDS.values():
        names = [play.name for play in plays(instance)]
        assert {"gold", "empty", "wrong", "malformed"} <= set(names)
        assert sum(name.startswith("cheat:") for name in names) >= 12
        assert len(names) == len(set(names))
        assert msgspec.convert(msgspec.to_builtins(plays(instance)), list[Play]) == list(plays(instance))
