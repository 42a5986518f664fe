"""One question with a free answer, in the shapes that data sets have."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

__all__ = ["ChatMessage", "RewardModel", "StemInstance"]

Text = Annotated[str, Meta(min_length=1, max_length=100_000)]
Gold = Annotated[str, Meta(min_length=1, max_length=20_000)] | int | float


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a prompt that is already a conversation."""

    role: Literal["system", "user"]
    content: Text


class RewardModel(msgspec.Struct, frozen=True, kw_only=True):
    """Where verl's data sets keep the answer."""

    ground_truth: Gold


class StemInstance(msgspec.Struct, frozen=True, kw_only=True):
    """A question and its answer, each under one of the names that data sets give it."""

    problem: Text | None = None
    question: Text | None = None
    prompt: Text | Annotated[list[ChatMessage], Meta(min_length=1, max_length=64)] | None = None
    answer: Gold | None = None
    expected_answer: Gold | None = None
    matched_solution: Gold | None = None
    reward_model: RewardModel | None = None
    domain: Annotated[str, Meta(max_length=200)] = ""
    data_source: Annotated[str, Meta(max_length=200)] = "stem"

    def __post_init__(self) -> None:
        if self.problem is None and self.question is None and self.prompt is None:
            raise ValueError("one of problem, question and prompt is needed")
        if self.reward_model is None and all(
            one is None for one in (self.answer, self.expected_answer, self.matched_solution)
        ):
            raise ValueError("one of answer, expected_answer, matched_solution and reward_model is needed")
        if isinstance(self.prompt, list) and self.prompt[-1].role != "user":
            raise ValueError("the prompt has to end with the user")

    @property
    def messages(self) -> list[ChatMessage]:
        """The question as messages."""
        if isinstance(self.prompt, list) and self.problem is None and self.question is None:
            return self.prompt
        return [ChatMessage(role="user", content=str(self.problem or self.question or self.prompt))]

    @property
    def asked(self) -> str:
        """The question as a judge reads it."""
        return self.messages[-1].content

    @property
    def gold(self) -> str:
        """The right answer, as text."""
        for given in (self.answer, self.expected_answer, self.matched_solution):
            if given is not None:
                return str(given)
        assert self.reward_model is not None
        return str(self.reward_model.ground_truth)
