"""JSON in and out of the contract's types. A refused body names the path of the offending field."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from prorld.errors import BadRequest

T = TypeVar("T")

_AT = re.compile(r"^(?P<text>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)
_ENCODER = msgspec.json.Encoder()


def decode(body: bytes, kind: type[T], *, what: str = "the body") -> T:
    """Decode JSON strictly, or raise ``BadRequest`` with ``details["path"]``."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as exc:
        raise refused(exc, what) from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise BadRequest(f"{what} is not JSON: {exc}", code="bad_json", details={"path": "$"}) from exc


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
