"""Each play gets the reward that it names, in real sandboxes, and the events say why."""

from __future__ import annotations

from typing import Any

import pytest

from prorld.domain.job import AgentLimits
from prorld.handlers import Play
from prorld.handlers.registry import decode_instance
from prorld.sandbox.runtime import Runtime
from prorld.testing.jobs import HandlerRun, run_handler
from prorld.testing.plays import turns_of
from prorld_math import MathInstance
from prorld_math.handler import MathConfig, MathHandler

INSTANCES: list[dict[str, Any]] = [
    {"problem": "What is 1234567 times 7654321?", "answer": "9449772114007"},
    {"problem": "Which fraction is 0.75?", "answer": "\\frac{3}{4}"},
    {"problem": "Solve x^2 = 4.", "answer": "-2, 2"},
]
# How the grade came about where more than one way would do.
HOW = {
    "gold": "text",
    "empty": "none",
    "malformed": "none",
    "cheat:unboxed": "none",
    "cheat:environment": "none",
    "cheat:stuck": "none",
    "cheat:tower": "unreasonable",
    "cheat:factorials": "unreasonable",
    "cheat:nesting": "unreasonable",
    "cheat:length": "unreasonable",
}


def plays_of(handler: MathHandler, instance: dict[str, Any]) -> list[Play]:
    decoded = decode_instance(handler, instance)
    assert isinstance(decoded, MathInstance)
    return list(handler.plays(decoded))


@pytest.mark.slow
async def test_every_play_is_worth_what_it_says(runtime: Runtime):
    """Gold 1, all others 0; the trace says how the grade came about."""
    handler = MathHandler(MathConfig(tool_s=3.0))
    runs: dict[str, HandlerRun] = {}
    async with handler.open():
        plays = plays_of(handler, INSTANCES[0])
        for play in plays:
            runs[play.name] = await run_handler(handler, INSTANCES[0], turns=play, runtime=runtime)
    assert {name: run.grade.reward for name, run in runs.items()} == {play.name: play.reward for play in plays}
    assert [play.name for play in plays if play.reward > 0] == ["gold"]
    how = {name: dict(run.events)["graded"]["how"] for name, run in runs.items()}
    assert {name: how[name] for name in HOW} == HOW
    assert runs["cheat:many-boxes"].metrics["suspicious.boxes"] > 10
    assert runs["cheat:tower"].metrics["suspicious.grader_attacked"] == 1
    assert not any(name.startswith("suspicious.") for name in runs["gold"].metrics)


@pytest.mark.slow
@pytest.mark.parametrize("instance", INSTANCES[1:], ids=["fraction", "list"])
async def test_plays_hold_for_answers_of_other_kinds(instance: dict[str, Any]):
    """What calls no tool needs no sandbox."""
    handler = MathHandler()
    async with handler.open():
        plays = plays_of(handler, instance)
        for play in plays:
            limits = AgentLimits(tools=[])
            run = await run_handler(handler, instance, turns=play, limits=limits)
            assert run.grade.reward == play.reward, play.name


@pytest.mark.slow
async def test_the_answer_is_nowhere_in_the_sandbox(runtime: Runtime):
    """Neither in the environment, nor in a file, nor in the interpreter that runs cells."""
    handler = MathHandler()
    async with handler.open():
        (play,) = [one for one in plays_of(handler, INSTANCES[0]) if one.name == "cheat:environment"]
        run = await run_handler(handler, INSTANCES[0], turns=play, runtime=runtime)
    observed = [message.content for message in run.transcript if message.role == "tool"]
    assert [text.strip() for text in observed] == ["nothing found"]


@pytest.mark.slow
async def test_the_search_would_see_a_leak(runtime: Runtime):
    """An answer that does stand in the environment is found: the check can fail."""
    leaked = {"problem": "Where are programs?", "answer": "/usr/bin"}
    handler = MathHandler()
    async with handler.open():
        (play,) = [one for one in plays_of(handler, leaked) if one.name == "cheat:environment"]
        run = await run_handler(handler, leaked, turns=play, runtime=runtime)
    observed = [message.content for message in run.transcript if message.role == "tool"]
    assert [text.strip() for text in observed] == ["leaked"]


@pytest.mark.slow
async def test_a_cell_that_swallows_signals_ends_at_its_limit(runtime: Runtime):
    """The policy is told, its interpreter replaced, and the episode goes on."""
    handler = MathHandler(MathConfig(tool_s=1.0))
    async with handler.open():
        (play,) = [one for one in plays_of(handler, INSTANCES[0]) if one.name == "cheat:stuck"]
        turns = [*turns_of(play.turns, handler.allowed_tools)[:1], "\\boxed{9449772114007}"]
        run = await run_handler(handler, INSTANCES[0], turns=turns, runtime=runtime)
    assert run.grade.reward == 1.0
    (observed,) = [message.content for message in run.transcript if message.role == "tool"]
    assert "1 s" in observed


@pytest.mark.slow
async def test_the_policy_is_told_what_its_python_has(runtime: Runtime):
    """The sandbox shows this interpreter's packages, and is asked; a job without Python is told nothing."""
    handler = MathHandler()
    async with handler.open():
        first = await run_handler(handler, INSTANCES[0], turns=["no"], runtime=runtime)
        again = await run_handler(handler, INSTANCES[0], turns=["no"], runtime=runtime)
    assert "numpy" in first.transcript[0].content
    assert "sympy" in first.transcript[0].content
    assert again.transcript[0] == first.transcript[0]


@pytest.mark.slow
async def test_a_wrong_answer_is_worth_what_the_configuration_says():
    """Minus one, as DAPO has it; the plays know it."""
    handler = MathHandler(MathConfig(reward_wrong=-1.0))
    async with handler.open():
        plays = {play.name: play for play in plays_of(handler, INSTANCES[0])}
        run = await run_handler(
            handler,
            INSTANCES[0],
            turns=plays["wrong"],
            limits=AgentLimits(tools=[]),
        )
    assert plays["wrong"].reward == run.grade.reward == -1.0
    assert run.grade.parts["correct"] == 0.0
