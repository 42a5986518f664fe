"""One multiple-choice question, in the shapes that data sets have, and the sheet that a policy is shown."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

__all__ = ["LETTERS", "ChoiceInstance", "GradingMode", "Sheet", "make_sheet"]

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
Text = Annotated[str, Meta(min_length=1, max_length=100_000)]
Option = Annotated[str, Meta(min_length=1, max_length=10_000)]
Letter = Annotated[str, Meta(pattern="^[A-Za-z]$")]
GradingMode = Literal[
    "strict_single_letter_boxed", "lenient_boxed", "lenient_answer_colon", "lenient_answer_colon_md", "lenient"
]

# An option that speaks of others, by their letters or their places, has to stay where it is.
_SPEAKS_OF_OTHERS = re.compile(
    r"\b(?:above|below|preceding|following|former|latter|previous)\b"
    r"|\b(?:all|none|both|neither|any) of (?:these|them|the)\b"
    r"|^\W*(?:both|either|neither|all|none)\b|^[\W]*\(?[A-H]\)?\s*(?:and|or|&|,|und|et|y|e)\s*\(?[A-H]\b",
    re.IGNORECASE,
)


class Turned(msgspec.Struct, frozen=True, kw_only=True):
    """A message of a prompt as NeMo Gym writes it."""

    role: str
    content: Text


class Params(msgspec.Struct, frozen=True, kw_only=True):
    """Where NeMo Gym keeps the prompt."""

    input: Annotated[list[Turned], Meta(min_length=1, max_length=64)]


class ChoiceInstance(msgspec.Struct, frozen=True, kw_only=True):
    """A question, its options by letter, and the letter of the right one."""

    options: Annotated[list[Option | dict[Letter, Option | None]], Meta(min_length=2, max_length=26)]
    expected_answer: Letter | None = None
    answer: Letter | None = None
    question: Text | None = None
    responses_create_params: Params | None = None
    grading_mode: GradingMode = "strict_single_letter_boxed"
    data_source: Annotated[str, Meta(max_length=200)] = "mcqa"

    def __post_init__(self) -> None:
        if self.question is None and (self.responses_create_params is None or self._told is None):
            raise ValueError("one of question and responses_create_params (with a message of the user) is needed")
        letters = [letter for letter, _ in self.choices]
        if letters != list(LETTERS[: len(letters)]) or len(letters) < 2:
            raise ValueError("the options are not A, B, ... in this order, or fewer than two")
        if self.expected_answer is None and self.answer is None:
            raise ValueError("one of expected_answer and answer is needed")
        if self.gold not in letters:
            raise ValueError(f"the right answer {self.gold} is none of the options")

    @property
    def choices(self) -> list[tuple[str, str]]:
        """The options with their letters."""
        found: list[tuple[str, str]] = []
        for number, option in enumerate(self.options):
            if isinstance(option, str):
                found.append((LETTERS[number], option))
            else:
                found += [(letter.upper(), text) for letter, text in option.items() if text is not None]
        return found

    @property
    def gold(self) -> str:
        """The letter of the right option, as the instance has it."""
        return (self.expected_answer or self.answer or "").upper()

    @property
    def asked(self) -> str:
        """The question alone, without the list of its options."""
        if self.question is not None:
            return self.question
        told = self._told or ""
        first = re.search(r"^\s*\(?A[:.)]\s", told, re.MULTILINE)
        return (told[: first.start()].strip() or told) if first is not None else told

    @property
    def _told(self) -> str | None:
        if self.responses_create_params is None:
            return None
        return next((one.content for one in reversed(self.responses_create_params.input) if one.role == "user"), None)


class Sheet(msgspec.Struct, frozen=True, kw_only=True):
    """What one policy is shown: the question, the options in its order, and the letter that is right there."""

    question: str
    options: tuple[str, ...]
    gold: str

    @property
    def letters(self) -> str:
        """The letters that there are."""
        return LETTERS[: len(self.options)]

    def shown(self) -> str:
        """The question with its options."""
        listed = "\n".join(f"{letter}: {option}" for letter, option in zip(self.letters, self.options, strict=True))
        return f"{self.question}\n\n{listed}"


def make_sheet(instance: ChoiceInstance, *, shuffle: bool, seed: object) -> Sheet:
    """The instance as it is shown; in another order for another seed, where no option speaks of others."""
    texts = [text for _, text in instance.choices]
    right = LETTERS.index(instance.gold)
    order = list(range(len(texts)))
    if shuffle and not _order_matters(texts):
        # Of text, so that it is the same on every machine and in every version of Python.
        digest = hashlib.sha256("\0".join([str(seed), instance.asked, *texts]).encode("utf-8", "replace")).digest()
        random.Random(digest).shuffle(order)  # noqa: S311  (an order, and no secret)
    return Sheet(
        question=instance.asked,
        options=tuple(texts[place] for place in order),
        gold=LETTERS[order.index(right)],
    )


def _order_matters(options: Sequence[str]) -> bool:
    return any(_SPEAKS_OF_OTHERS.search(option[:300]) is not None for option in options)


def seed_of(metadata: dict[str, Any], configured: int) -> str:
    """What an order is drawn from beside the question itself: the job's own ``shuffle_seed``, else the operator's."""
    given = metadata.get("shuffle_seed")
    return str(given)[:200] if isinstance(given, int | str) else str(configured)
