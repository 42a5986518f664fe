"""Questions for the calculator task: ``python -m prorld_calc.generate`` prints them as JSON lines.

The same seed gives the same questions, on every machine.
"""

from __future__ import annotations

import argparse
import random
import sys

import msgspec

__all__ = ["CalcInstance", "main", "make_instances"]

_WORDS = {"+": "plus", "-": "minus", "*": "times"}
_FORMS = ("What is {}?", "Work out {}.", "Please compute {}.")


class CalcInstance(msgspec.Struct, frozen=True, kw_only=True):
    """One question and the whole number that answers it."""

    question: str
    answer: int


def make_instances(count: int, *, seed: int = 0, hard: float = 0.5) -> list[CalcInstance]:
    """``count`` questions over numbers from 10 to 999; a share ``hard`` of them has three terms."""
    source = random.Random(seed)  # noqa: S311  (questions, not secrets)
    return [_make(source, hard) for _ in range(count)]


def _make(source: random.Random, hard: float) -> CalcInstance:
    terms = 3 if source.random() < hard else 2
    signs = [source.choice("+-" if terms == 3 else "+-*") for _ in range(terms - 1)]
    numbers = [source.randrange(10, 1000) for _ in range(len(signs) + 1)]
    answer, words = numbers[0], str(numbers[0])
    for sign, number in zip(signs, numbers[1:], strict=True):
        answer = _apply(sign, answer, number)
        words += f" {_WORDS[sign]} {number}"
    return CalcInstance(question=source.choice(_FORMS).format(words), answer=answer)


def _apply(sign: str, left: int, right: int) -> int:
    match sign:
        case "+":
            return left + right
        case "-":
            return left - right
        case _:
            return left * right


def main(arguments: list[str] | None = None) -> None:
    """Print instances as JSON lines."""
    parser = argparse.ArgumentParser(prog="python -m prorld_calc.generate", description="Print calculator questions.")
    parser.add_argument("--count", type=int, default=10, help="how many questions (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same questions (default: 0)")
    parser.add_argument("--hard", type=float, default=0.5, help="share of questions with three terms (default: 0.5)")
    options = parser.parse_args(arguments)
    for instance in make_instances(options.count, seed=options.seed, hard=options.hard):
        sys.stdout.write(msgspec.json.encode(instance).decode() + "\n")


if __name__ == "__main__":
    main()
