"""The grader: runs in a child process that may be killed at any moment, and is never imported by the daemon.

math-verify's own limits work by signals and are switched off: the child has limits of its own.
"""

from __future__ import annotations

import logging
import math
import resource
import signal
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from prorld_math.answer import final_answer, is_unreasonable, is_worked_out, same_text
from prorld_math.paper import MathPaper, MathVerdict

__all__ = ["grade", "warm_up"]

# It warns about the limits that are switched off, once in every forked child.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def grade(paper: MathPaper) -> MathVerdict:
    """Judge an answer. Raises for a right answer that can't be read: that says nothing about the policy."""
    _bound_cpu(paper.cpu_s)
    answer = final_answer(paper.said)
    gold = final_answer(paper.gold) or paper.gold
    if answer is None:
        return MathVerdict(correct=False, answer=None, how="none")
    if not paper.by_value:
        if same_text(answer, gold):
            return MathVerdict(correct=True, answer=answer, how="text")
        if is_unreasonable(answer, gold):
            return MathVerdict(correct=False, answer=answer[:100], how="unreasonable")
        if paper.simplified and not is_worked_out(answer, gold):
            return MathVerdict(correct=False, answer=answer, how="not_worked_out")
    wanted = _read(gold)
    if not wanted:
        raise ValueError(f"the right answer can't be read: {gold[:100]!r}")
    given = _read(answer.rstrip("."))
    if not given:
        return MathVerdict(correct=False, answer=answer, how="unreadable")
    correct = bool(verify(wanted, given, timeout_seconds=0))
    return MathVerdict(correct=correct, answer=answer, how="value")


def warm_up() -> None:
    """Build what math-verify and sympy build on first use: without it every grade would, in its own process."""
    for gold, answer in (
        ("\\frac{1}{2}", "0.25"),
        ("2\\sqrt{3}", "\\sqrt{11}"),
        ("x^2+2x+1", "(x+2)^2"),
        ("(1,2)", "\\{1\\}"),
    ):
        verify(_read(gold), _read(answer), timeout_seconds=0)


def _bound_cpu(seconds: float) -> None:
    # The kernel ends what computes for longer, also within one instruction of Python. Time that other processes of the
    # machine take does not count, so that an end by this signal is the comparison's own doing.
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = math.ceil(seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)


def _read(answer: str) -> list[Any]:
    # The box as a whole or nothing: looking for numbers in what can't be read would find one in any nonsense.
    whole: list[Any] = parse(
        f"\\boxed{{{answer}}}",
        extraction_config=[LatexExtractionConfig()],
        fallback_mode="no_fallback",
        parsing_timeout=0,
    )
    return whole
