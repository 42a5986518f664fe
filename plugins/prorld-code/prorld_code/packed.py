"""Test cases as LiveCodeBench packs them: base64 of zlib of a pickled string of JSON.

Unpickling runs what a row says. Here the opcodes are only read, and nothing passes but one string.
"""

from __future__ import annotations

import base64
import binascii
import pickletools
import zlib
from collections.abc import Iterator
from typing import Final

__all__ = ["pickled_text", "unpacked"]

OPCODES_MAX: Final = 16
# What a pickled string of any protocol is made of, beside the string itself.
_AROUND: Final = frozenset({"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT", "STOP"})
_TEXT: Final = frozenset({"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"})


def unpacked(text: str, max_bytes: int) -> str:
    """The JSON in a packed field. Raises ``ValueError`` for anything else, and for more than ``max_bytes`` of it."""
    try:
        squeezed = base64.b64decode(text, validate=True)
        expander = zlib.decompressobj()
        data = expander.decompress(squeezed, max_bytes)
    except (binascii.Error, zlib.error) as exc:
        raise ValueError(f"neither JSON nor packed as base64 of zlib: {exc}") from exc
    if not expander.eof:
        raise ValueError(f"not whole, or larger than {max_bytes} bytes when unpacked")
    return pickled_text(data)


def pickled_text(data: bytes) -> str:
    """The string that a pickle holds, read and never run. Raises ``ValueError`` for a pickle of anything else."""
    found: list[str] = []
    for count, (name, argument) in enumerate(_opcodes(data)):
        if name in _TEXT and isinstance(argument, str):
            found.append(argument)
        elif name not in _AROUND:
            raise ValueError(f"a pickle that does more than hold text ({name})")
        if count >= OPCODES_MAX or len(found) > 1:
            raise ValueError("a pickle of more than one string")
    if not found:
        raise ValueError("a pickle without a string")
    return found[0]


def _opcodes(data: bytes) -> Iterator[tuple[str, object]]:
    try:
        for opcode, argument, _ in pickletools.genops(data):
            yield opcode.name, argument
    except (ValueError, IndexError, OverflowError) as exc:
        raise ValueError(f"a pickle that can't be read: {exc}") from exc
