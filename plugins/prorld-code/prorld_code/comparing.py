"""When an output is the wanted one. Everything here takes time in proportion to what it compares.

Programs: lines are compared without the blanks at their ends, and without empty lines before and after all. A line that
differs is right, too, if its words are pairwise equal as text or as numbers. Numbers are equal when their decimals are;
where the wanted one is written with a point or an exponent, a relative or absolute difference of ``tolerance`` is none.

Functions: values are equal as in Python, a tuple being a list, keys being equal as text, and numbers with a fraction
within ``tolerance``.
"""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal, localcontext
from itertools import zip_longest
from typing import Any, Final

from prorld_code.problem import Test

__all__ = ["is_right", "same_output", "same_value"]

# A number beyond this is compared as text: longer ones are not written in digits by tasks, but by attacks.
NUMBER_CHARS: Final = 400
DEPTH_MAX: Final = 200
_NUMBER = re.compile(r"^[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?$", re.ASCII)


def is_right(kind: str, test: Test, said: str, tolerance: float) -> bool:
    """Whether what a run brought is what the test wants."""
    if kind == "program":
        return same_output(test.wanted, said, tolerance)
    try:
        value = _opened(json.loads(said)["value"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
    if same_value(test.wanted, value, tolerance):
        return True
    alone = test.wrapped and isinstance(test.wanted, list) and len(test.wanted) == 1
    return alone and same_value(test.wanted[0], value, tolerance)


def _opened(data: Any) -> Any:
    """A value that ``pack`` wrote, with keys as text: numbers chosen to collide would make a dictionary slow.

    Raises ``ValueError`` for kinds of values that no test wants.
    """
    if isinstance(data, list):
        return [_opened(item) for item in data]
    if not isinstance(data, dict):
        return data
    kind, content = data["t"], data["v"]
    if kind == "tuple":
        return [_opened(item) for item in content]
    if kind == "dict":
        return {str(_opened(key)): _opened(item) for key, item in content}
    if kind == "int":
        return int(content, 16)
    if kind == "float":
        return float(content)
    raise ValueError(f"no test wants a value of this kind: {kind}")


def same_output(wanted: str, said: str, tolerance: float) -> bool:
    """Whether two texts say the same."""
    return all(_same_line(ours, theirs, tolerance) for ours, theirs in zip_longest(_lines(wanted), _lines(said)))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\r\n \t").split("\n")]


def _same_line(wanted: str | None, said: str | None, tolerance: float) -> bool:
    if wanted == said:
        return True
    if wanted is None or said is None:
        return False
    ours, theirs = wanted.split(), said.split()
    return len(ours) == len(theirs) and all(
        one == other or _same_number(one, other, tolerance) for one, other in zip(ours, theirs, strict=True)
    )


def _same_number(wanted: str, said: str, tolerance: float) -> bool:
    if len(wanted) > NUMBER_CHARS or len(said) > NUMBER_CHARS:
        return False
    if _NUMBER.match(wanted) is None or _NUMBER.match(said) is None:
        return False
    ours, theirs = Decimal(wanted), Decimal(said)
    if ours == theirs:
        return True
    if not any(mark in wanted for mark in ".eE"):
        return False
    with localcontext() as context:
        context.prec = 40
        near = Decimal(tolerance)
        return abs(ours - theirs) <= near * max(Decimal(1), abs(ours))


def same_value(wanted: Any, said: Any, tolerance: float, depth: int = DEPTH_MAX) -> bool:
    """Whether two plain values are the same."""
    if depth <= 0:
        return False
    if isinstance(wanted, list | tuple) and isinstance(said, list | tuple):
        return len(wanted) == len(said) and all(
            same_value(one, other, tolerance, depth - 1) for one, other in zip(wanted, said, strict=True)
        )
    if isinstance(wanted, dict) and isinstance(said, dict):
        ours, theirs = _by_text(wanted), _by_text(said)
        return ours.keys() == theirs.keys() and all(
            same_value(value, theirs[key], tolerance, depth - 1) for key, value in ours.items()
        )
    if isinstance(wanted, float) or isinstance(said, float):
        return _near(wanted, said, tolerance)
    return type(wanted) in _PLAIN and type(said) in _PLAIN and bool(wanted == said)


_PLAIN = frozenset({type(None), bool, int, str})


def _near(wanted: Any, said: Any, tolerance: float) -> bool:
    if not isinstance(wanted, int | float) or not isinstance(said, int | float):
        return False
    try:
        ours, theirs = float(wanted), float(said)
    except OverflowError:
        return False
    return ours == theirs or math.isclose(ours, theirs, rel_tol=tolerance, abs_tol=tolerance)


def _by_text(value: dict[Any, Any]) -> dict[str, Any]:
    return {str(key): item for key, item in value.items()}
