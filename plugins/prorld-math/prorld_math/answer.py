"""Finding the final answer in what a policy said, and telling what can be no answer. Pure text, linear in its length.

Knows nothing of mathematics beyond what it takes to see that an expression was not worked out.
"""

from __future__ import annotations

import re

from prorld.domain.answers import boxed, last_box, stated

__all__ = ["boxes", "final_answer", "is_unreasonable", "is_worked_out", "same_text"]

ANSWER_CHARS = 300
NESTING = 20

_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?")
_SCIENTIFIC = re.compile(r"-?\d+(?:\.\d+)?(?:\\times|\\cdot|\*)10(?:\^|\*\*)\{?-?\d{1,3}\}?")
_LEFT_TO_DO = re.compile(
    r"[\d)}](?:\+|-|\*|\^|!|\\times|\\cdot|\\div)"
    r"|\\(?:sum|prod|int|lim|[dt]?binom|sqrt|min|max|gcd|lcm|lfloor|lceil|log|ln|lg|exp|sin|cos|tan|bmod|pmod|mod)"
    r"|\\operatorname"
)
# A unit is words, and may have a power: cm^2.
_UNIT = re.compile(r"\\(?:text|textrm|mathrm|mbox)\{[^{}]*\}(?:\^\{?-?\d\}?)?")
_EXPLOSIVE = re.compile(
    r"\d\}?(?:\^|\*\*)[{(]*\d+\}?(?:\^|\*\*)"  # a tower of numbers
    r"|(?:\^|\*\*)[{(]*\d{5,}"  # a power that needs more digits than there is room for
    r"|\d{5,}!|!\)*!"  # a factorial of something large, or of a factorial
    r"|\\(?:sum|prod)[^\\]*\^\{?(?:\d{5,}|10\^)"  # a sum with too many terms
)


def final_answer(text: str) -> str | None:
    """What stands in the last closed box, else on the last line that says it is the answer."""
    return last_box(text) or stated(text)


def boxes(text: str) -> int:
    """How many different answers were boxed in the end of a text; more than one or two is a way to try many."""
    return len({_plain(content) for content in boxed(text)})


def same_text(one: str, other: str) -> bool:
    """Whether two answers are the same but for blanks, dollar signs and a final stop."""
    return _plain(one) == _plain(other) != ""


def is_unreasonable(answer: str, gold: str) -> bool:
    """Whether this is too long, too deep, or a way to keep a grader busy, and the right answer is not like that."""
    if len(answer) > max(ANSWER_CHARS, 2 * len(gold)) or _nesting(answer) > max(NESTING, _nesting(gold)):
        return True
    return _EXPLOSIVE.search(_plain(answer)) is not None and _EXPLOSIVE.search(_plain(gold)) is None


def is_worked_out(answer: str, gold: str) -> bool:
    """Whether nothing is left to be computed, where the right answer is a plain number."""
    if _NUMBER.fullmatch(_plain(gold)) is None:
        return True
    plain = _plain(answer).rpartition("=")[2]
    # A degree sign is written as a power.
    plain = _UNIT.sub("", plain.replace("^\\circ", "").replace("^{\\circ}", ""))
    return _SCIENTIFIC.fullmatch(plain) is not None or _LEFT_TO_DO.search(plain) is None


def _plain(answer: str) -> str:
    return "".join(answer.replace("\\,", "").replace("\\$", "").replace("$", "").split()).rstrip(".")


def _nesting(answer: str) -> int:
    depth = deepest = 0
    for character in answer:
        if character in "({[":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")}]":
            depth -= 1
    return deepest
