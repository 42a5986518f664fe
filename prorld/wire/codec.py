"""JSON in and out of the contract's types. A refused body names the path of the offending field."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from prorld.errors import BadRequest

T = TypeVar("T")

# What is decoded is encoded again and walked by handlers. No task needs more; some Pythons can't take much more.
DEPTH_MAX = 100

_AT = re.compile(r"^(?P<text>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)
_ENCODER = msgspec.json.Encoder()


def decode(body: bytes, kind: type[T], *, what: str = "the body") -> T:
    """Decode JSON strictly, or raise ``BadRequest`` with ``details["path"]``."""
    try:
        decoded = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as exc:
        raise refused(exc, what) from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise BadRequest(f"{what} is not JSON: {exc}", code="bad_json", details={"path": "$"}) from exc
    if _is_deeper(decoded, DEPTH_MAX):
        raise BadRequest(f"{what} is nested deeper than {DEPTH_MAX} levels", code="too_deep", details={"path": "$"})
    return decoded


def _is_deeper(value: object, depth_max: int) -> bool:
    """Whether anything in a decoded value lies deeper; without recursion, since that is what it guards."""
    level: list[object] = [value]
    for _ in range(depth_max + 1):
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            elif isinstance(item, msgspec.Struct):
                below.extend(getattr(item, name) for name in item.__struct_fields__)
        if not below:
            return False
        level = below
    return True


def convert(value: Any, kind: type[T], *, what: str) -> T:
    """The same for something already decoded."""
    try:
        return msgspec.convert(value, type=kind)
    except msgspec.ValidationError as exc:
        raise refused(exc, what) from exc


def refused(exc: msgspec.ValidationError, what: str) -> BadRequest:
    """A validation error as a refusal that names the field."""
    match = _AT.match(str(exc))
    text, path = (match["text"], match["path"] or "$") if match else (str(exc), "$")
    return BadRequest(f"{what}, at {path}: {text}", code="invalid_field", details={"path": path})


def encode(value: Any) -> bytes:
    """JSON bytes."""
    return _ENCODER.encode(value)
