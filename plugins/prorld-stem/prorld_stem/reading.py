"""Finding the final answer in what a policy said. Pure text, linear in its length."""

from __future__ import annotations

import re
import unicodedata

__all__ = ["last_box", "plain_words", "stated", "unwrapped"]

# A final answer stands at the end. What came before is not looked at, however long it is.
TAIL_CHARS = 20_000
BOXES = 32
WRAPPERS = 4

_LEADS = ("the final answer is", "final answer:", "the correct answer is", "the answer is", "answer:")
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|boldsymbol)\s*\{([^{}]*)\}")


def last_box(text: str) -> str | None:
    r"""What stands in the last closed ``\boxed{}`` that is not empty."""
    tail = text[-TAIL_CHARS:]
    end = len(tail)
    for _ in range(BOXES):
        start = tail.rfind("\\boxed{", 0, end)
        if start < 0:
            return None
        content = _inside(tail, start + len("\\boxed"))
        if content is not None and content.strip():
            return content.strip()
        end = start
    return None


def stated(text: str) -> str | None:
    """What the last line that says it is the answer says behind that."""
    for line in reversed(text[-TAIL_CHARS:].splitlines()):
        bare = line.strip().strip("*_#> \t")
        lead = next((lead for lead in _LEADS if bare.lower().startswith(lead)), None)
        if lead is not None:
            rest = bare[len(lead) :].strip().strip("*_: \t").removesuffix(".").strip()
            return rest.strip("$ ") or None
    return None


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


def _inside(text: str, opening: int) -> str | None:
    depth = 0
    escaped = False
    for position in range(opening, len(text)):
        character = text[position]
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[opening + 1 : position]
    return None
