"""The handler choice: shapes of instances, the order of options, and its plays."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from prorld.domain.job import AgentLimits
from prorld.handlers import BadRequest, CommandResult, Impossible, tool_call
from prorld.handlers.registry import decode_instance
from prorld.sandbox.runtime import Runtime
from prorld.testing.fake_sandbox import FakeRuntime
from prorld.testing.handlers import check_handler
from prorld.testing.jobs import run_handler
from prorld.testing.plays import turns_of
from prorld_stem import ChoiceInstance
from prorld_stem.choice import ChoiceConfig, ChoiceHandler
from prorld_stem.choice_instance import make_sheet
from prorld_stem.stem import StemHandler

INSTANCE: dict[str, Any] = {
    "question": "Which metal is liquid at room temperature?",
    "options": ["iron", "mercury", "copper", "bismuth"],
    "answer": "B",
}
NEMO: dict[str, Any] = {
    "responses_create_params": {
        "input": [
            {"role": "user", "content": "Put the letter into a box.\nWhich planet is the largest?\nA: Mars\nB: Jupiter"}
        ]
    },
    "options": [{"A": "Mars"}, {"B": "Jupiter"}],
    "expected_answer": "B",
    "grading_mode": "strict_single_letter_boxed",
    "uuid": "1",
    "metadata": {"explanation": "none"},
}
MODES = ["strict_single_letter_boxed", "lenient_boxed", "lenient_answer_colon", "lenient_answer_colon_md", "lenient"]


def decoded(instance: dict[str, Any]) -> ChoiceInstance:
    found = decode_instance(ChoiceHandler(), instance)
    assert isinstance(found, ChoiceInstance)
    return found


@pytest.mark.slow
async def test_the_handler_keeps_the_contract():
    """For each shape of instance."""
    await check_handler(ChoiceHandler(), [INSTANCE, NEMO])


def test_a_prompt_that_lists_its_options_is_taken_apart():
    """What is shown lists them once, in the sheet's order."""
    found = decoded(NEMO)
    assert found.asked == "Put the letter into a box.\nWhich planet is the largest?"
    shown = ChoiceHandler().prompt(found)[1].content
    assert shown.count("Jupiter") == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"answer": "E"},
        {"answer": "BB"},
        {"answer": None},
        {"options": ["iron"]},
        {"options": [{"A": "iron"}, {"C": "copper"}]},
        {"options": [{"B": "iron"}, {"A": "copper"}]},
        {"options": ["iron", ""]},
        {"question": None},
        {"question": ""},
        {"grading_mode": "guess"},
    ],
)
def test_an_instance_that_can_not_be_graded_is_refused(wrong: dict[str, Any]):
    """At submit."""
    with pytest.raises(BadRequest, match="instance"):
        decode_instance(ChoiceHandler(), {**INSTANCE, **wrong})


def test_the_right_letter_is_everywhere_alike():
    """Over many questions that all have it at B, each letter is right about as often; the text stays the same."""
    letters: Counter[str] = Counter()
    for number in range(400):
        instance = decoded({**INSTANCE, "question": f"Question {number}?"})
        sheet = make_sheet(instance, shuffle=True, seed=0)
        assert sheet.options[sheet.letters.index(sheet.gold)] == "mercury"
        assert sorted(sheet.options) == sorted(INSTANCE["options"])
        letters[sheet.gold] += 1
    assert set(letters) == set("ABCD")
    assert min(letters.values()) > 60


def test_a_seed_of_its_own_gives_a_job_its_own_order():
    """The same for the same seed; without one it is that of the question."""
    instance = decoded(INSTANCE)
    orders = {make_sheet(instance, shuffle=True, seed=seed).options for seed in range(40)}
    assert len(orders) > 10
    assert make_sheet(instance, shuffle=True, seed=3) == make_sheet(instance, shuffle=True, seed=3)
    assert make_sheet(instance, shuffle=False, seed=3).options == tuple(INSTANCE["options"])


@pytest.mark.parametrize(
    "last", ["All of the above", "None of these", "Both A and B", "A and C", "Neither", "(A) and (B)", "any of them"]
)
def test_options_that_speak_of_others_stay(last: str):
    """Their words would be about something else."""
    instance = decoded({**INSTANCE, "options": ["iron", "mercury", "copper", last]})
    orders = {make_sheet(instance, shuffle=True, seed=seed).options for seed in range(20)}
    assert orders == {("iron", "mercury", "copper", last)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("instance", [INSTANCE, NEMO], ids=["own", "nemo"])
async def test_every_play_is_worth_what_it_says(instance: dict[str, Any], mode: str):
    """Gold 1, all others 0, in each mode; the event names both letters."""
    handler = ChoiceHandler()
    asked = {**instance, "grading_mode": mode}
    async with handler.open():
        plays = handler.plays(decoded(asked))
        for play in plays:
            run = await run_handler(handler, asked, turns=play, limits=AgentLimits(tools=[]))
            assert run.grade.reward == play.reward, play.name
            told = dict(run.events)["graded"]
            assert (told["letter"] == told["gold"]) is (play.name == "gold")
    assert [play.name for play in plays if play.reward == 1.0] == ["gold"]
    assert len(plays) >= 12


async def test_the_order_of_a_job_is_the_one_it_is_graded_by():
    """A job's metadata has the seed; prompt and grade agree on it."""
    handler = ChoiceHandler(ChoiceConfig(seed=5, reward_wrong=-1.0))
    async with handler.open():
        run = await run_handler(handler, INSTANCE, turns=[r"\boxed{A}"])
    listed = run.transcript[1].content
    right = next(line for line in listed.splitlines() if line.endswith(": mercury"))[0]
    assert run.grade.reward == (1.0 if right == "A" else -1.0)
    assert dict(run.events)["graded"]["gold"] == right


async def test_many_boxes_are_told():
    """They do not count, and are seen."""
    handler = ChoiceHandler()
    async with handler.open():
        run = await run_handler(handler, INSTANCE, turns=[r"\boxed{A} \boxed{B} \boxed{C} \boxed{D}"])
    assert run.metrics["suspicious.boxes"] == 4


async def test_a_search_that_is_not_there_is_refused():
    """At submit, and with the way to ask for it in the words."""
    with pytest.RaisesGroup(Impossible):
        await run_handler(ChoiceHandler(), INSTANCE, turns=["x"], limits=AgentLimits(tools=["web_search"]))


@pytest.mark.slow
async def test_the_right_option_is_nowhere_in_the_sandbox(runtime: Runtime):
    """The policy looks through all that it can read."""
    handler = ChoiceHandler()
    async with handler.open():
        (play,) = [one for one in handler.plays(decoded(INSTANCE)) if one.name == "cheat:environment"]
        limits = AgentLimits(tools=["python"])
        run = await run_handler(handler, INSTANCE, turns=play, runtime=runtime, limits=limits)
    observed = [message.content.strip() for message in run.transcript if message.role == "tool"]
    assert observed == ["nothing found"]
    assert run.grade.reward == 0.0


def said_nothing(_session: str, _text: str) -> CommandResult:
    """What its Python answers."""
    return CommandResult(exit_code=0, output=b"")


@pytest.mark.parametrize(
    ("handler", "instance"),
    [(ChoiceHandler(), INSTANCE), (StemHandler(), {"question": "How fast is light?", "answer": "299792458 m/s"})],
    ids=["choice", "stem"],
)
async def test_a_policy_that_tries_the_network_is_told(handler: ChoiceHandler | StemHandler, instance: dict[str, Any]):
    """As with every handler."""
    call = tool_call("python", code="import urllib.request\nurllib.request.urlopen('https://answers.example')")
    turns = turns_of([call, r"\boxed{299792458 m/s}"], handler.allowed_tools)
    async with handler.open():
        limits = AgentLimits(tools=["python"])
        run = await run_handler(handler, instance, turns=turns, limits=limits, runtime=FakeRuntime(said_nothing))
    assert run.metrics["suspicious.network"] == 1
