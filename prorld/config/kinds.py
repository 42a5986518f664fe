"""Questions about the type of a setting, asked while configuration is read and described. Knows no setting by name."""

from __future__ import annotations

import types
from enum import Enum
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

import msgspec

__all__ = ["Kind", "bare", "fields_of", "inner", "is_list", "is_struct", "is_table", "is_text", "words_of"]

# A type as annotations give it; Python has no better name for it.
Kind: TypeAlias = Any


def _origin(kind: Kind) -> Kind:
    return get_origin(kind)


def bare(kind: Kind) -> Kind:
    """The type without its bounds, and without ``None`` where it is optional."""
    if _origin(kind) is Annotated:
        return bare(get_args(kind)[0])
    if _origin(kind) in (Union, types.UnionType):
        others = [arm for arm in get_args(kind) if arm is not type(None)]
        return bare(others[0]) if len(others) == 1 else kind
    return kind


def is_struct(kind: Kind) -> bool:
    """A section or an entry: names are known."""
    plain = bare(kind)
    return isinstance(plain, type) and issubclass(plain, msgspec.Struct)


def is_table(kind: Kind) -> bool:
    """A table whose names are free."""
    return kind is Any or _origin(bare(kind)) is dict


def is_list(kind: Kind) -> bool:
    """A list of anything."""
    return _origin(bare(kind)) is list


def is_text(kind: Kind) -> bool:
    """Text, or one of a few words."""
    plain = bare(kind)
    if _origin(plain) is Literal:
        return True
    return isinstance(plain, type) and issubclass(plain, str)


def inner(kind: Kind) -> Kind:
    """The type of the values of a table, or of the items of a list."""
    return Any if kind is Any else get_args(bare(kind))[-1]


def fields_of(kind: Kind) -> dict[str, Kind]:
    """The settings of a section and their types."""
    return {field.name: field.type for field in msgspec.structs.fields(bare(kind))}


def words_of(kind: Kind) -> str:
    """The type and its bounds, for people."""
    plain = bare(kind)
    optional = type(None) in get_args(get_args(kind)[0] if _origin(kind) is Annotated else kind)
    return _name(plain) + _bounds(kind) + (" or unset" if optional else "")


def _name(plain: Kind) -> str:
    if plain is Any:
        return "any"
    if _origin(plain) is Literal:
        return " | ".join(str(word) for word in get_args(plain))
    if _origin(plain) is list:
        return f"list of {_name(bare(inner(plain)))}"
    if _origin(plain) is dict:
        return "table"
    if issubclass(plain, Enum):
        return " | ".join(str(member.value) for member in plain)
    return {str: "text", bool: "true | false", int: "integer", float: "number"}.get(plain, "table")


def _bounds(kind: Kind) -> str:
    if _origin(kind) is not Annotated:
        return ""
    metas = [meta for meta in get_args(kind)[1:] if isinstance(meta, msgspec.Meta)]
    signs = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
    found = [
        f"{sign} {getattr(meta, name):g}" if abs(getattr(meta, name)) < 10**6 else f"{sign} {getattr(meta, name)}"
        for meta in metas
        for name, sign in signs
        if getattr(meta, name) is not None
    ]
    return f" ({', '.join(found)})" if found else ""
