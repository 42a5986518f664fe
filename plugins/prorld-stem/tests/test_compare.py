"""What can be decided without a judge is decided right, and the rest is left open."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorld_stem.compare import compare, final_answer, reference
from prorld_stem.quantity import read_quantity


@pytest.mark.parametrize(
    ("answer", "gold", "correct"),
    [
        ("3.0e8 m/s", "3 \\times 10^{8} \\text{ m/s}", True),
        ("5 km", "5000 m", True),
        ("9.81", "9.8", True),
        ("9.9", "9.6", False),
        ("34.2", "34", False),
        ("34.0", "34", True),
        ("12 kJ/mol", "12000 J mol^{-1}", True),
        ("1.6e-19 C", "1.602\\times10^{-19}\\,\\mathrm{C}", True),
        ("25 ^\\circ C", "25°C", True),
        ("v = 3 m/s", "3 m/s", True),
        ("4 eV", "4 J", False),
        ("\\frac{1}{2}", "0.5", True),
        ("10^{-3}", "0.001", True),
        ("1,000 m", "1 km", True),
        ("5 cm^3", "5 mL", True),
        ("3.3 kΩ", "3300 \\Omega", True),
        ("-0.5 m", "0.5 m", False),
        ("5 mW", "5 MW", False),
        ("Photosynthesis", "photosynthesis", True),
        ("Newton's second law", "Newton's second law", True),
        ("Co", "CO", None),
        ("nacl", "NaCl", None),
        ("50\\%", "0.5", None),
        ("5 apples", "5", None),
        ("5 m", "5", None),
        ("2^{10}", "1024", None),
        ("5 or 6", "5", None),
        ("5, 6", "5", None),
        ("1/0", "5", None),
        ("1e400", "2", None),
        ("the sun", "sun", None),
        ("x" * 3_000, "y", False),
    ],
)
def test_short_answers(answer: str, gold: str, correct: bool | None):
    """Numbers with units, words, and what takes a judge."""
    assert compare(answer, gold, 0.01).correct is correct


@given(st.text(max_size=220))
def test_no_text_breaks_the_reading_of_quantities(text: str):
    """A quantity or none; of two readings the same."""
    assert read_quantity(text) == read_quantity(text)


@given(st.text(alphabet="0123456789.,eE+-/^*×{}()\\ mskg%", max_size=220))
def test_what_looks_like_a_quantity_breaks_nothing(text: str):
    """Nor takes long."""
    found = read_quantity(text)
    assert found is None or isinstance(found.value, float)


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (r"So \boxed{\text{the sun}}.", r"\text{the sun}"),
        ("The answer is copper.", "copper"),
        ("It is copper.", None),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
    ],
)
def test_the_final_answer_is_found(said: str, answer: str | None):
    """The last box, else the last line that says so."""
    assert final_answer(said) == answer


def test_of_a_worked_solution_the_box_is_the_reference():
    """Else all of it, up to a bound."""
    assert reference(r"First, ... so \boxed{5 m}. Done.") == "5 m"
    assert len(reference("word " * 5_000)) <= 4_000
