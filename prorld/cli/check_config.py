"""``prorld check-config``: the effective configuration, and where each value came from."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from prorld.cli.common import add_json_option, epilog
from prorld.cli.configuration import add_config_options, load_of
from prorld.cli.exits import Exit
from prorld.cli.output import say, say_json, table

if TYPE_CHECKING:
    from prorld.config import Config

SUMMARY = "print the effective configuration"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Reads the configuration as `prorld serve` with the same flags would, and starts nothing.\n"
        "Every value with its origin, secrets masked; exit 78 when the configuration can't be used."
    )
    parser.epilog = epilog(
        ("prorld check-config", "what is in force, and since where"),
        ("prorld check-config --config new.toml", "before a restart"),
        ("prorld check-config --changed", "only what is not a default"),
        ("prorld check-config --explain", "every setting: type, default, meaning"),
    )
    parser.add_argument("--changed", action="store_true", help="only values that are not defaults")
    parser.add_argument("--explain", action="store_true", help="list every setting with type, default and meaning")
    add_config_options(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Check and print."""
    from prorld.config import describe, rows

    if args.explain:
        settings = describe()
        if args.json:
            say_json(settings)
        else:
            say(*table(("SETTING", "TYPE", "DEFAULT", "MEANING"), [
                [s.path, s.kind, _text(s.default), s.description] for s in settings
            ]))  # fmt: skip
        return Exit.OK
    loaded = load_of(args)
    check_parts(loaded.config)
    shown = [row for row in rows(loaded) if not args.changed or row.origin != "default"]
    if args.json:
        say_json({"file": loaded.file, "state_dir": str(loaded.state_dir), "settings": shown})
    else:
        say(f"file: {loaded.file or 'none'}", f"state directory: {loaded.state_dir}", "")
        say(*table(("SETTING", "VALUE", "FROM"), [[row.path, _text(row.value), row.origin] for row in shown]))
    return Exit.OK


def check_parts(config: Config) -> None:
    """What a start would meet beyond the values themselves: handlers that were asked for, tokenizers of policies."""
    from prorld.cli.local import silence_logs
    from prorld.errors import ConfigError
    from prorld.handlers.registry import discover
    from prorld.ops.doctor import check_tokenizers

    silence_logs()
    registry = discover(config.handlers.enabled, config.handlers.config)
    wrong = [
        f"the handler {entry.name} can't be used: {entry.error}"
        for entry in registry.entries()
        if entry.error is not None and entry.wanted
    ]
    wrong += [f"{item.name}: {item.message}; {item.cure}" for item in check_tokenizers(config) if item.state == "fail"]
    if wrong:
        raise ConfigError("; ".join(wrong))


def _text(value: object) -> str:
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)
