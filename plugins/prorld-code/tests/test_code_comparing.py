"""When an output is right, and that nothing a solution says makes finding that out slow."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorld_code.comparing import is_right, same_output
from prorld_code.guest.plain import NotPlainError, pack, unpack
from prorld_code.problem import Test

TOLERANCE = 1e-6


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("3\n", "3"),
        ("a b\nc\n", "a b  \nc\n\n\n"),
        ("a\r\nb\r\n", "a\nb\n"),
        ("\n3\n", "3\n"),
        ("0.5", "0.50"),
        ("0.5", ".5"),
        ("0.3333333333", "0.3333333"),
        ("1000000.5", "1000000.9"),
        ("1e3", "1000"),
        ("1 2", "1  2"),
        ("3", "3.0"),
        ("Yes 0.25", "Yes 0.2500"),
        ("", ""),
        ("", "\n"),
    ],
)
def test_outputs_that_are_the_same(wanted: str, said: str):
    """Blanks at the ends, empty lines around, the same numbers written differently."""
    assert same_output(wanted, said, TOLERANCE)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("3", "4"),
        ("3", ""),
        ("", "3"),
        ("3", "3.0000001"),
        ("1000000000000000000", "1000000000000000001"),
        ("0.5", "0.51"),
        ("Yes", "YES"),
        ("a\nb", "a b"),
        ("a\n\nb", "a\nb"),
        ("1 2", "1"),
        ("1", "1 2"),
        ("0.5", "nan"),
        ("nan", "0.5"),
        ("inf", "1e9999"),
        ("1000", "1_000"),
        ("5", "\u0665"),
        ("0.5", "Equal"),
        ("1.0", "1" + "0" * 500),
    ],
)
def test_outputs_that_differ(wanted: str, said: str):
    """Whole numbers are exact; text is text; neither order nor number of lines is free."""
    assert not same_output(wanted, said, TOLERANCE)


def test_without_tolerance_decimals_are_exact():
    """As LiveCodeBench has it."""
    assert same_output("0.5", "0.50", 0)
    assert not same_output("0.5", "0.5000001", 0)


@pytest.mark.slow
@pytest.mark.parametrize("said", ["1e9999 " * 100_000, "9" * 1_000_000, "0.1\n" * 200_000, "\n" * 1_000_000])
def test_hostile_outputs_are_compared_in_time(said: str):
    """The test's own limit would tell; they are wrong, and that is all."""
    assert not same_output("0.1\n" * 100_000, said, TOLERANCE)


def right(wanted: Any, value: Any, *, wrapped: bool = False) -> bool:
    said = json.dumps({"value": pack(value)})
    return is_right("function", Test(given=[], wanted=wanted, wrapped=wrapped), said, TOLERANCE)


@pytest.mark.parametrize(
    ("wanted", "value"),
    [
        (3, 3),
        (3, 3.0),
        (0.5, 0.5000001),
        ([1, [2]], (1, (2,))),
        ({"a": [1]}, {"a": (1,)}),
        ({"1": 2}, {1: 2}),
        ("x", "x"),
        (None, None),
        (True, True),
        (2**70, 2**70),
        (1e300, 1e300),
        ([], ()),
    ],
)
def test_values_that_are_the_same(wanted: Any, value: Any):
    """Tuples are lists, keys are text, fractions are near enough."""
    assert right(wanted, value)
    assert right([wanted], value, wrapped=True)


@pytest.mark.parametrize(
    ("wanted", "value"),
    [
        (3, 4),
        (3, "3"),
        ([1, 2], [2, 1]),
        ([1], [1, 1]),
        ({"a": 1}, {"a": 1, "b": 1}),
        ({"a": 1}, [["a", 1]]),
        (None, 0),
        (0.5, 0.51),
        (0.5, float("nan")),
        (1e308, float("inf")),
        (0.5, 10**400),
        ([1, 2], {1, 2}),
        ("ab", ["a", "b"]),
    ],
)
def test_values_that_differ(wanted: Any, value: Any):
    """Order, number and kind count."""
    assert not right(wanted, value)


@pytest.mark.parametrize(
    "said", ["", "7", "[]", "{}", '{"error": "x"}', '{"value": {"t": "magic", "v": 1}}', '{"value": {}}', "[" * 9999]
)
def test_what_is_no_value_is_wrong(said: str):
    """Whatever a solution writes where its value is expected."""
    assert not is_right("function", Test(given=[], wanted=1), said, TOLERANCE)


@pytest.mark.slow
def test_numbers_that_collide_as_keys_are_compared_in_time():
    """Each of these has the same hash."""
    said = json.dumps({"value": pack({number * (2**61 - 1): 0 for number in range(1, 2)})})
    pairs = [[{"t": "int", "v": hex(number * (2**61 - 1))}, 0] for number in range(1, 100_000)]
    said = json.dumps({"value": {"t": "dict", "v": pairs}})
    assert not is_right("function", Test(given=[], wanted={"a": 1}), said, TOLERANCE)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@given(plain)
def test_plain_values_come_back_as_they_were(value: Any):
    """With their types."""
    found = unpack(json.loads(json.dumps(pack(value))))
    assert (found, type(found)) == (value, type(value))


class Liar(int):
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


def test_what_passes_is_built_in():
    """A subclass loses its methods on the way; an object that is nothing but methods does not pass."""
    found = unpack(json.loads(json.dumps(pack([Liar(3)]))))
    assert type(found[0]) is int
    assert found != [4]
    for value in (object(), Liar, len, iter("a")):
        with pytest.raises(NotPlainError):
            pack(value)
    deep: list[Any] = []
    deep.append(deep)
    with pytest.raises(NotPlainError, match="deep"):
        pack(deep)
