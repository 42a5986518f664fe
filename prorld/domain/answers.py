"""Where a final answer stands in what a policy said. Linear in the length of the text, whatever it is made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

__all__ = ["TAIL_CHARS", "boxed", "last_box", "stated"]

# A final answer stands at the end. What came before is not looked at, however long it is.
TAIL_CHARS: Final = 20_000
BOXES_MAX: Final = 32

_BOX: Final = "\\boxed{"
_LEADS: Final = ("the final answer is", "final answer:", "the correct answer is", "the answer is", "answer:")


def boxed(text: str) -> Iterator[str]:
    r"""What stands in each closed ``\boxed{}`` that is not empty, from the last to the first, of the last 32."""
    tail = text[-TAIL_CHARS:]
    end = len(tail)
    for _ in range(BOXES_MAX):
        start = tail.rfind(_BOX, 0, end)
        if start < 0:
            return
        content = _inside(tail, start + len(_BOX) - 1)
        if content is not None and content.strip():
            yield content.strip()
        end = start


def last_box(text: str) -> str | None:
    r"""What stands in the last closed ``\boxed{}`` that is not empty."""
    return next(boxed(text), None)


def stated(text: str) -> str | None:
    """What the last line that says it is the answer says behind that."""
    for line in reversed(text[-TAIL_CHARS:].splitlines()):
        bare = line.strip().strip("*_#> \t")
        lead = next((lead for lead in _LEADS if bare.lower().startswith(lead)), None)
        if lead is not None:
            rest = bare[len(lead) :].strip().strip("*_: \t").removesuffix(".").strip()
            return rest.strip("$ ") or None
    return None


def _inside(text: str, opening: int) -> str | None:
    depth = 0
    escaped = False
    for position in range(opening, len(text)):
        character = text[position]
        if escaped:
            # Behind a backslash a brace is a sign to be shown and closes nothing: \left\{ need not have a partner.
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
