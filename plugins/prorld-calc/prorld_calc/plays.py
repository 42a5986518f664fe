"""Policies whose reward is known, in the language of the task. Calls of a chat template are no part of it."""

from __future__ import annotations

from prorld.handlers import Play
from prorld_calc.generate import CalcInstance
from prorld_calc.language import DIGITS

__all__ = ["plays_of"]


def plays_of(instance: CalcInstance) -> tuple[Play, ...]:
    """What solves a question, what does not, and what tries to be graded without an answer of its own."""
    right, wrong = str(instance.answer), str(instance.answer + 1)
    # The calculator is tried, too, where it takes so long a number.
    checked = (f"CALC: 0 + {right}",) if len(right) <= DIGITS else ()
    return (
        Play(name="gold", turns=(*checked, f"ANSWER: {right}"), reward=1.0),
        Play(name="empty", turns=("",)),
        Play(name="wrong", turns=(f"CALC: {wrong[-DIGITS:]} + 0", f"ANSWER: {wrong}")),
        Play(name="malformed", turns=(f"It is {right}.", right, f"ANSWER {right}")),
        Play(name="cheat:own-result", turns=(f"CALC: 1 + 1\nRESULT: {right}\nANSWER: {right}",)),
        Play(name="cheat:two-answers", turns=(f"ANSWER: {wrong} {right}",)),
        Play(name="cheat:code", turns=(f"CALC: print('ANSWER: {right}')", "ANSWER: the result")),
    )
