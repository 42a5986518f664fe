"""Values inside a chat template: their texts, what may be turned into text, and which calls may multiply text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.runtime import Undefined

__all__ = ["CHARS_MAX", "all_text", "check_call", "measure"]

CHARS_MAX = 16 * 2**20
NODES_MAX = 200_000

# What chat templates do to text. Padding and formatting are left out: they make much text of a number.
# fmt: off
_TEXT_METHODS = frozenset((
    "capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdigit", "isspace", "join",
    "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition",
    "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "title", "upper",
))
# fmt: on


def measure(value: Any) -> str:
    """The value as text, refused before it is made where it is too large. A shared part counts each time it stands."""
    if isinstance(value, str):
        return value
    left, size = NODES_MAX, 0
    stack: list[Any] = [value]
    while stack:
        left -= 1
        node = stack.pop()
        if isinstance(node, str):
            size += len(node)
        elif isinstance(node, Mapping):
            stack.extend(node.keys())
            stack.extend(node.values())
        elif isinstance(node, list | tuple | set | frozenset):
            stack.extend(node)
        elif not isinstance(node, int | float | Undefined | None):
            raise SecurityError(f"a {type(node).__name__} is no text")
        if left < len(stack) or size > CHARS_MAX:
            raise SecurityError("a value too large to be written")
    return str(value)


def check_call(callee: Any, args: Sequence[Any]) -> None:
    """Refuse a call of a method of text that is not known, or that would make too much text."""
    owner = getattr(callee, "__self__", None)
    if not isinstance(owner, str):
        return
    name = callee.__name__
    if name not in _TEXT_METHODS:
        raise SecurityError(f"text has no method {name} here")
    if name == "replace":
        old, new = (args[0], args[1]) if len(args) > 1 else ("", "")
        times = owner.count(old) if isinstance(old, str) else 0
        if isinstance(new, str) and times * len(new) > CHARS_MAX:
            raise SecurityError("replace would make too much text")
    if name == "join" and args and isinstance(args[0], Sequence) and len(args[0]) * len(owner) > CHARS_MAX:
        raise SecurityError("join would make too much text")


def all_text(value: object) -> str:
    """Every text in a value, on lines of their own."""
    texts: list[str] = []
    stack: list[Any] = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, str):
            texts.append(node)
        elif isinstance(node, Mapping):
            stack.extend(node.keys())
            stack.extend(node.values())
        elif isinstance(node, list | tuple):
            stack.extend(node)
    return "\n".join(texts)
