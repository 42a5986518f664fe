"""The parts of OpenAI's wire format that are looked at, in the shapes that its many servers write."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from prorld.errors import MalformedReply

__all__ = ["MODELS", "REPLY", "Card", "Choice", "Reply", "lined_up", "said_tokens", "text_of"]


class _Entry(msgspec.Struct, frozen=True):
    token: str
    logprob: float | None = None


class _Logprobs(msgspec.Struct, frozen=True):
    """Completions write two lists, chats one of pairs; some servers write pairs for both."""

    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    content: list[_Entry] | None = None


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None


class Choice(msgspec.Struct, frozen=True):
    """One answer; ``text`` of a completion, ``message`` of a chat."""

    text: str | None = None
    message: _Message | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    completion_tokens: int | None = None
    prompt_tokens_details: _CachedTokens | None = None


class Reply(msgspec.Struct, frozen=True):
    """``POST /v1/completions`` or ``/v1/chat/completions``."""

    choices: list[Choice]
    id: str | None = None
    usage: _Usage | None = None


class _Meta(msgspec.Struct, frozen=True):
    n_ctx: int | None = None


class Card(msgspec.Struct, frozen=True):
    """One entry of ``GET /v1/models``. Some servers say there how long their context is, each in its own word."""

    id: str
    owned_by: str | None = None
    max_model_len: int | None = None
    context_length: int | None = None
    meta: _Meta | None = None

    @property
    def context_tokens(self) -> int | None:
        """The context, where it is said."""
        return self.max_model_len or self.context_length or (self.meta.n_ctx if self.meta else None)


class _Models(msgspec.Struct, frozen=True):
    data: list[Card]


REPLY = msgspec.json.Decoder(Reply)
MODELS = msgspec.json.Decoder(_Models)


def text_of(choice: Choice, where: str) -> str:
    """What was said. What a server took for reasoning and put aside was said, too, and goes back where it was."""
    if choice.text is not None:
        return choice.text
    message = choice.message
    if message is None or (message.content is None and not message.reasoning_content):
        raise MalformedReply(f"{where}: no text")
    if not message.reasoning_content:
        return message.content or ""
    return f"<think>\n{message.reasoning_content}\n</think>\n\n{message.content or ''}"


def said_tokens(choice: Choice, where: str) -> tuple[list[str], list[float]] | None:
    """The engine's own tokens as text with their log-probabilities; ``None`` where it does not give them all."""
    said = choice.logprobs
    if said is None:
        return None
    if said.content is not None:
        tokens: list[str] = [entry.token for entry in said.content]
        values = [entry.logprob for entry in said.content]
    else:
        tokens, values = said.tokens or [], said.token_logprobs or []
    if len(tokens) != len(values):
        raise MalformedReply(f"{where}: {len(tokens)} tokens but {len(values)} log-probabilities")
    known = [value for value in values if value is not None]
    return (tokens, known) if tokens and len(known) == len(values) else None


def lined_up(tokens: Sequence[str], ids: Sequence[int], *, closed: bool, id_of: Callable[[str], int | None]) -> bool:
    """Whether the engine's tokens are ours one to one.

    With ``closed`` our last one is the end of the turn, which engines write as nothing or in their own way: there it is
    enough that they have one more.
    """
    body = len(ids) - closed
    if len(tokens) != len(ids):
        return False
    return all(id_of(text) == token for text, token in zip(tokens[:body], ids[:body], strict=True))
