"""Message texts on their way through a library that can't tell them from a template's own text.

Before the library sees a message, a private-use character is put behind every character that could begin a control
token and before the text itself; so no control token can be spelled by a message, nor by a message and what stands
beside it. The library is given a tokenizer that takes the marks out again and encodes such text as plain pieces.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from prorld.errors import RendererError
from prorld.tokens.standins import Kind
from prorld.tokens.tokenizer import HfTokenizer

__all__ = ["MARK", "Guard", "GuardedTokenizer"]

MARK = "\ue000"
_ESCAPE = "\ue001"
_ESCAPED = {MARK: f"{_ESCAPE}0", _ESCAPE: f"{_ESCAPE}1"}
_PLAIN = {written: char for char, written in _ESCAPED.items()}
_ANY = re.compile(f"[{MARK}{_ESCAPE}]")
_WRITTEN = re.compile("|".join(_PLAIN))

# Names and ids that libraries look into; none of these characters begins a control token that a guard accepts.
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,256}")


class Guard:
    """Marks untrusted text for one tokenizer. It keeps nothing of the texts."""

    def __init__(self, tokenizer: HfTokenizer) -> None:
        control = tokenizer.control_tokens
        firsts = "".join(sorted({token[0] for token in control if token}))
        if any(len(token) < 2 for token in control):
            raise RendererError(f"{tokenizer.name} has control tokens of one character")
        if _NAME.search(firsts) or MARK in "".join(control) or _ESCAPE in "".join(control):
            raise RendererError(f"{tokenizer.name} has control tokens that begin like words")
        self._control = control
        self._lengths = sorted({len(token) for token in control}, reverse=True)
        self._first = re.compile(f"[{re.escape(firsts)}]" if firsts else "(?!)")
        # Two characters, so that many of the first alone cost nothing; a mark is never the second.
        self._begin = re.compile("|".join(sorted({re.escape(token[:2]) for token in control})) or "(?!)")

    def mark(self, text: str) -> str:
        """The text with marks. Blanks at its ends stay there, since templates strip them."""
        start = len(text) - len(text.lstrip())
        if start == len(text):
            return text
        text = _ANY.sub(lambda found: _ESCAPED[found[0]], text)
        text = self._first.sub(rf"\g<0>{MARK}", text)
        return f"{text[:start]}{MARK}{text[start:]}"

    def mark_kind(self, text: str, kind: Kind) -> str:
        """As ``mark``, but plain names and ids stay as they are."""
        return text if kind == "data" and _NAME.fullmatch(text) else self.mark(text)

    def unmark(self, text: str) -> str:
        """The text as it was before ``mark``."""
        return _WRITTEN.sub(lambda found: _PLAIN[found[0]], text.replace(MARK, ""))

    def spells(self, text: str) -> bool:
        """Whether a text spells a control token."""
        return next(self.control(text), None) is not None

    def control(self, text: str) -> Iterator[tuple[int, int, int]]:
        """The control tokens that are spelled without marks: where they begin and end, and their ids."""
        at = 0
        while (found := self._begin.search(text, at)) is not None:
            at = found.start() + 1
            for length in self._lengths:
                token_id = self._control.get(text[found.start() : found.start() + length])
                if token_id is not None:
                    yield found.start(), found.start() + length, token_id
                    at = found.start() + length
                    break


class GuardedTokenizer:
    """The tokenizer as the library is given it. Only what has no marks can become a control token.

    It has no offsets: the library attributes tokens to messages by itself then, as precisely as is needed here.
    """

    def __init__(self, tokenizer: HfTokenizer, guard: Guard) -> None:
        self._tokenizer = tokenizer
        self._guard = guard
        self.name_or_path = tokenizer.name
        self.chat_template = tokenizer.chat_template
        self.bos_token, self.eos_token = tokenizer.bos_token, tokenizer.eos_token
        self.bos_token_id = None if tokenizer.bos_token is None else tokenizer.token_id(tokenizer.bos_token)
        self.eos_token_id = tokenizer.eos_id
        self.unk_token_id: int | None = None
        self.all_special_tokens = list(tokenizer.control_tokens)
        self.all_special_ids = list(tokenizer.control_tokens.values())

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        """Ids; run by run, so that what is beside a control token changes nothing."""
        ids: list[int] = []
        at = 0
        for start, end, token_id in self._guard.control(text):
            ids += self._plain(text[at:start])
            ids.append(token_id)
            at = end
        return ids + self._plain(text[at:])

    def decode(self, ids: int | Sequence[int], *_: Any, **__: Any) -> str:
        """Text with its control tokens."""
        return self._tokenizer.decode([ids] if isinstance(ids, int) else list(ids))

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of a token by its exact text, or of several."""
        if isinstance(tokens, str):
            return self._tokenizer.token_id(tokens)
        return [self._tokenizer.token_id(token) for token in tokens]

    def _plain(self, run: str) -> list[int]:
        return self._tokenizer.encode_untrusted(self._guard.unmark(run)) if run else []
