"""The final answer is found in what was said, in linear time, and what is none is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorld_math.answer import boxes, final_answer, is_unreasonable, is_worked_out, same_text


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (r"So it is \boxed{5}.", "5"),
        (r"\boxed{1} or rather \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{ \{1, 2\} }", r"\{1, 2\}"),
        (r"\boxed{1} and then \boxed{2", "1"),
        (r"\boxed{1} and then \boxed{}", "1"),
        ("Answer: 5", "5"),
        ("**Answer:** 5", "5"),
        ("I think\nThe answer is 12.\n", "12"),
        ("The final answer is $\\frac{1}{2}$.", r"\frac{1}{2}"),
        ("Answer: 5\nAnswer: 6", "6"),
        ("Answer: 7, but \\boxed{8}", "8"),
        ("> answer: x=3", "x=3"),
        ("It is 5.", None),
        ("", None),
        ("Answer:", None),
        ("\\boxed", None),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{a \\ {b}}", r"a \\ {b}"),
        ("\\boxed{5}" + "x" * 30_000, None),
    ],
)
def test_the_final_answer_is_found(said: str, answer: str | None):
    """The last box wins, then the last line that says so; numbers in passing are not answers."""
    assert final_answer(said) == answer


@given(st.text(alphabet="\\boxed{} answer:\n5*", max_size=300))
def test_no_text_breaks_the_search(said: str):
    """There is an answer or there is none."""
    found = final_answer(said)
    assert found is None or found


@pytest.mark.parametrize(
    "said", ["\\boxed{" * 20_000, "answer: " * 20_000, "{" * 200_000, "*" * 200_000, " \n" * 99_999]
)
def test_long_text_takes_no_long_time(said: str):
    """The search is bounded by the tail it looks at and the boxes it tries."""
    found = final_answer(said)
    assert found is None or len(found) <= 20_000


@pytest.mark.parametrize(("one", "other"), [("5", " 5. "), ("$5$", "5"), ("x = 5", "x=5"), (r"\$5", "5")])
def test_blanks_and_dollars_do_not_matter(one: str, other: str):
    """They are typography."""
    assert same_text(one, other)


@pytest.mark.parametrize(
    "answer", ["9^{9^{9}}", "9**9**9", "2^{123456}", "99999!", "((9!)!)", "5!!", "x" * 301, "(" * 21 + ")" * 21]
)
def test_what_only_keeps_a_grader_busy_is_unreasonable(answer: str):
    """Unless the right answer is like that itself."""
    assert is_unreasonable(answer, "34")
    assert not is_unreasonable(answer, answer)


@pytest.mark.parametrize("answer", ["2^{10}", "e^{x^{2}}", "x^2+y^2", "12!", r"\frac{1}{2}", "((1))", r"2^{x}3^{y}"])
def test_ordinary_answers_are_reasonable(answer: str):
    """Powers and factorials of an ordinary size are left to the comparison."""
    assert not is_unreasonable(answer, "34")


@pytest.mark.parametrize(
    ("answer", "gold", "done"),
    [
        ("769+377-824", "322", False),
        ("2^{10}", "1024", False),
        ("5!", "120", False),
        (r"17\cdot 3", "51", False),
        (r"\sqrt{16}", "4", False),
        (r"\sum_{i=1}^{4} i", "10", False),
        ("x = 322", "322", True),
        ("-322", "322", True),
        ("1,146", "1146", True),
        (r"\frac{644}{2}", "322", True),
        (r"90^\circ", "90", True),
        (r"3 \times 10^{8}", "300000000", True),
        ("322 \\text{ cm}", "322", True),
        (r"322 \text{ cm}^2", "322", True),
        (r"322 \mathrm{ m}^{3}", "322", True),
        (r"\min(34,35)", "34", False),
        (r"\lfloor 34.5 \rfloor", "34", False),
        (r"\gcd(68, 34)", "34", False),
        (r"\log_2{8}", "3", False),
        ("2^{10}", "2^{10}", True),
        (r"1+\sqrt{2}", r"\sqrt{2}+1", True),
        ("0.5", r"\frac{1}{2}", True),
    ],
)
def test_a_plain_number_has_to_be_worked_out(answer: str, gold: str, done: bool):
    """A sum that repeats the question is no answer to it; where the right answer is no plain number, anything goes."""
    assert is_worked_out(answer, gold) is done


@pytest.mark.parametrize(
    ("said", "count"),
    [("none", 0), (r"\boxed{5} and again \boxed{ 5 }", 1), (r"\boxed{1} \boxed{2} \boxed{3}", 3), ("\\boxed{" * 9, 0)],
)
def test_different_boxes_are_counted(said: str, count: int):
    """The same answer again is no other one."""
    assert boxes(said) == count


@pytest.mark.parametrize(("one", "other"), [("$", "."), ("", " ")])
def test_nothing_is_the_same_as_nothing(one: str, other: str):
    """Two texts of signs alone are no answers that agree."""
    assert not same_text(one, other)
