"""The instance: a problem and its answer, in the shapes that the usual data sets have."""

from __future__ import annotations

from importlib.resources import files
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

__all__ = ["ChatMessage", "MathInstance", "RewardModel", "examples"]

Text = Annotated[str, Meta(min_length=1, max_length=100_000)]
Gold = Annotated[str, Meta(min_length=1, max_length=2_000)] | int | float


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a prompt that is already a conversation."""

    role: Literal["system", "user"]
    content: Text


class RewardModel(msgspec.Struct, frozen=True, kw_only=True):
    """Where verl's data sets keep the answer."""

    ground_truth: Gold


class MathInstance(msgspec.Struct, frozen=True, kw_only=True):
    """A problem and its answer, each under one of the names that data sets give it."""

    problem: Text | None = None
    question: Text | None = None
    prompt: Text | Annotated[list[ChatMessage], Meta(min_length=1, max_length=64)] | None = None
    answer: Gold | None = None
    expected_answer: Gold | None = None
    reward_model: RewardModel | None = None
    # Told to a reward server; nothing here depends on it.
    data_source: Annotated[str, Meta(max_length=200)] = "math"

    def __post_init__(self) -> None:
        if self.problem is None and self.question is None and self.prompt is None:
            raise ValueError("one of problem, question and prompt is needed")
        if self.answer is None and self.expected_answer is None and self.reward_model is None:
            raise ValueError("one of answer, expected_answer and reward_model is needed")
        if isinstance(self.prompt, list) and self.prompt[-1].role != "user":
            raise ValueError("the prompt has to end with the user")

    @property
    def messages(self) -> list[ChatMessage]:
        """The problem as messages."""
        if isinstance(self.prompt, list) and self.problem is None and self.question is None:
            return self.prompt
        text = self.problem or self.question or self.prompt
        return [ChatMessage(role="user", content=str(text))]

    @property
    def gold(self) -> str:
        """The right answer, as text."""
        for given in (self.answer, self.expected_answer):
            if given is not None:
                return str(given)
        assert self.reward_model is not None
        return str(self.reward_model.ground_truth)


def examples() -> list[MathInstance]:
    """A few short problems to try things with."""
    lines = files("prorld_math").joinpath("examples.jsonl").read_bytes()
    return msgspec.json.Decoder(MathInstance).decode_lines(lines)
