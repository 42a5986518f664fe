"""From a request to typed values: who sends it, its parameters, its body. Everything is refused until it is decoded."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import TypeVar, cast

import msgspec
from msgspec import UnsetType
from quart import g, request

from prorld.errors import BadRequest
from prorld.http.auth import Caller
from prorld.http.errors import UnsupportedMedia
from prorld.http.negotiate import JSON, MSGPACK
from prorld.wire.codec import decode, decode_msgpack, plain, refused

__all__ = ["AnyParameters", "NoParameters", "body", "caller", "digest", "given", "query"]

T = TypeVar("T")
StructT = TypeVar("StructT", bound=msgspec.Struct)


class NoParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters of a call that takes none."""


class AnyParameters(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of a call that is often sent with some and needs none."""


def caller() -> Caller:
    """Who sent the request."""
    return cast("Caller", g.caller)


def given(value: T | UnsetType) -> T | None:
    """A parameter, or ``None`` where it was left out. Parameters are no ``None`` themselves: "null" is a text."""
    return None if isinstance(value, UnsetType) else value


def query(kind: type[StructT]) -> StructT:
    """The parameters behind the question mark; one that is unknown, or given twice, is refused by name."""
    if kind is AnyParameters:
        return kind()
    names = _names(kind)
    found: dict[str, str] = {}
    for name, value in request.args.items(multi=True):
        if name not in names:
            raise BadRequest(f"unknown parameter {name[:64]!r}", code="unknown_parameter", details={"path": name[:64]})
        if name in found:
            raise BadRequest(f"parameter {name!r} is given twice", code="invalid_field", details={"path": name})
        found[name] = value
    try:
        return msgspec.convert(found, kind, strict=False)
    except msgspec.ValidationError as exc:
        raise refused(exc, "the query") from exc


@cache
def _names(kind: type[msgspec.Struct]) -> frozenset[str]:
    """The parameters of a kind. Kinds are classes of this room, so there are few."""
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind))


async def body(kind: type[StructT], *, optional: bool = False) -> StructT:
    """The body, decoded; with ``optional`` an empty one stands for ``{}``."""
    data = await _data()
    if optional and not data:
        return decode(b"{}", kind)
    return decode_msgpack(data, kind) if _form() == MSGPACK else decode(data, kind)


async def digest() -> tuple[str, int]:
    """A hash over the body as it was sent, before defaults, and its length in bytes.

    Neither its form nor the order of its keys matters to the hash.
    """
    data = await _data()
    sent = plain(data) if _form() == MSGPACK else msgspec.json.decode(data)
    return hashlib.sha256(msgspec.json.encode(sent, order="deterministic")).hexdigest(), len(data)


async def _data() -> bytes:
    return cast("bytes", await request.get_data(as_text=False))


def _form() -> str:
    """JSON or MessagePack, by the request's own word."""
    coding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise UnsupportedMedia(f"a body is sent as it is, not with Content-Encoding {coding[:64]!r}")
    kind = request.mimetype
    if kind == MSGPACK:
        return MSGPACK
    if kind == JSON or (kind.startswith("application/") and kind.endswith("+json")):
        return JSON
    found = kind[:64] or "without a Content-Type"
    raise UnsupportedMedia(f"the body must be {JSON} or {MSGPACK}, not {found}")
