"""The handler ``calc``: a prompt with one worked example, the calculator, and an exact grade."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from prorld.agents import Dialect, Tool
from prorld.domain.messages import Message, system, user
from prorld.domain.outcome import StopReason
from prorld.handlers import AgentHandler, Grade, JobContext, Play, RunResult, SandboxSpec
from prorld_calc.generate import CalcInstance
from prorld_calc.language import CalcDialect, calculator
from prorld_calc.plays import plays_of

__all__ = ["CalcHandler"]

# Short, because a small model is distracted by every word more: with a wordier rule it solves a third as many.
_SYSTEM = "Use the calculator: write CALC: expression. Then write ANSWER: number."


class CalcHandler(AgentHandler[CalcInstance]):
    """Sums in several turns."""

    name = "calc"
    instance_type = CalcInstance
    data_sources: ClassVar[tuple[str, ...]] = ("calc",)
    allowed_tools: ClassVar[frozenset[str]] = frozenset()

    def sandbox_spec(self, instance: CalcInstance) -> SandboxSpec:
        """The embedded default, for a calculator alone: an interpreter of the plainest kind, and no shell."""
        return SandboxSpec(kernel="plain", first="python")

    def tools(self, job: JobContext[CalcInstance]) -> Sequence[Tool]:
        """The calculator."""
        return [calculator()]

    def dialect(self, job: JobContext[CalcInstance]) -> Dialect:
        """One line a turn."""
        return CalcDialect()

    def prompt(self, instance: CalcInstance) -> Sequence[Message]:
        """The rules, one worked example, the question."""
        return [
            system(_SYSTEM),
            user("What is 87 plus 12?"),
            Message(role="assistant", content="CALC: 87 + 12"),
            user("RESULT: 99"),
            Message(role="assistant", content="ANSWER: 99"),
            user(instance.question),
        ]

    def plays(self, instance: CalcInstance) -> Sequence[Play]:
        """Right and wrong ones, in the language of the task."""
        return plays_of(instance)

    async def evaluate(self, job: JobContext[CalcInstance], result: RunResult) -> Grade:
        """1 for the right number, said as the answer. The job's events say what it was."""
        said = result.answer if result.stop is StopReason.FINISHED else None
        right = said is not None and int(said) == job.instance.answer
        job.progress("graded", answer=said, right=job.instance.answer, stop=result.stop.value)
        return Grade(
            reward=float(right),
            parts={"correct": float(right), "used_calculator": float(bool(result.data.get("used_calculator")))},
        )
