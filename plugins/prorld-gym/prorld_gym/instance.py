"""The instance: an environment with its seed, or a row that was already made."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

__all__ = ["GymConfig", "GymInstance", "Kind"]

Kind = Literal["reasoning_gym", "gem", "verifiers"]
Text = Annotated[str, Meta(min_length=1, max_length=200_000)]


class GymInstance(msgspec.Struct, frozen=True, kw_only=True):
    """One task.

    ``env`` is the name of a generator or environment, ``config`` its keywords, ``seed`` and ``index`` choose the task.
    A ready row of reasoning-gym has ``question``, ``answer`` and ``metadata`` instead. ``kind`` is by default what
    ``data_source`` begins with.
    """

    data_source: str = "reasoning_gym"
    kind: Kind | None = None
    env: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    index: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    config: dict[str, Any] = {}
    question: Text | None = None
    answer: Any = None
    metadata: dict[str, Any] = {}
    max_turns: Annotated[int, Meta(ge=1, le=500)] | None = None

    def __post_init__(self) -> None:
        if self.env is None and (self.question is None or "source_dataset" not in self.metadata):
            raise ValueError("env is needed, or question and metadata.source_dataset")

    @property
    def shape(self) -> Kind:
        """Which kind of environment it is."""
        if self.kind is not None:
            return self.kind
        source = self.data_source.replace("-", "_")
        return "gem" if source.startswith("gem") else "verifiers" if source.startswith("verifiers") else "reasoning_gym"

    @property
    def name(self) -> str:
        """The generator or environment."""
        return self.env or str(self.metadata["source_dataset"])

    @property
    def entry(self) -> dict[str, Any] | None:
        """The ready row, where it is one."""
        if self.question is None:
            return None
        return {"question": self.question, "answer": self.answer, "metadata": self.metadata}


class GymConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of everything that an environment does, and where its libraries are.

    ``python`` is the interpreter of an environment that has them; by default they are beside prorld. ``modules`` are
    what ``env = "package.module:Class"`` may import. ``extract`` says where the answer of one turn stands. What scores
    up to ``consolation`` for the mere fact that something was answered counts as nothing. ``clip`` keeps the reward of
    an episode between 0 and 1.
    """

    python: str | None = None
    modules: tuple[str, ...] = ("prorld_gym.example",)
    children: Annotated[int, Meta(ge=1, le=64)] = 2
    make_s: Annotated[float, Meta(gt=0, le=600)] = 20.0
    step_s: Annotated[float, Meta(gt=0, le=600)] = 20.0
    score_s: Annotated[float, Meta(gt=0, le=600)] = 10.0
    memory_bytes: Annotated[int, Meta(ge=256 << 20)] = 2 << 30
    answer_chars: Annotated[int, Meta(ge=100, le=200_000)] = 20_000
    turns_max: Annotated[int, Meta(ge=1, le=500)] = 50
    extract: Literal["tags", "tags-or-last-line", "all"] = "tags"
    consolation: Annotated[float, Meta(ge=0, lt=1)] = 0.05
    clip: bool = True
