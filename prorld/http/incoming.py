"""From a request to typed values: who sends it, its parameters, its body. Everything is refused until it is decoded."""

from __future__ import annotations

import hashlib
from typing import TypeVar, cast

import msgspec
from quart import g, request

from prorld.errors import BadRequest
from prorld.http.auth import Caller
from prorld.http.errors import UnsupportedMedia
from prorld.wire.codec import decode, refused

__all__ = ["body", "caller", "digest", "query"]

T = TypeVar("T", bound=msgspec.Struct)


def caller() -> Caller:
    """Who sent the request."""
    return cast("Caller", g.caller)


def query(kind: type[T]) -> T:
    """The parameters behind the question mark; one that is unknown, or given twice, is refused by name."""
    known = msgspec.structs.fields(kind)
    names = {field.encode_name for field in known}
    given: dict[str, str] = {}
    for name, value in request.args.items(multi=True):
        if name not in names:
            raise BadRequest(f"unknown parameter {name[:64]!r}", code="unknown_parameter", details={"path": name[:64]})
        if name in given:
            raise BadRequest(f"parameter {name!r} is given twice", code="invalid_field", details={"path": name})
        given[name] = value
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as exc:
        raise refused(exc, "the query") from exc


class NoParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters of a call that takes none."""


async def body(kind: type[T], *, optional: bool = False) -> T:
    """The body, decoded; with ``optional`` an empty one stands for ``{}``."""
    data = await _data()
    if optional and not data:
        return decode(b"{}", kind)
    _must_be_json()
    return decode(data, kind)


async def digest() -> str:
    """A hash over the body as it was sent, before defaults, whatever the order of its keys and its white space."""
    canonical = msgspec.json.encode(msgspec.json.decode(await _data()), order="deterministic")
    return hashlib.sha256(canonical).hexdigest()


async def _data() -> bytes:
    return cast("bytes", await request.get_data(as_text=False))


def _must_be_json() -> None:
    kind = request.mimetype
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise UnsupportedMedia(f"the body must be application/json, not {kind[:64] or 'without a Content-Type'}")
