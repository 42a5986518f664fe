"""What goes to the grader and what comes back. Imported on both sides, so it imports nothing that is heavy."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

__all__ = ["How", "MathPaper", "MathVerdict"]

How = Literal["none", "text", "unreasonable", "not_worked_out", "unreadable", "value", "exhausting"]


class MathPaper(msgspec.Struct, frozen=True, kw_only=True):
    """What is graded: what the policy said last, and the right answer.

    ``cpu_s`` is what the grade may compute; the time that it may wait is its caller's. ``by_value`` leaves out the
    comparison as text, so that the right answer itself goes the whole way.
    """

    said: str
    gold: str
    simplified: bool = True
    cpu_s: Annotated[float, Meta(gt=0)] = 5.0
    by_value: bool = False


class MathVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Right or not, the answer that was found, and how it was judged."""

    correct: bool
    answer: str | None
    how: How
