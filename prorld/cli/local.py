"""Handlers without a daemon: the installed ones, or one straight from the directory of its project."""

from __future__ import annotations

import io
import sys
import tomllib
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO, cast

from prorld.cli.common import read_text
from prorld.cli.exits import UsageError
from prorld.cli.instances import INSTANCE_BYTES_MAX, read_lines
from prorld.errors import ProrldError
from prorld.handlers.base import AgentHandler
from prorld.handlers.registry import GROUP, Registry, discover
from prorld.wire.ops import HandlerInfo

EXAMPLES = "examples.jsonl"


class BrokenHandlerError(ProrldError):
    """A handler is there and can't be used; the message says why."""

    code = "handler_broken"


class _Nowhere(io.TextIOBase):
    """Takes what is written and keeps nothing."""

    def write(self, text: str, /) -> int:
        return len(text)


def silence_logs() -> None:
    """Let a command say itself what the daemon would log."""
    from prorld.log import configure

    configure("error", "json", stream=cast("TextIO", _Nowhere()))


def installed(name: str | None = None) -> Registry:
    """The installed handlers, or the one of that name."""
    return discover(None if name is None else [name])


def infos(registry: Registry) -> list[HandlerInfo]:
    """The handlers as the daemon lists them."""
    return [entry.info() for entry in registry.entries()]


def open_registry(target: str, configs: Mapping[str, Any] | None = None) -> tuple[Registry, str]:
    """The registry with the handler that ``target`` names, and its name. A path is a project's directory.

    ``configs`` are the sections ``handlers.config`` of the daemon, by handler.
    """
    is_path = "/" in target or target in (".", "..") or Path(target, "pyproject.toml").is_file()
    points = [*_points_of(Path(target))] if is_path else None
    asked = [target] if points is None else [point.name for point in points]
    own = {name: config for name, config in (configs or {}).items() if name in asked}
    registry = discover(asked, own, found=points)
    entries = registry.entries()
    for entry in entries:
        if entry.error is not None:
            raise BrokenHandlerError(f"the handler {entry.name} can't be used: {entry.error}")
    if len(entries) != 1:
        names = ", ".join(entry.name for entry in entries)
        raise UsageError(f"{target} has several handlers: {names}; install it and name one of them")
    return registry, entries[0].name


def _points_of(directory: Path) -> Iterable[EntryPoint]:
    """The entry points of a project that need not be installed; its directory goes onto the import path."""
    file = directory / "pyproject.toml"
    try:
        table: Any = tomllib.loads(read_text(str(file)))
        points = table["project"]["entry-points"][GROUP]
        found = [EntryPoint(name=str(name), value=str(value), group=GROUP) for name, value in points.items()]
    except (tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as exc:
        raise UsageError(f'{file} names no handler under [project.entry-points."{GROUP}"]') from exc
    for folder in (directory / "src", directory):
        if folder.is_dir():
            sys.path.insert(0, str(folder.resolve()))
    return found


def instances_of(handler: AgentHandler[Any], file: str | None) -> list[dict[str, Any]]:
    """Instances from a file, else those that the handler's package brings along."""
    if file is None:
        path = _examples(type(handler).__module__)
        if path is None:
            raise UsageError(f"{handler.name} brings no {EXAMPLES} beside its module; name instances with --instances")
        file = str(path)
    return [value for _, value in read_lines(read_text(file, limit_bytes=INSTANCE_BYTES_MAX), file)]


def _examples(module: str) -> Path | None:
    spec = find_spec(module.partition(".")[0])
    for folder in (spec.submodule_search_locations if spec is not None else None) or ():
        path = Path(folder) / EXAMPLES
        if path.is_file():
            return path
    return None
