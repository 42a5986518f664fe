"""The instance: a problem and its tests, in the shapes that the usual data sets have."""

from __future__ import annotations

from importlib.resources import files
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from prorld_code.problem import Problem
from prorld_code.shapes import Row, problem_of

__all__ = ["ChatMessage", "CodeInstance", "examples"]

Text = Annotated[str, Meta(min_length=1, max_length=200_000)]
Source = Annotated[str, Meta(max_length=1_000_000)]
# JSON, or text that holds it.
Tests = str | dict[str, Any] | list[Any]
LIST_MAX = 64


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a prompt that is already a conversation."""

    role: Literal["system", "user"]
    content: Text


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """Where NeMo Gym keeps the prompt."""

    input: Text | Annotated[list[ChatMessage], Meta(min_length=1, max_length=LIST_MAX)]


class RewardModel(msgspec.Struct, frozen=True, kw_only=True):
    """Where verl's data sets keep the tests."""

    ground_truth: Tests


class UnitTests(msgspec.Struct, frozen=True, kw_only=True):
    """Where NeMo Gym keeps the tests."""

    unit_tests: Tests


class CodeInstance(msgspec.Struct, frozen=True, kw_only=True):
    """A problem and its tests, each under one of the names that data sets give it; ``README.md`` has the table."""

    question_content: Text | None = None
    description: Text | None = None
    question: Text | None = None
    problem: Text | None = None
    prompt: Text | Annotated[list[ChatMessage], Meta(min_length=1, max_length=LIST_MAX)] | None = None
    responses_create_params: Conversation | None = None

    input_output: Tests | None = None
    tests: Tests | None = None
    reward_model: RewardModel | None = None
    verifier_metadata: UnitTests | None = None
    public_tests: Tests | None = None
    private_tests: Tests | None = None
    generated_tests: Tests | None = None
    public_test_cases: Tests | None = None
    private_test_cases: Tests | None = None
    metadata: Tests | None = None
    fn_name: Annotated[str, Meta(max_length=200)] | None = None
    test: Source | None = None
    entry_point: Annotated[str, Meta(pattern="^[A-Za-z_][A-Za-z0-9_]{0,199}$")] | None = None

    starter_code: Source | None = None
    canonical_solution: Source | None = None
    solutions: str | list[str] | dict[str, Any] | None = None
    time_limit: Any = None
    memory_limit: Any = None
    memory_limit_bytes: int | None = None
    reward: Literal["all", "fraction"] | None = None
    data_source: Annotated[str, Meta(max_length=200)] | None = None

    def __post_init__(self) -> None:
        if not any((self.question_content, self.description, self.question, self.problem, self.prompt)) and (
            self.responses_create_params is None
        ):
            raise ValueError("one of question_content, description, question, problem, prompt is needed")
        if self.test is not None and (self.entry_point is None or not isinstance(self.prompt, str)):
            raise ValueError("test needs an entry_point, and a prompt that is code")
        if self.conversation[-1].role != "user":
            raise ValueError("the prompt has to end with the user")
        if any(message.role == "system" for message in self.conversation[1:]):
            raise ValueError("a system message can only be the first")

    @property
    def conversation(self) -> list[ChatMessage]:
        """The problem as messages."""
        given = self.responses_create_params.input if self.responses_create_params else self.prompt
        if isinstance(given, list):
            return given
        text = self.question_content or self.description or self.question or self.problem or given
        return [ChatMessage(role="user", content=str(text))]

    def decoded(self, *, whole: bool = True) -> Problem:
        """What is judged. Raises ``ValueError`` with the name of the field that can't be read.

        Not ``whole``: without packed tests, where others say as well what kind of problem it is.
        """
        packed = self.private_test_cases if whole or self.public_test_cases is None else None
        row = Row(
            tests={
                "input_output": self.input_output,
                "tests": self.tests,
                "reward_model.ground_truth": self.reward_model.ground_truth if self.reward_model else None,
                "verifier_metadata.unit_tests": self.verifier_metadata.unit_tests if self.verifier_metadata else None,
                "private_tests": self.private_tests,
                "generated_tests": self.generated_tests,
                "private_test_cases": packed,
            },
            public={"public_tests": self.public_tests, "public_test_cases": self.public_test_cases},
            metadata=self.metadata,
            fn_name=self.fn_name,
            time_limit=self.time_limit,
            memory_limit=self.memory_limit if self.memory_limit_bytes is None else self.memory_limit_bytes / 1e6,
        )
        if self.test is not None:
            assert self.entry_point is not None
            assert isinstance(self.prompt, str)
            row = msgspec.structs.replace(row, checks=(self.prompt, self.test, self.entry_point))
        return problem_of(row)

    @property
    def reference(self) -> str | None:
        """A solution that the row brings."""
        if self.canonical_solution is not None and isinstance(self.prompt, str):
            return self.prompt + self.canonical_solution
        given = self.solutions
        if isinstance(given, str):
            try:
                given = msgspec.json.decode(given, type=list[str])
            except msgspec.DecodeError:
                return None
        if isinstance(given, dict):
            listed = zip(given.get("language") or [], given.get("solution") or [], strict=False)
            given = [text for language, text in listed if language == _PYTHON_3 and isinstance(text, str)]
        return given[0] if given else None


# CodeContests numbers its languages: 1 is Python 2, 3 is Python 3.
_PYTHON_3 = 3


def examples() -> list[dict[str, Any]]:
    """A few short problems to try things with."""
    lines = files("prorld_code").joinpath("examples.jsonl").read_bytes()
    return msgspec.json.Decoder(dict[str, Any]).decode_lines(lines)
