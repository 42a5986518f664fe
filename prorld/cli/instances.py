"""Instances from files and from the command line, checked line by line."""

from __future__ import annotations

from typing import Any

from prorld.cli.common import read_text
from prorld.cli.exits import UsageError
from prorld.errors import ProrldError
from prorld.wire.codec import decode

INSTANCE_BYTES_MAX = 512 << 20


def read_lines(text: str, name: str) -> list[tuple[int, dict[str, Any]]]:
    """One JSON object per line, with its line's number; blank lines are left out."""
    found: list[tuple[int, dict[str, Any]]] = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            found.append((number, _object(line, f"{name}, line {number}")))
    if not found:
        raise UsageError(f"{name} holds no instance")
    return found


def read_instance(argument: str) -> dict[str, Any]:
    """An instance from the command line: JSON, ``@FILE`` (the first line of many), or ``@-``."""
    if not argument.startswith("@"):
        return _object(argument, "the instance")
    name = argument[1:]
    text = read_text(name, limit_bytes=INSTANCE_BYTES_MAX)
    try:
        return _object(text, name)
    except UsageError:
        return read_lines(text, name)[0][1]


def _object(text: str, what: str) -> dict[str, Any]:
    try:
        return decode(text.encode("utf-8", "surrogatepass"), dict[str, Any], what=what)
    except ProrldError as exc:
        raise UsageError(exc.message) from exc
