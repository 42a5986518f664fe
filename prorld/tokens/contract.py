"""The seams of the token room: what a tokenizer and a renderer promise.

The prefix law: what has been sent to an engine is never tokenized again. A renderer turns a whole conversation into ids
once (``render``) and after that only new observation messages (``bridge``); what it can't bridge it refuses with
``RendererError`` and the context forks. Text of messages can never become a control token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from prorld.domain.messages import Message, ToolCall, ToolSchema

__all__ = ["ParsedTurn", "RenderedMessage", "Renderer", "Tokenizer"]


class ParsedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy said in one turn, read from the ids it sampled."""

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    complete: bool = True

    def as_message(self) -> Message:
        """The assistant message for people and chat exports."""
        return Message(
            role="assistant", content=self.content, reasoning=self.reasoning, tool_calls=list(self.tool_calls)
        )


class RenderedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Ids of one message, or of template glue (``message`` is ``None``), in order."""

    ids: list[int]
    message: Message | None = None


class Tokenizer(Protocol):
    """Text to ids and back."""

    @property
    def name(self) -> str:
        """Where it came from, for records."""
        ...

    @property
    def digest(self) -> str:
        """SHA-256 over what determines its behaviour, so that a trainer can compare."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The Jinja chat template that came with it."""
        ...

    @property
    def eos_id(self) -> int | None:
        """The end-of-sequence token."""
        ...

    def encode(self, text: str) -> list[int]:
        """Trusted text: control tokens written in it are control tokens."""
        ...

    def encode_untrusted(self, text: str) -> list[int]:
        """Text from the world: control tokens written in it stay text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text for people and parsers, control tokens shown; never to be encoded again."""
        ...

    def token_id(self, token: str) -> int | None:
        """The id of one token by its exact text."""
        ...


class Renderer(Protocol):
    """Messages to ids for one model family."""

    @property
    def name(self) -> str:
        """Name and version, for records."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer it renders with."""
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an assistant turn."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[RenderedMessage]:
        """A whole conversation, up to and including the opening of the next assistant turn."""
        ...

    def bridge(
        self, prompt: Sequence[int], sampled: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> list[RenderedMessage]:
        """Only what follows ``prompt`` and the assistant turn ``sampled`` upon it: the turn's closing if it was cut,
        the new messages, the opening of the next turn. Raises ``RendererError`` where the template does not allow it.
        """
        ...

    def parse(self, prompt: Sequence[int], sampled: Sequence[int], tools: Sequence[ToolSchema]) -> ParsedTurn:
        """What the policy said upon ``prompt``. Never raises for what a policy wrote."""
        ...
