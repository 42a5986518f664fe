"""The sets of tasks that installed plugins know, and what turns their rows into instances."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint
from typing import Any, cast

import msgspec

from prorld.cli.exits import UsageError
from prorld.cli.parser import meant
from prorld.errors import ProrldError, chain
from prorld.handlers.datasets import DATASETS_GROUP, Dataset
from prorld.kit.entry_points import Part, load_parts

__all__ = ["BrokenSetError", "Convert", "Known", "converter", "known_sets", "the_set"]

# A function of a plugin: a row (a dict, or bytes) and where it is from, to instances.
Convert = Callable[[Any, str], Iterator[dict[str, Any]]]

SETS_MAX = 10_000
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class BrokenSetError(ProrldError):
    """A set of a plugin can't be used; the message says why."""

    code = "dataset_broken"


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """A set and whose it is; ``data`` is ``None`` for a part of a plugin that could not be loaded."""

    name: str
    distribution: str
    version: str
    data: Dataset | None = None
    error: str | None = None


def known_sets(*, found: Iterable[EntryPoint] | None = None) -> list[Known]:
    """All of them, by name; those that are broken last."""
    named: dict[str, list[Known]] = {}
    broken: list[Known] = []
    for part in load_parts(DATASETS_GROUP, _sound, found=found).values():
        if part.value is None:
            broken.append(_of(part, part.name, error=part.error))
        for data in part.value or ():
            named.setdefault(data.name, []).append(_of(part, data.name, data=data))
    sets: list[Known] = []
    for name in sorted(named):
        first, *others = named[name]
        if others:
            whose = ", ".join(sorted({each.distribution for each in named[name]}))
            broken.append(msgspec.structs.replace(first, data=None, error=f"more than one set has this name: {whose}"))
        else:
            sets.append(first)
    return [*sets, *broken]


def the_set(name: str, sets: Sequence[Known]) -> Known:
    """The set of that name, which can be used; ``UsageError`` says what there is instead."""
    for each in sets:
        if each.name == name and each.error is not None:
            raise BrokenSetError(f"the set {name} of {each.distribution} can't be used: {each.error}")
        if each.name == name:
            return each
    names = [each.name for each in sets if each.data is not None]
    there = "`prorld data list` shows them" if names else "no installed plugin has any"
    raise UsageError(f"there is no set {name!r}{meant(name, names)}; {there}")


def converter(known: Known) -> Convert:
    """The function that the set names; ``BrokenSetError`` where it is none."""
    assert known.data is not None
    module, _, function = known.data.convert.partition(":")
    if _FUNCTION.fullmatch(known.data.convert) is None:
        raise BrokenSetError(f"{known.data.convert!r:.80}, which converts {known.name}, is no package.module:function")
    try:
        convert: object = getattr(import_module(module), function)
    except (Exception, SystemExit) as exc:
        message = f"{known.data.convert}, which converts {known.name}, can't be used: {chain(exc)}"
        raise BrokenSetError(message) from exc
    if not callable(convert):
        raise BrokenSetError(f"{known.data.convert}, which converts {known.name}, is no function")
    return cast("Convert", convert)


def _sound(_: str, loaded: object) -> tuple[Dataset, ...]:
    """The sets of an entry point, each checked as if it had come from outside."""
    if isinstance(loaded, Dataset):
        raise BrokenSetError("it is one Dataset, and not a sequence of them")
    if not isinstance(loaded, Sequence) or len(loaded) > SETS_MAX:
        raise BrokenSetError(f"it is no sequence of at most {SETS_MAX} datasets")
    for each in loaded:
        if not isinstance(each, Dataset):
            raise BrokenSetError(f"{each!r:.80} in it is no Dataset")
        try:
            msgspec.convert(msgspec.to_builtins(each), Dataset)
        except msgspec.ValidationError as exc:
            raise BrokenSetError(f"the set {each.name!r:.80} is wrong: {exc}") from exc
    return tuple(loaded)


def _of(part: Part[Any], name: str, *, data: Dataset | None = None, error: str | None = None) -> Known:
    return Known(name=name, distribution=part.distribution, version=part.version, data=data, error=error)
