"""JSON and MessagePack in and out of the contract's types. A refused body names the path of the offending field."""

from __future__ import annotations

import math
import re
from typing import Any, TypeVar

import msgspec

from prorld.errors import BadRequest

__all__ = ["DEPTH_MAX", "convert", "decode", "decode_msgpack", "encode", "encode_msgpack", "plain", "refused"]

T = TypeVar("T")

# What is decoded is encoded again and walked by handlers. No task needs more; some Pythons can't take much more.
DEPTH_MAX = 100

# MessagePack has no larger ones, and most readers of JSON make floats of them.
_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1

_AT = re.compile(r"^(?P<text>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)
_ENCODER = msgspec.json.Encoder()
_PACKER = msgspec.msgpack.Encoder()


def decode(body: bytes, kind: type[T], *, what: str = "the body") -> T:
    """Decode JSON strictly, or raise ``BadRequest`` with ``details["path"]``."""
    try:
        decoded = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as exc:
        raise refused(exc, what) from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise BadRequest(f"{what} is not JSON: {exc}", code="bad_json", details={"path": "$"}) from exc
    _check(decoded, what)
    return decoded


def decode_msgpack(body: bytes, kind: type[T], *, what: str = "the body") -> T:
    """The same for MessagePack. It must say what JSON can say: no bytes, no extensions, text for keys."""
    return convert(plain(body, what=what), kind, what=what)


def plain(body: bytes, *, what: str = "the body") -> Any:
    """MessagePack as values that JSON has, too."""
    try:
        decoded = msgspec.msgpack.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError, ValueError, OverflowError) as exc:
        raise BadRequest(f"{what} is not MessagePack: {exc}", code="bad_msgpack", details={"path": "$"}) from exc
    _check(decoded, what)
    return decoded


def _check(value: object, what: str) -> None:
    """Refuse what is nested too deeply or can't be written in JSON; without recursion, since that is what it guards."""
    level: list[object] = [value]
    for _ in range(DEPTH_MAX + 1):
        below: list[object] = []
        for item in level:
            match item:
                case dict():
                    for key in item:
                        if not isinstance(key, str):
                            raise _no_json(what, f"a key is {type(key).__name__}, not text")
                    below.extend(item.values())
                case list():
                    below.extend(item)
                case msgspec.Struct():
                    below.extend(getattr(item, name) for name in item.__struct_fields__)
                case float() if not math.isfinite(item):
                    raise _no_json(what, "a number is not finite")
                case int() if not _INT_MIN <= item <= _INT_MAX:
                    raise _no_json(what, "an integer has more than 64 bits")
                case None | str() | int() | float() | msgspec.UnsetType():
                    pass
                case _:
                    raise _no_json(what, f"{type(item).__name__} is nothing that JSON has")
        if not below:
            return
        level = below
    raise BadRequest(f"{what} is nested deeper than {DEPTH_MAX} levels", code="too_deep", details={"path": "$"})


def _no_json(what: str, reason: str) -> BadRequest:
    return BadRequest(f"{what}: {reason}", code="invalid_field", details={"path": "$"})


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


def encode_msgpack(value: Any) -> bytes:
    """MessagePack bytes."""
    return _PACKER.encode(value)
