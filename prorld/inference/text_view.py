"""A conversation as text, for engines that take no token ids. Nothing is made before an engine asks for it."""

from __future__ import annotations

from typing import Any

from prorld.tokens.context import TokenContext
from prorld.tokens.contract import Renderer
from prorld.tokens.dialect import HermesDialect
from prorld.tokens.standins import as_is, template_messages

__all__ = ["ConversationView"]


class ConversationView:
    """The branch that grows, as it is when it is asked. Implements ``prorld.inference.contract.TextView``."""

    def __init__(self, renderer: Renderer, context: TokenContext) -> None:
        self._renderer = renderer
        self._context = context

    def prompt(self) -> str:
        """The very tokens of the branch, decoded, with their control tokens."""
        return self._renderer.tokenizer.decode(self._context.current.ids)

    def messages(self) -> list[dict[str, Any]]:
        """The transcript with tools written as text. A turn that was interrupted stands at the end as far as it came.

        Such engines have tool calls of their own, in which the policy would not speak as it was taught.
        """
        told = list(self._context.transcript)
        begun = self._context.turn_with(())
        if begun.content or begun.reasoning or begun.tool_calls:
            told.append(begun.as_message())
        schemas = [tool.as_function() for tool in self._context.tools]
        plain = HermesDialect().plain(template_messages(told, as_is), schemas)
        return [{"role": message["role"], "content": message["content"]} for message in plain]

    def encode(self, text: str) -> list[int]:
        """Ids of a text that an engine gave; control tokens written in it stay text."""
        return self._renderer.tokenizer.encode_untrusted(text)
