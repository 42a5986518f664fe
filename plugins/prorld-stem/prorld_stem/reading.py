"""A short answer without what only dresses it. Pure text, linear in its length."""

from __future__ import annotations

import re
import unicodedata

__all__ = ["plain_words", "unwrapped"]

WRAPPERS = 4

_WRAPPED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|boldsymbol)\s*\{([^{}]*)\}")


def unwrapped(text: str) -> str:
    """Without dollar signs and the commands of LaTeX that only set words in another type."""
    text = text.strip().strip("$ ").strip()
    for _ in range(WRAPPERS):
        plainer = _WRAPPED.sub(r"\1", text)
        if plainer == text:
            break
        text = plainer
    return text.strip()


def plain_words(text: str) -> str:
    """How two short answers are compared as words: by letters and signs, not by case, blanks or a final stop."""
    return " ".join(unicodedata.normalize("NFKC", unwrapped(text)).casefold().split()).strip(" .")
