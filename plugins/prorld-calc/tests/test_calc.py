"""The calculator task: its language, its calculator, its grade."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorld.agents import Act, Answer, Malformed
from prorld.domain.job import AgentLimits
from prorld.domain.outcome import StopReason
from prorld.handlers import CommandResult, Impossible, Turn
from prorld.testing.fake_sandbox import FakeRuntime
from prorld.testing.handlers import check_handler
from prorld.testing.jobs import run_handler
from prorld_calc.generate import CalcInstance, main, make_instances
from prorld_calc.handler import CalcHandler
from prorld_calc.language import HINT, CalcDialect, problem_with

INSTANCE = {"question": "What is 769 plus 377 minus 824?", "answer": 322}


def abacus(session: str, code: str) -> CommandResult:
    """A sandbox whose Python prints sums; all that the calculator may ask of one."""
    assert session == "python"
    printed: list[object] = []
    try:
        exec(code, {"__builtins__": {"print": printed.append}})
    except (SyntaxError, TypeError, ValueError) as exc:
        return CommandResult(exit_code=1, output=repr(exc).encode())
    return CommandResult(exit_code=0, output=f"{printed[0]}\n".encode())


async def play(*said: str | Turn, runtime: FakeRuntime | None = None):
    runtime = runtime or FakeRuntime(abacus)
    run = await run_handler(CalcHandler(), INSTANCE, turns=list(said), runtime=runtime)
    assert not runtime.live
    return run


@pytest.mark.parametrize("answer", [322, -5, 0, 10**14])
async def test_every_play_comes_to_its_reward(answer: int):
    """Also where the number is too long for the calculator; only the gold one is worth anything."""
    instance = {"question": "What is it?", "answer": answer}
    plays = CalcHandler().plays(CalcInstance(question="What is it?", answer=answer))
    assert {play.name for play in plays} >= {"gold", "empty", "wrong", "malformed", "cheat:own-result"}
    for play in plays:
        turns = [*play.turns, *play.turns[-1:] * 3]
        run = await run_handler(CalcHandler(), instance, turns=turns, runtime=FakeRuntime(abacus))
        assert run.grade.reward == play.reward == float(play.name == "gold"), play.name
        used = play.name in {"gold", "wrong"} and answer < 10**12
        assert run.grade.parts["used_calculator"] == float(used), play.name
        told = dict(run.events)["graded"]
        assert (told["answer"] == str(answer), told["right"]) == (play.name == "gold", answer), play.name


@pytest.mark.slow
async def test_the_handler_keeps_the_contract():
    """For generated instances, too."""
    generated = json.loads(json.dumps([{"question": i.question, "answer": i.answer} for i in make_instances(5)]))
    await check_handler(CalcHandler(), [INSTANCE, {**INSTANCE, "data_source": "calc", "index": 7}, *generated])


async def test_a_solved_question_gets_the_reward():
    """Two calculations and the answer; results come back as user messages."""
    run = await play("CALC: 769 + 377", "CALC: 1146 - 824", "ANSWER: 322")
    assert run.grade.reward == 1.0
    assert run.grade.parts == {"correct": 1.0, "used_calculator": 1.0}
    assert run.result.stop is StopReason.FINISHED
    assert [m.content for m in run.transcript if m.role == "user"][-2:] == ["RESULT: 1146", "RESULT: 322"]
    assert run.tool_calls == ["calculator", "calculator"]


@pytest.mark.parametrize("answer", ["ANSWER: 321", "ANSWER: -322", "ANSWER: 3220"])
async def test_a_wrong_number_gets_nothing(answer: str):
    """The grade is exact."""
    run = await play(answer)
    assert run.grade.reward == 0.0
    assert run.grade.parts["used_calculator"] == 0.0


async def test_a_line_that_is_neither_gets_a_hint_and_three_end_the_episode():
    """An episode that ends so has no reward, whatever numbers were in it."""
    run = await play("It is 322.", "322", "The answer is 322", "ANSWER: 322")
    assert run.result.stop is StopReason.MALFORMED
    assert run.grade.reward == 0.0
    assert [m.content for m in run.transcript if m.role == "user"][-2:] == [HINT, HINT]


async def test_a_hint_can_be_followed():
    """The policy may do better after it."""
    run = await play("It is 322.", "ANSWER: 322")
    assert run.grade.reward == 1.0


async def test_an_answer_that_was_cut_off_does_not_count():
    """More digits could have followed."""
    run = await play(Turn(content="ANSWER: 322", sampled=9, truncated=True))
    assert run.result.stop is StopReason.MAX_TOKENS
    assert run.grade.reward == 0.0


@pytest.mark.parametrize(
    "expression",
    [
        "2 ** 9",
        "9**9**9",
        "__import__('os')",
        "1/0",
        "1;2",
        "1, 2",
        "0x1F",
        "1e9",
        "1\u0661",
        "9" * 13,
        "1+" * 40 + "1",
        "",
    ],
)
async def test_what_is_not_a_plain_sum_never_reaches_the_sandbox(expression: str):
    """The alphabet is narrow and powers are not in it."""
    runtime = FakeRuntime(abacus)
    run = await play(f"CALC: {expression}", "ANSWER: 322", runtime=runtime)
    assert runtime.calls == 0
    last = [m.content for m in run.transcript if m.role == "user"][-1]
    assert last.startswith("RESULT: error, ") or last == HINT
    assert run.grade.reward == 1.0


@pytest.mark.parametrize("expression", ["87(12)", "1 +", "()", "007", "1) + (2", "* 2"])
async def test_a_sum_that_python_refuses_is_an_error_result(expression: str):
    """The policy is told, without the interpreter's words."""
    run = await play(f"CALC: {expression}", "ANSWER: 1")
    assert [m.content for m in run.transcript if m.role == "user"][-1] == (
        "RESULT: error, the expression can't be worked out"
    )
    assert run.grade.parts["used_calculator"] == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        CommandResult(exit_code=0, output=b"5\n6\n"),
        CommandResult(exit_code=0, output=b""),
        CommandResult(exit_code=0, output=b"5", timed_out=True),
        CommandResult(exit_code=1, output=b"5"),
    ],
)
async def test_only_a_single_number_is_a_result(answer: CommandResult):
    """Anything else that a sandbox prints is an error result."""
    run = await play("CALC: 2 + 3", "ANSWER: 1", runtime=FakeRuntime(lambda *_: answer))
    assert [m.content for m in run.transcript if m.role == "user"][-1].startswith("RESULT: error")


async def test_a_job_may_not_ask_for_other_tools():
    """The calculator is the task."""
    with pytest.RaisesGroup(Impossible):
        await run_handler(
            CalcHandler(), INSTANCE, turns=[], runtime=FakeRuntime(abacus), limits=AgentLimits(tools=["bash"])
        )


@pytest.mark.parametrize(
    ("said", "action"),
    [
        ("CALC: 1 + 1", Act(tool="calculator", arguments={"expression": "1 + 1"})),
        ("  CALC:1+1\n", Act(tool="calculator", arguments={"expression": "1+1"})),
        ("ANSWER: 5", Answer(text="5")),
        ("ANSWER: -5.", Answer(text="-5")),
        ("ANSWER: 5.5", Malformed(hint=HINT)),
        ("ANSWER: five", Malformed(hint=HINT)),
        ("CALC: 1 + 1\nRESULT: 2\nANSWER: 2", Malformed(hint=HINT)),
        ("", Malformed(hint=HINT)),
    ],
)
def test_a_turn_is_one_line(said: str, action: object):
    """A policy that also writes the result itself has not used the calculator."""
    assert CalcDialect().read(Turn(content=said)) == [action]


@given(st.text(max_size=80))
def test_every_turn_can_be_read_and_every_checked_expression_is_harmless(text: str):
    """Nothing raises, and what passes the check has only digits, three signs and brackets."""
    (action,) = CalcDialect().read(Turn(content=text))
    assert isinstance(action, Act | Answer | Malformed)
    if problem_with(text) is None:
        assert set(text) <= set("0123456789+-* ()")
        assert "**" not in text


@given(st.integers(0, 10_000), st.floats(0, 1))
def test_generated_answers_are_right(seed: int, hard: float):
    """Checked with Python's own precedence; the same seed gives the same questions."""
    instances = make_instances(3, seed=seed, hard=hard)
    assert instances == make_instances(3, seed=seed, hard=hard)
    for instance in instances:
        words = instance.question.rstrip("?.").replace("plus", "+").replace("minus", "-").replace("times", "*")
        expression = words.partition(next(c for c in words if c.isdigit()))
        assert eval(expression[1] + expression[2]) == instance.answer


def test_the_share_of_hard_questions_is_what_was_asked_for():
    """None, or all."""
    assert all(len(i.question.split()) <= 5 for i in make_instances(50, hard=0))
    assert all(len(i.question.split()) >= 6 for i in make_instances(50, hard=1))


def test_the_command_prints_json_lines(capsys: pytest.CaptureFixture[str]):
    """Ready to be posted."""
    main(["--count", "3", "--seed", "1"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 3
    assert set(lines[0]) == {"question", "answer"}
