"""A letter is found as the mode wants it, and never where an answer names several."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorld_stem.choice_instance import GradingMode, Sheet
from prorld_stem.letters import chosen, letters_boxed

SHEET = Sheet(question="Which?", options=("iron", "copper", "iron oxide", "Cu, Zn"), gold="B")
STRICT: GradingMode = "strict_single_letter_boxed"


@pytest.mark.parametrize(
    ("said", "mode", "letter"),
    [
        (r"\boxed{B}", STRICT, "B"),
        (r"\boxed{ (B) }", STRICT, "B"),
        (r"\boxed{\text{B}}", STRICT, "B"),
        (r"\boxed{\textbf{(B)}}", STRICT, "B"),
        (r"\boxed{A} no, \boxed{B}", STRICT, "B"),
        (r"\boxed{b}", STRICT, None),
        (r"\boxed{E}", STRICT, None),
        (r"\boxed{copper}", STRICT, None),
        (r"\boxed{A, B}", STRICT, None),
        (r"\boxed{B or C}", STRICT, None),
        (r"\boxed{AB}", STRICT, None),
        ("B", STRICT, None),
        ("Answer: B", STRICT, None),
        (r"\boxed{b}", "lenient_boxed", "B"),
        (r"\boxed{Copper.}", "lenient_boxed", "B"),
        (r"\boxed{B: copper}", "lenient_boxed", "B"),
        (r"\boxed{(b) copper}", "lenient_boxed", "B"),
        (r"\boxed{Cu, Zn}", "lenient_boxed", "D"),
        (r"\boxed{B: iron}", "lenient_boxed", None),
        (r"\boxed{iron and copper}", "lenient_boxed", None),
        (r"\boxed{A, B, C, D}", "lenient_boxed", None),
        (r"\boxed{Both}", "lenient_boxed", None),
        (r"\boxed{Because it is red}", "lenient_boxed", None),
        ("Answer: B", "lenient_answer_colon", "B"),
        ("answer: (b)", "lenient_answer_colon", "B"),
        ("Answer: \\boxed{B}", "lenient_answer_colon", "B"),
        ("Answer: copper", "lenient_answer_colon", "B"),
        ("Answer: A\nAnswer: B", "lenient_answer_colon", "B"),
        ("Answer: A or B", "lenient_answer_colon", None),
        (r"\boxed{B}", "lenient_answer_colon", None),
        ("**Answer:** B", "lenient_answer_colon_md", "B"),
        ("__Answer__: B", "lenient_answer_colon_md", "B"),
        ("Answer: Bronze", "lenient_answer_colon_md", None),
        (r"\boxed{B}", "lenient", "B"),
        ("The answer is B.", "lenient", "B"),
        ("", "lenient", None),
    ],
)
def test_one_letter_or_none(said: str, mode: GradingMode, letter: str | None):
    """What leads is a letter by itself, or an option's own words."""
    assert chosen(said, SHEET, mode) == letter


@pytest.mark.parametrize("mode", ["strict_single_letter_boxed", "lenient", "lenient_answer_colon_md"])
@pytest.mark.parametrize("said", ["\\boxed{" * 20_000, "Answer: " * 20_000, "{" * 200_000, "*_> \n" * 50_000])
def test_long_text_names_nothing_soon(said: str, mode: GradingMode):
    """Only the end is looked at."""
    assert chosen(said, SHEET, mode) is None


@given(st.text(alphabet="\\boxed{}ABCD answer:\n()*.", max_size=200))
def test_no_text_names_what_is_not_there(said: str):
    """A letter of the sheet, or none."""
    assert chosen(said, SHEET, "lenient") in {"A", "B", "C", "D", None}


def test_boxes_of_different_letters_are_counted():
    """One letter again and again is one."""
    assert letters_boxed(r"\boxed{A} \boxed{B} \boxed{(A)}") == 2
