"""``prorld handlers``: the kinds of task that the daemon knows, or that are installed here."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from prorld.cli.common import add_client_options, add_json_option, client_of, epilog
from prorld.cli.exits import Exit, UsageError
from prorld.cli.output import clean, say, say_json, table, typed
from prorld.cli.parser import meant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorld.wire.ops import HandlerInfo

SUMMARY = "list handlers, the kinds of task"

# Characters of names that a cell has room for.
_NAMES_CHARS = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = "Lists the kinds of task that the daemon knows, and plugins that could not be loaded."
    parser.epilog = epilog(
        ("prorld handlers", "names, versions, where they come from"),
        ("prorld handlers --local", "those installed here, without a daemon"),
        ("prorld handlers --json", "with every data source and tool"),
        ("prorld handlers --schema math", "what an instance of math looks like"),
    )
    parser.add_argument("--local", action="store_true", help="look at what is installed here, not at a daemon")
    parser.add_argument("--schema", metavar="NAME", help="print the JSON schema of this handler's instances")
    add_client_options(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """List."""
    items = _local() if args.local else _remote(args)
    if args.schema is not None:
        say_json(_named(items, args.schema).instance_schema)
    elif args.json:
        say_json(items)
    else:
        say(*lines(items))
    return Exit.OK


def _remote(args: argparse.Namespace) -> Sequence[HandlerInfo]:
    with client_of(args) as client:
        return client.handlers().items


def _local() -> Sequence[HandlerInfo]:
    from prorld.cli.local import infos, installed, silence_logs

    silence_logs()
    return infos(installed())


def _named(items: Sequence[HandlerInfo], name: str) -> HandlerInfo:
    for item in items:
        if item.name == name and item.error is not None:
            raise UsageError(f"the handler {name} can't be used: {item.error}")
        if item.name == name:
            return item
    names = [item.name for item in items]
    raise UsageError(f"there is no handler {name}{meant(name, names)}; there are: {', '.join(names) or 'none'}")


def lines(items: Sequence[HandlerInfo]) -> list[str]:
    """The handlers for people, the broken ones last."""
    good = [item for item in items if item.error is None]
    shown = [typed("no handlers; install a plugin, for example prorld-math, or write one: `prorld plugin new NAME`")]
    if good:
        rows = [[item.name, item.version, _first(item.data_sources), _first(item.tools), item.origin] for item in good]
        shown = table(("HANDLER", "VERSION", "DATA SOURCES", "TOOLS", "FROM"), rows)
    shown += [
        f"not loaded: {clean(item.name)} from {clean(item.origin)} {clean(item.version)}: {clean(item.error)}"
        for item in items
        if item.error is not None
    ]
    return shown


def _first(names: Sequence[str]) -> str:
    """As many as there is room for, and how many more there are: one handler must not widen the table of all."""
    shown = 1
    while shown < len(names) and len(", ".join(names[: shown + 1])) <= _NAMES_CHARS:
        shown += 1
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f", {more} more" if more > 0 else "") or "-"
