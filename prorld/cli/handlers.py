"""``prorld handlers``: the kinds of task that the daemon knows."""

from __future__ import annotations

import argparse

from prorld.cli.common import add_client_options, add_json_option, client_of, epilog
from prorld.cli.exits import Exit
from prorld.cli.output import clean, say, say_json, table

SUMMARY = "list handlers, the kinds of task"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = "Lists the kinds of task that the daemon knows, and plugins that could not be loaded."
    parser.epilog = epilog(
        ("prorld handlers", "names, versions, where they come from"),
        ("prorld handlers --json", "with the JSON schema of their instances"),
    )
    add_client_options(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """List."""
    with client_of(args) as client:
        items = client.handlers().items
    if args.json:
        say_json(items)
        return Exit.OK
    good = [item for item in items if item.error is None]
    if good:
        rows = [[item.name, item.version, ", ".join(item.data_sources) or "-", item.origin] for item in good]
        say(*table(("HANDLER", "VERSION", "DATA SOURCES", "FROM"), rows))
    else:
        say("no handlers; install a plugin, for example prorld-math")
    for item in items:
        if item.error is not None:
            say(f"not loaded: {clean(item.name)} from {clean(item.origin)} {clean(item.version)}: {clean(item.error)}")
    return Exit.OK
