"""What goes to the grader and what comes back. Imported on both sides, so it imports nothing that is heavy."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["MathPaper", "MathVerdict"]


class MathPaper(msgspec.Struct, frozen=True, kw_only=True):
    """What is graded: what the policy said last, and the right answer."""

    said: str
    gold: str
    simplified: bool = True


class MathVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Right or not, the answer that was found, and how it was judged."""

    correct: bool
    answer: str | None
    how: Literal["none", "text", "unreasonable", "not_worked_out", "value"]
