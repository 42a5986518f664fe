"""Values between processes that don't trust each other: plain data as JSON, and nothing that could act.

``pack`` runs beside a solution, which may have changed anything there; all it can do is to say another value.
``unpack`` builds exact built-in types, so that no method of a solution's objects takes part in a comparison.
"""

from __future__ import annotations

import math
from typing import Any

__all__ = ["TOO_DEEP", "NotPlainError", "pack", "unpack"]

DEPTH_MAX = 200
TOO_DEEP = "nested too deeply"
_WORD = 1 << 63
_NO_NUMBERS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


class NotPlainError(Exception):
    """A value that is no plain data; the words say which."""


def pack(value: Any, depth: int = DEPTH_MAX) -> Any:
    """A value as JSON: what JSON lacks is an object with its kind ``t`` and its content ``v``."""
    if depth <= 0:
        raise NotPlainError(TOO_DEEP)
    if value is None or isinstance(value, (bool, str)):
        return str.__str__(value) if isinstance(value, str) else value
    if isinstance(value, int):
        number = int.__int__(value)
        return number if -_WORD < number < _WORD else {"t": "int", "v": hex(number)}
    if isinstance(value, float):
        real = float.__float__(value)
        if math.isfinite(real):
            return real
        return {"t": "float", "v": "nan" if math.isnan(real) else "inf" if real > 0 else "-inf"}
    return _pack_more(value, depth - 1)


def _pack_more(value: Any, depth: int) -> Any:
    if isinstance(value, list):
        return [pack(item, depth) for item in list.__iter__(value)]
    if isinstance(value, tuple):
        return {"t": "tuple", "v": [pack(item, depth) for item in tuple.__iter__(value)]}
    if isinstance(value, dict):
        return {"t": "dict", "v": [[pack(key, depth), pack(item, depth)] for key, item in dict.items(value)]}
    if isinstance(value, (set, frozenset)):
        return {"t": "set", "v": [pack(item, depth) for item in value]}
    if isinstance(value, (bytes, bytearray)):
        return {"t": "bytes", "v": bytes(value).hex()}
    if isinstance(value, complex):
        return {"t": "complex", "v": [pack(value.real, depth), pack(value.imag, depth)]}
    kind = type(value)
    if kind.__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
        return pack(value.tolist(), depth)
    if kind.__name__ == "deque" and kind.__module__ == "collections":
        return [pack(item, depth) for item in value]
    raise NotPlainError("a value of the type " + str(kind.__name__)[:80])


def unpack(data: Any) -> Any:
    """The value again. Raises ``NotPlainError`` for what ``pack`` never writes."""
    if isinstance(data, list):
        return [unpack(item) for item in data]
    if not isinstance(data, dict):
        return data
    kind: Any = data.get("t")
    content: Any = data.get("v")
    try:
        if kind == "float":
            return _NO_NUMBERS[content]
        if kind == "int":
            return int(content, 16)
        if kind == "bytes":
            return bytes.fromhex(content)
        if kind == "tuple":
            return tuple(unpack(item) for item in content)
        if kind == "set":
            return {unpack(item) for item in content}
        if kind == "dict":
            return {unpack(key): unpack(item) for key, item in content}
        if kind == "complex":
            return complex(unpack(content[0]), unpack(content[1]))
    except (TypeError, ValueError, KeyError, IndexError) as exc:
        raise NotPlainError("malformed " + str(kind)[:40]) from exc
    raise NotPlainError("of the unknown kind " + str(kind)[:40])
