"""The bridge and the handler, with the environments of this package."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from prorld.handlers import BadRequest, HandlerError
from prorld.handlers.registry import decode_instance
from prorld.testing.jobs import HandlerRun, run_handler
from prorld_gym.extract import extracted
from prorld_gym.guards import Refused, plain_value
from prorld_gym.handler import GymHandler
from prorld_gym.instance import GymConfig, GymInstance

GUESS = {"data_source": "gem", "env": "prorld_gym.example:GuessEnv", "seed": 3, "config": {"highest": 8}}
CAPITALS = {"data_source": "verifiers", "env": "prorld_gym.example:Capitals", "index": 1}
SUM = {
    "data_source": "reasoning_gym",
    "question": "State the final answer to the following arithmetic problem: 4 - 1 - 7 =",
    "answer": "-4",
    "metadata": {"source_dataset": "chain_sum"},
}


async def said(handler: GymHandler, instance: dict[str, Any], *turns: str) -> HandlerRun:
    return await run_handler(handler, instance, turns=list(turns))


async def every_play_of_a_ready_row(handler: GymHandler) -> None:
    """Gold 1, everything else 0, and no play costs the grade."""
    plays = handler.plays(msgspec.convert(SUM, GymInstance))
    found = {play.name: (await said(handler, SUM, *play.turns)).grade.reward for play in plays}
    assert found == {play.name: play.reward for play in plays}
    assert found["gold"] == 1.0


async def a_generated_task_is_the_same_for_policy_and_scorer(handler: GymHandler) -> None:
    """The question is made from the seed in RUN, and scored from it in EVAL."""
    instance = {"env": "chain_sum", "seed": 5, "index": 3}
    run = await said(handler, instance, "<answer>0</answer>")
    problem = run.transcript[1].content.rpartition(": ")[2].removesuffix(" =")
    right = await said(handler, instance, f"<answer>{eval(problem)}</answer>")
    assert (run.grade.reward, right.grade.reward) == (0.0, 1.0)


async def half_a_character_is_no_way_out(handler: GymHandler) -> None:
    """A lone surrogate can't be sent to any scorer; said with it, an answer is graded all the same."""
    for instance in (SUM, GUESS, CAPITALS):
        run = await said(handler, instance, *["<answer>\ud800</answer>"] * 6)
        assert run.grade.reward == 0.0


async def an_episode(handler: GymHandler) -> None:
    """Step by step, with the rewards of its steps; what comes after the end is not asked for."""
    run = await said(handler, GUESS, *(f"<answer>{n}</answer>" for n in (1, 2, 3, 4, 5, 6)))
    number = len(run.result.data["actions"])
    assert run.transcript[-1].content == f"<answer>{number}</answer>"
    assert run.grade.reward == 1.0
    assert run.grade.step_rewards == [(turn, float(turn == number - 1)) for turn in range(number)]
    lost = await said(handler, GUESS, *["nothing"] * 6)
    assert lost.grade.reward == 0.0
    assert lost.grade.parts["return"] == pytest.approx(-0.6)


async def every_play_of_an_episode(handler: GymHandler) -> None:
    """None of them is worth anything, and none costs the grade."""
    for play in handler.plays(msgspec.convert(GUESS, GymInstance)):
        assert (await said(handler, GUESS, *play.turns)).grade.reward == play.reward == 0.0, play.name


async def a_rubric(handler: GymHandler) -> None:
    """Its functions by what they ask for, weighted; each is a part."""
    run = await said(handler, CAPITALS, "It is Helsinki.")
    assert run.transcript[0].content == "End with the name of the city."
    assert (run.grade.reward, run.grade.parts["short"]) == (1.0, 1.0)
    assert (await said(handler, CAPITALS, "It is Oslo.")).grade.reward == 0.0


async def what_can_not_be_made_is_no_zero(handler: GymHandler) -> None:
    """An unknown generator, keywords that it does not have, a module that is not allowed: the instance's fault."""
    for instance in (
        {"env": "no_such_generator"},
        {"env": "chain_sum", "config": {"no_such": 1}},
        {"data_source": "gem", "env": "os:getcwd"},
    ):
        with pytest.RaisesGroup(HandlerError):
            await said(handler, instance, "<answer>1</answer>")


async def a_broken_environment_is_told_from_a_breaking_action(handler: GymHandler) -> None:
    """What only a policy's action does is worth nothing; what an environment does by itself is no grade."""
    hangs = {"data_source": "gem", "env": "prorld_gym.example:GuessEnv", "config": {"highest": 0}}
    with pytest.RaisesGroup(HandlerError):
        await said(handler, hangs, "1")


@pytest.mark.slow
async def test_the_handler_and_its_bridge() -> None:
    """One after the other with one handler: importing the libraries takes seconds."""
    handler = GymHandler(GymConfig(children=1, step_s=60.0, score_s=60.0, make_s=60.0))
    async with handler.open():
        await every_play_of_a_ready_row(handler)
        await a_generated_task_is_the_same_for_policy_and_scorer(handler)
        await an_episode(handler)
        await every_play_of_an_episode(handler)
        await a_rubric(handler)
        await half_a_character_is_no_way_out(handler)
        await what_can_not_be_made_is_no_zero(handler)
        await a_broken_environment_is_told_from_a_breaking_action(handler)


def test_what_is_read_as_a_plain_value() -> None:
    """Values and arithmetic, and nothing that is a program."""
    assert plain_value("[1, [2, 'a'], -3.5]") == [1, [2, "a"], -3.5]
    assert plain_value("(0x1f + 2) >> 1") == 16
    for source in (
        "__import__('os')",
        "().__class__",
        "[x for x in (1,)]",
        "open",
        "lambda: 0",
        "f'{1}'",
        "9**9**9",
        "1 << 99999999",
        "(" * 2000,
        "1" * 30_000,
        "",
    ):
        with pytest.raises(Refused):
            plain_value(source)


@pytest.mark.parametrize("instance", [{}, {"question": "?"}, {"env": ""}, {"env": "x", "seed": -1}, {"env": 5}])
def test_an_incomplete_instance_is_refused(instance: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        decode_instance(GymHandler(), instance)


@pytest.mark.parametrize(
    ("text", "mode", "answer"),
    [
        ("<answer> 5 </answer>", "tags", "5"),
        ("<answer>4</answer> no: <answer>5</answer>", "tags", "5"),
        ("5", "tags", None),
        ("</answer>5<answer>", "tags", None),
        ("so\n5\n", "tags-or-last-line", "5"),
        ("", "tags-or-last-line", None),
        (" a b ", "all", "a b"),
        ("<answer>" * 50_000, "tags", None),
    ],
)
def test_where_an_answer_stands(text: str, mode: Any, answer: str | None) -> None:
    assert extracted(text, mode) == answer
