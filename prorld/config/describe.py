"""The configuration for people: every setting with its meaning, and the effective values with their origins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import msgspec

from prorld.config.kinds import Kind, inner, is_list, is_struct, is_table, words_of
from prorld.config.load import Loaded
from prorld.config.sections import Config
from prorld.log import MASK, is_secret

__all__ = ["Row", "Setting", "describe", "rows"]


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One setting as the documentation shows it. ``NAME`` stands for a free name, ``[]`` for each entry of a list."""

    path: str
    kind: str
    default: Any
    description: str


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One effective value, secrets masked, and where it came from."""

    path: str
    value: Any
    origin: str


def describe() -> tuple[Setting, ...]:
    """Every setting there is, in the order of the sections."""
    return tuple(_settings(Config, ""))


def rows(loaded: Loaded) -> tuple[Row, ...]:
    """Every effective value, in the order of the sections."""
    return tuple(_rows(msgspec.to_builtins(loaded.config), (), loaded))


def _settings(kind: Kind, prefix: str) -> Iterator[Setting]:
    for field in msgspec.structs.fields(kind):
        path = f"{prefix}{field.name}"
        if is_struct(field.type):
            yield from _settings(field.type, f"{path}.")
            continue
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        yield Setting(
            path=path,
            kind=words_of(field.type),
            default=None if default is msgspec.NODEFAULT else msgspec.to_builtins(default),
            description=_description(field.type),
        )
        if (is_list(field.type) or is_table(field.type)) and is_struct(inner(field.type)):
            yield from _settings(inner(field.type), f"{path}[]." if is_list(field.type) else f"{path}.NAME.")


def _description(kind: Kind) -> str:
    metas = [meta for meta in get_args(kind)[1:] if isinstance(meta, msgspec.Meta)]
    return next((meta.description for meta in metas if meta.description), "")


def _rows(value: Any, path: tuple[str, ...], loaded: Loaded) -> Iterator[Row]:
    if isinstance(value, dict) and (value or len(path) == 1) and not (path and is_secret(path[-1])):
        for key, item in value.items():
            yield from _rows(item, (*path, key), loaded)
        return
    shown = MASK if path and is_secret(path[-1]) and value is not None else value
    yield Row(path=".".join(path), value=shown, origin=loaded.origins.get(".".join(path), "default"))
