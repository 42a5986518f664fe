"""The math handler: instances, prompts, and verdicts by the real grader in a real child."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest
import trio

from prorld.domain.job import AgentLimits
from prorld.domain.messages import ToolCall
from prorld.handlers import (
    BadRequest,
    CommandResult,
    GraderError,
    HandlerError,
    SandboxSpec,
    Turn,
    open_grader,
    tool_call,
)
from prorld.handlers.registry import decode_instance
from prorld.testing.fake_sandbox import FakeRuntime
from prorld.testing.handlers import check_handler
from prorld.testing.jobs import run_handler
from prorld.testing.plays import turns_of
from prorld_math import MathInstance, examples
from prorld_math.handler import MathConfig, MathHandler
from prorld_math.paper import MathVerdict

LIMIT_S = 2.0

Case = tuple[str, str]


async def grade_all(cases: Iterable[Case]) -> dict[Case, MathVerdict | GraderError]:
    """All cases by two warm children: the import is paid once."""
    found: dict[Case, MathVerdict | GraderError] = {}
    async with open_grader("prorld_math.grading:grade", MathVerdict, children=2, limit_s=LIMIT_S) as grader:

        async def one(case: Case) -> None:
            try:
                found[case] = await grader.grade({"said": case[0], "gold": case[1]})
            except GraderError as exc:
                found[case] = exc

        async with trio.open_nursery() as nursery:
            for case in cases:
                nursery.start_soon(one, case)
    return found


RIGHT = [
    (r"\boxed{34}", "34"),
    (r"\boxed{34.0}", "34"),
    (r"\boxed{0.5}", r"\frac{1}{2}"),
    (r"\boxed{\dfrac{1}{2}}", "0.5"),
    (r"\boxed{1/2}", r"\frac12"),
    (r"\boxed{\frac{7}{12}}", "7/12"),
    (r"\boxed{\sqrt{12}}", r"2\sqrt{3}"),
    (r"\boxed{(x+1)^2}", "x^2+2x+1"),
    (r"\boxed{\{2, 1\}}", r"\{1,2\}"),
    (r"\boxed{2, 1}", "1,2"),
    (r"\boxed{(1, 2)}", "(1,2)"),
    (r"\boxed{[0, \infty)}", r"[0,\infty)"),
    (r"\boxed{1,000}", "1000"),
    (r"\boxed{0.1}", r"10\%"),
    (r"\boxed{x = 10}", "10"),
    (r"\boxed{A}", r"\text{A}"),
    (r"\boxed{5\text{ cm}}", "5"),
    (r"\boxed{\$5}", "5"),
    (r"\boxed{90^\circ}", "90"),
    (r"\boxed{e^{x^{2}}}", "e^{x^2}"),
    (r"\boxed{3 \times 10^{2}}", "300"),
    (r"\boxed{2i+1}", "1+2i"),
    (r"\boxed{12.}", "12"),
    ("Answer: 34", "34"),
    ("The answer is $34$.", r"\boxed{34}"),
    (r"first \boxed{1}, no: \boxed{34}", "34"),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
]
WRONG = [
    (r"\boxed{35}", "34"),
    (r"\boxed{-34}", "34"),
    (r"\boxed{34} or rather \boxed{35}", "34"),
    (r"\boxed{33, 34}", "34"),
    (r"\boxed{34 \text{ and } 35}", "34"),
    (r"\boxed{[1,2]}", "(1,2)"),
    (r"\boxed{0.333}", r"\frac{1}{3}"),
    (r"\boxed{3.14}", r"\pi"),
    (r"\boxed{30+4}", "34"),
    (r"\boxed{B}", "A"),
    (r"\boxed{x}", "34"),
    (r"\boxed{}", "34"),
    ("34", "34"),
    ("", "34"),
    ("I do not know.", "34"),
    (r"\boxed{\text{all of them}}", "34"),
]
HOSTILE = [
    (r"\boxed{9^{9^{9^9}}}", "34"),
    (r"\boxed{9^{999999999}}", r"\frac{1}{3}"),
    (r"\boxed{10^{10^{10}}}", "x+1"),
    (r"\boxed{999999999!}", "x+1"),
    (r"\boxed{((((9!)!)!)!)}", "x+1"),
    (r"\boxed{\binom{10^{9}}{5*10^{8}}}", "x+1"),
    (r"\boxed{\sum_{n=1}^{10^{9}} \frac{1}{n}}", "x+1"),
    (r"\boxed{\prod_{n=1}^{99999} (1+\frac{1}{n^2})}", "x+1"),
    (r"\boxed{(x+y+z+w)^{80}}", "x+1"),
    (r"\boxed{" + "(" * 200 + "1" + ")" * 200 + "}", "34"),
    (r"\boxed{" + "{" * 140 + "1" + "}" * 140 + "}", "34"),
    (r"\boxed{" + r"\frac{1}{" * 19 + "2" + "}" * 19 + "}", "x+1"),
    (r"\boxed{" + r"\sin(" * 19 + "1" + ")" * 19 + "}", "x+1"),
    (r"\boxed{" + "1" * 100_000 + "}", "34"),
    ("9" * 100_000, "34"),
    (r"\boxed{" * 14_000, "34"),
    ("Answer: " + "(" * 100_000, "34"),
    (r"\boxed{\x00\ud83d 34 __import__('os')}", "34"),
    (r"\boxed{1/0}", "34"),
    (r"\boxed{\infty - \infty}", "34"),
]
UNREADABLE = [(r"\boxed{34}", "###"), (r"\boxed{34}", "\\")]


@pytest.mark.slow
async def test_verdicts():
    """Right answers however they are written; near misses, several at once, sums not worked out, and none at all.

    A right answer that can't be read is an error, not a zero: the instance is broken and the policy not to blame.
    """
    found = await grade_all([*RIGHT, *WRONG, *UNREADABLE])
    errors = [case for case, verdict in found.items() if isinstance(verdict, GraderError)]
    right = [case for case, verdict in found.items() if isinstance(verdict, MathVerdict) and verdict.correct]
    assert sorted(errors) == sorted(UNREADABLE)
    assert sorted(right) == sorted(RIGHT)
    assert len(found) == len(RIGHT) + len(WRONG) + len(UNREADABLE)


@pytest.mark.slow
async def test_hostile_answers_end_within_the_limits():
    """Wrong, or no verdict at all: never right, and never something that goes on."""
    began = trio.current_time()
    found = await grade_all(HOSTILE)
    assert trio.current_time() - began < 60 + LIMIT_S * len(HOSTILE)
    assert len(found) == len(HOSTILE)
    for case, verdict in found.items():
        if isinstance(verdict, GraderError):
            assert verdict.stable_code in {"grader_timeout", "grader_failed", "grader_crashed"}, case
        else:
            assert not verdict.correct, case


def terminal(session: str, code: str) -> CommandResult:
    """A sandbox that answers every cell with 34."""
    assert session == "python"
    return CommandResult(exit_code=0, output=b"34\n")


INSTANCE = {"problem": "What is 17 times 2?", "answer": "34"}
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "Find x."}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "a"},
}
NEMO = {"question": "What is 17 times 2?", "expected_answer": 34}


@pytest.fixture
async def handler() -> AsyncIterator[MathHandler]:
    """An open handler."""
    handler = MathHandler(MathConfig(graders=1))
    async with handler.open():
        yield handler


@pytest.mark.slow
async def test_the_handler_keeps_the_contract():
    """For every shape of instance, and for some of its own examples."""
    own = [{"problem": example.problem, "answer": example.answer} for example in examples()]
    await check_handler(MathHandler(), [INSTANCE, DAPO, NEMO, *own[::4]])


@pytest.mark.slow
async def test_a_problem_is_solved_with_a_tool(handler: MathHandler):
    """A cell in the sandbox, then the boxed answer."""
    call = Turn(content="", tool_calls=(ToolCall(id="1", name="python", arguments={"code": "17*2"}),), sampled=9)
    run = await run_handler(handler, INSTANCE, turns=[call, r"It is \boxed{34}."], runtime=FakeRuntime(terminal))
    assert run.grade.reward == 1.0
    assert run.grade.parts == {"correct": 1.0, "answered": 1.0}
    assert run.tool_calls == ["python"]
    assert [message.role for message in run.transcript] == ["system", "user", "assistant", "tool", "assistant"]


class Asked(FakeRuntime):
    """A runtime that keeps which session each sandbox was to begin with."""

    first: str | None = None

    async def run(self, spec: SandboxSpec, **options: Any) -> None:
        self.first = spec.first
        await super().run(spec, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("tool", "first"), [("python", "python"), ("bash", "bash")])
async def test_the_session_that_a_job_can_use_comes_up_first(handler: MathHandler, tool: str, first: str):
    """An image without Python is enough for a job that has a shell alone."""
    runtime = Asked(terminal)
    await run_handler(handler, INSTANCE, turns=["No idea."], limits=AgentLimits(tools=[tool]), runtime=runtime)
    assert runtime.first == first


@pytest.mark.slow
async def test_a_job_without_tools_needs_no_sandbox(handler: MathHandler):
    """Nothing is started that nobody uses."""
    run = await run_handler(handler, NEMO, turns=["No idea."], limits=AgentLimits(tools=[]))
    assert run.grade.reward == 0.0
    assert run.grade.parts["answered"] == 0.0


@pytest.mark.slow
async def test_a_sum_may_count_where_the_configuration_says_so():
    """Some data sets are graded that way."""
    handler = MathHandler(MathConfig(simplified=False))
    async with handler.open():
        run = await run_handler(handler, INSTANCE, turns=[r"\boxed{30+4}"], limits=AgentLimits(tools=[]))
    assert run.grade.reward == 1.0


async def test_a_handler_that_is_not_open_can_not_grade():
    """It says so, and gives no zero."""
    with pytest.RaisesGroup(HandlerError):
        await run_handler(MathHandler(), INSTANCE, turns=["x"], limits=AgentLimits(tools=[]))


@pytest.mark.parametrize(
    ("instance", "gold", "roles"),
    [
        (INSTANCE, "34", ["system", "user"]),
        (NEMO, "34", ["system", "user"]),
        (DAPO, "34", ["system", "user"]),
        ({"prompt": "x?", "answer": 0.5}, "0.5", ["system", "user"]),
        (
            {**DAPO, "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x?"}]},
            "34",
            ["system", "user"],
        ),
    ],
)
def test_each_shape_of_instance_is_understood(instance: dict[str, Any], gold: str, roles: list[str]):
    """One system message, the problem, and the right answer as text."""
    decoded = decode_instance(MathHandler(), instance)
    assert isinstance(decoded, MathInstance)
    assert decoded.gold == gold
    assert [message.role for message in MathHandler().prompt(decoded)] == roles


@pytest.mark.parametrize(
    "instance",
    [
        {},
        {"problem": "x?"},
        {"answer": "5"},
        {"problem": "", "answer": "5"},
        {"problem": "x?", "answer": ""},
        {"problem": "x?", "answer": ["5"]},
        {"prompt": [], "answer": "5"},
        {"prompt": [{"role": "system", "content": "x"}], "answer": "5"},
        {"prompt": [{"role": "assistant", "content": "x"}], "answer": "5"},
        {"problem": "x" * 100_001, "answer": "5"},
    ],
)
def test_an_incomplete_instance_is_refused(instance: dict[str, Any]):
    """At submit, not in EVAL."""
    with pytest.raises(BadRequest, match="instance"):
        decode_instance(MathHandler(), json.loads(json.dumps(instance)))


def test_the_daemon_never_imports_the_verifier():
    """Only the children pay for it, and only they can be harmed by it."""
    assert "math_verify" not in sys.modules
    assert "sympy" not in sys.modules


@pytest.mark.slow
async def test_a_policy_that_tries_the_network_is_told(handler: MathHandler):
    """As with every handler."""
    call = tool_call("python", code="import urllib.request\nurllib.request.urlopen('https://answers.example')")
    turns = turns_of([call, r"\boxed{34}"], handler.allowed_tools)
    run = await run_handler(handler, INSTANCE, turns=turns, runtime=FakeRuntime(terminal))
    assert run.grade.reward == 1.0
    assert run.metrics["suspicious.network"] == 1
