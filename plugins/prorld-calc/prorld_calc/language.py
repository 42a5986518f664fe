"""The action language of the task, and the calculator behind it.

``CALC: expression`` is an act, ``ANSWER: number`` the end. An expression is checked against a narrow alphabet before it
goes to the sandbox; what is wrong with it is a ``RESULT`` of its own, for the policy to learn from.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from prorld.agents import Act, Action, Answer, Malformed, Observation, Reply, Tool, sandbox_tool
from prorld.domain.messages import Message, user
from prorld.handlers import Sandbox, Turn

__all__ = ["HINT", "CalcDialect", "calculator", "problem_with"]

HINT = "Write CALC: and an expression, or ANSWER: and a number."
EXPRESSION_CHARS = 60
DIGITS = 12
CALC_S = 5.0

_CALC = re.compile(r"CALC:[ \t]*(.+)")
_ANSWER = re.compile(r"ANSWER:[ \t]*(-?[0-9]{1,60})\.?")
_ALPHABET = re.compile(r"[0-9+\-* ()]+")
_NUMBER = re.compile(r"-?[0-9]+")


class CalcDialect:
    """One line a turn; results are said by the user."""

    @property
    def offers_schemas(self) -> bool:
        """The prompt explains the language; no template has to."""
        return False

    def read(self, turn: Turn) -> Sequence[Action]:
        """The one thing that the turn does."""
        said = turn.content.strip()
        if (answer := _ANSWER.fullmatch(said)) is not None:
            return [Answer(text=answer[1])]
        if (calc := _CALC.fullmatch(said)) is not None:
            return [Act(tool="calculator", arguments={"expression": calc[1]})]
        return [Malformed(hint=HINT)]

    def say(self, replies: Sequence[Reply]) -> Sequence[Message]:
        """The result, or the hint."""
        return [user(reply.text) for reply in replies]


class _Expression(msgspec.Struct, frozen=True, kw_only=True):
    expression: Annotated[str, Meta(description="Whole numbers, + - * and brackets.")]


def calculator() -> Tool:
    """The calculator: Python in the sandbox."""
    return sandbox_tool("calculator", "Work out an expression.", _Expression, _calculate)


def problem_with(expression: str) -> str | None:
    """Why an expression is not worked out, if so."""
    if len(expression) > EXPRESSION_CHARS:
        return "the expression is too long"
    if _ALPHABET.fullmatch(expression) is None:
        return "only whole numbers, + - * and brackets can be used"
    if "**" in expression:
        return "there are no powers"
    if any(len(number) > DIGITS for number in re.findall(r"[0-9]+", expression)):
        return "a number is too long"
    return None


async def _calculate(arguments: _Expression, sandbox: Sandbox, limit_s: float) -> Observation:
    if (problem := problem_with(arguments.expression)) is not None:
        return Observation(text=f"RESULT: error, {problem}")
    result = await sandbox.python(f"print({arguments.expression})", limit_s=min(limit_s, CALC_S))
    number = result.text.strip()
    if result.exit_code != 0 or result.timed_out or _NUMBER.fullmatch(number) is None:
        return Observation(text="RESULT: error, the expression can't be worked out")
    return Observation(text=f"RESULT: {number}", data={"used_calculator": True})
