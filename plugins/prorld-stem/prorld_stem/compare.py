"""What can be decided of a free answer without a judge: the same words, or numbers with units that can be compared."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from prorld.domain.answers import last_box, stated
from prorld_stem.quantity import read_quantity, same_quantity
from prorld_stem.reading import plain_words, unwrapped

__all__ = ["Comparison", "compare", "final_answer", "reference"]

ANSWER_CHARS = 1_000
REFERENCE_CHARS = 4_000

_ORDINARY = re.compile(r"[A-Z]?[a-z]{3,}(?:[ -][A-Za-z]?[a-z]+)*")


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict, or ``None`` where it takes a judge."""

    correct: bool | None
    how: Literal["text", "quantity", "length", "open"]


def final_answer(said: str) -> str | None:
    """What stands in the last box, else on the last line that says it is the answer."""
    return last_box(said) or stated(said)


def reference(gold: str) -> str:
    """The right answer as it is compared: the last box of a worked solution, where there is one."""
    return (last_box(gold) or gold).strip()[-REFERENCE_CHARS:]


def compare(answer: str, gold: str, tolerance: float) -> Comparison:
    """Whether two short answers are the same, as far as that is certain."""
    if _same_words(answer, gold):
        return Comparison(correct=True, how="text")
    # A final answer is short. One that lists whatever could be meant is none.
    if len(answer) > max(ANSWER_CHARS, 3 * len(gold)):
        return Comparison(correct=False, how="length")
    given, wanted = (read_quantity(_last_side(unwrapped(text))) for text in (answer, gold))
    if given is None or wanted is None:
        return Comparison(correct=None, how="open")
    same = same_quantity(given, wanted, tolerance)
    return Comparison(correct=same, how="open" if same is None else "quantity")


def _same_words(answer: str, gold: str) -> bool:
    """As text; case does not matter in words, and does in signs: Co is not CO, and mW not MW."""
    one, other = (" ".join(unwrapped(text).split()).strip(" .") for text in (answer, gold))
    if one == other:
        return one != ""
    return _ORDINARY.fullmatch(other) is not None and plain_words(one) == plain_words(other)


def _last_side(text: str) -> str:
    """``v = 3 m/s`` gives the number alone, where what stands before is a name."""
    left, found, right = text.partition("=")
    return right if found and len(left.strip()) <= 12 and not any(sign.isdigit() for sign in left) else text
