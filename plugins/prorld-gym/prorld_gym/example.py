"""A small environment of each shape that is not a library's: to try things with, and for tests."""

from __future__ import annotations

import random
from typing import Any

__all__ = ["Capitals", "GuessEnv"]


class GuessEnv:
    """Guess a number in a few turns, with ``reset`` and ``step`` as GEM and gymnasium have them."""

    def __init__(self, highest: int = 20, turns: int = 6) -> None:
        self._highest = highest
        self._turns = turns
        self._number = 0
        self._left = turns

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """A new number."""
        self._number = random.Random(seed).randint(1, self._highest)  # noqa: S311
        self._left = self._turns
        return (
            f"Guess a number from 1 to {self._highest}; you have {self._turns} guesses. Answer <answer>N</answer>.",
            {},
        )

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """One guess."""
        self._left -= 1
        digits = action.rpartition("<answer>")[2].partition("</answer>")[0].strip()
        if not (digits.isascii() and digits.isdigit() and len(digits) < 6):
            return "That is no number.", -0.1, False, self._left == 0, {}
        guess = int(digits)
        if guess == self._number:
            return "Right.", 1.0, True, False, {}
        return ("Higher." if guess < self._number else "Lower."), 0.0, False, self._left == 0, {}


class _Rubric:
    def __init__(self) -> None:
        self.funcs = [self.right, self.short]
        self.weights = [1.0, 0.0]

    @staticmethod
    async def right(completion: list[dict[str, str]], answer: str) -> float:
        """Whether the last word is the answer."""
        words = completion[-1]["content"].replace(".", " ").split()
        return float(bool(words) and words[-1].lower() == answer.lower())

    @staticmethod
    def short(completion: list[dict[str, str]], **_rest: Any) -> float:
        """Told beside the reward."""
        return float(len(completion[-1]["content"]) < 40)


class Capitals:
    """A data set and a rubric, as single-turn environments of verifiers have them."""

    system_prompt = "End with the name of the city."

    def __init__(self) -> None:
        self.dataset = [
            {"question": "What is the capital of Portugal?", "answer": "Lisbon"},
            {"question": "What is the capital of Finland?", "answer": "Helsinki"},
        ]
        self.rubric = _Rubric()
