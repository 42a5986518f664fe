"""A problem as the judge knows it, whatever the row looked like, and which of its tests are used."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

__all__ = ["Bounds", "Problem", "Test", "chosen"]

Kind = Literal["program", "function", "check"]
Which = Literal["largest", "evenly"]


class Test(msgspec.Struct, frozen=True, kw_only=True):
    """One test: for a program its input and output, for a function its arguments and its value.

    ``wrapped``: the value stands in a list of its own, as some sets write it.
    """

    __test__ = False

    given: Any
    wanted: Any
    wrapped: bool = False

    @property
    def size(self) -> int:
        """Bytes, about."""
        if isinstance(self.given, str) and isinstance(self.wanted, str):
            return len(self.given) + len(self.wanted)
        return len(json.dumps([self.given, self.wanted]))


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """What is judged.

    ``name`` is the function's; ``prompt`` and ``checks`` are code, of a problem whose tests are code. ``public`` tests
    may be shown, ``hidden`` ones never.
    """

    kind: Kind
    hidden: tuple[Test, ...] = ()
    public: tuple[Test, ...] = ()
    name: str = ""
    prompt: str = ""
    checks: str = ""
    cpu_s: float | None = None
    memory_bytes: int | None = None

    @property
    def tests(self) -> tuple[Test, ...]:
        """All of them, the public ones first."""
        return self.public + self.hidden


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """How many tests of which size are used."""

    tests: int
    test_bytes: int
    all_bytes: int
    which: Which


def chosen(tests: tuple[Test, ...], bounds: Bounds) -> list[Test]:
    """The tests that are used, in their order.

    Those over ``test_bytes`` are left out. Of the rest ``tests`` stay: those with the largest inputs, or some from all
    along. While these are over ``all_bytes`` together, the largest go.
    """
    sizes = {number: test.size for number, test in enumerate(tests)}
    fit = [number for number in sizes if sizes[number] <= bounds.test_bytes]
    if len(fit) > bounds.tests:
        if bounds.which == "largest":
            fit = sorted(sorted(fit, key=lambda number: -sizes[number])[: bounds.tests])
        else:
            fit = [fit[index * len(fit) // bounds.tests] for index in range(bounds.tests)]
    total = sum(sizes[number] for number in fit)
    for number in sorted(fit, key=lambda number: -sizes[number]):
        if total <= bounds.all_bytes:
            break
        total -= sizes[number]
        fit.remove(number)
    return [tests[number] for number in fit]
