"""Which option an answer names: one letter, found as the mode wants it, or none at all."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from prorld.domain.answers import TAIL_CHARS, last_box, stated
from prorld_stem.choice_instance import GradingMode, Sheet
from prorld_stem.reading import plain_words, unwrapped

__all__ = ["chosen", "instruction", "letters_boxed"]

_STRICT = re.compile(r"[^A-Za-z]*([A-Z])[^A-Za-z]*")
_LED = re.compile(r"\(?([A-Za-z])(?:\)|[.:)]|\s*$)")
_MARKED = re.compile(r"^[\s>#*_]*answer[*_]{0,2}\s*:(.*)$", re.IGNORECASE)
_BOX = re.compile(r"\\boxed\{\s*\(?([A-Z])\)?\s*\}")

_WHERE = {
    "strict_single_letter_boxed": "At the end put the letter of the right option, and nothing but it, into \\boxed{}.",
    "lenient_boxed": "At the end put the letter of the right option into \\boxed{}.",
    "lenient_answer_colon": "The last line has to be: Answer: LETTER",
    "lenient_answer_colon_md": "The last line has to be: Answer: LETTER",
    "lenient": "At the end put the letter of the right option into \\boxed{}.",
}


def instruction(mode: GradingMode) -> str:
    """What the policy is told of how to answer."""
    return f"Exactly one option is right. {_WHERE[mode]}"


def chosen(said: str, sheet: Sheet, mode: GradingMode) -> str | None:
    """The letter, or ``None`` where the answer names none of the options, or several."""
    letter = _READERS[mode](said, sheet)
    return letter if letter is not None and letter in sheet.letters else None


def letters_boxed(said: str) -> int:
    """How many different letters were boxed in the end of a text."""
    return len(set(_BOX.findall(said[-TAIL_CHARS:])))


def _strict(said: str, _sheet: Sheet) -> str | None:
    box = last_box(said)
    found = _STRICT.fullmatch(unwrapped(box)) if box is not None else None
    return found[1] if found is not None else None


def _boxed(said: str, sheet: Sheet) -> str | None:
    box = last_box(said)
    return _letter_or_option(box, sheet) if box is not None else None


def _colon(said: str, sheet: Sheet) -> str | None:
    line = stated(said)
    if line is None:
        return None
    return _letter_or_option(last_box(line) or line, sheet)


def _marked(said: str, sheet: Sheet) -> str | None:
    for line in reversed(said[-TAIL_CHARS:].splitlines()):
        if (found := _MARKED.match(line)) is not None:
            return _letter_or_option(found[1].strip("*_ \t"), sheet)
    return None


def _lenient(said: str, sheet: Sheet) -> str | None:
    return _boxed(said, sheet) if last_box(said) is not None else _colon(said, sheet)


def _letter_or_option(text: str, sheet: Sheet) -> str | None:
    """A letter that leads, or an option's own words; words that are those of two options name none."""
    bare = unwrapped(text)
    words = plain_words(bare)
    same = [letter for letter, option in zip(sheet.letters, sheet.options, strict=True) if plain_words(option) == words]
    if len(same) == 1:
        return same[0]
    if (found := _LED.match(bare)) is None:
        return None
    letter, rest = found[1].upper(), plain_words(bare[found.end() :])
    if letter not in sheet.letters:
        return None
    # Behind the letter there may be the words of that very option, and no others.
    return letter if not rest or rest == plain_words(sheet.options[sheet.letters.index(letter)]) else None


_READERS: Mapping[GradingMode, Callable[[str, Sheet], str | None]] = {
    "strict_single_letter_boxed": _strict,
    "lenient_boxed": _boxed,
    "lenient_answer_colon": _colon,
    "lenient_answer_colon_md": _marked,
    "lenient": _lenient,
}
