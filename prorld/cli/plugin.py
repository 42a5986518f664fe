"""``prorld plugin``: start a task package of your own, and check one."""

from __future__ import annotations

import argparse
from pathlib import Path

from prorld.cli.common import Help, add_json_option, epilog
from prorld.cli.configuration import SANDBOX_KINDS, add_sandbox_options
from prorld.cli.exits import Exit
from prorld.cli.output import program, say

SUMMARY = "write and check task packages of your own"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "For authors of handlers, the kinds of task. `new` writes a package that installs, is found by the daemon and\n"
        "passes its tests; `check` runs what every handler has to keep, on fakes. docs/plugins.md goes through both."
    )
    parser.epilog = epilog(
        ("prorld plugin new word-count", "a project in ./prorld-word-count"),
        ("prorld plugin check word-count", "an installed handler"),
        ("prorld plugin check ./prorld-word-count", "one that is not installed"),
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, title="actions")
    new = actions.add_parser("new", help="write a package", formatter_class=Help)
    new.description = "Writes a wheel project with a handler, examples, a test and a page. Overwrites nothing."
    new.epilog = epilog(("prorld plugin new word-count", "into ./prorld-word-count"))
    new.add_argument("name", metavar="NAME", help="the handler's name, for example word-count")
    new.add_argument("--dir", metavar="DIR", help="the directory to make (default ./prorld-NAME)")
    new.set_defaults(act=_new)
    check = actions.add_parser("check", help="check a handler", formatter_class=Help)
    check.description = (
        "Runs the handler contract, one line per check: types, prompts, grades of hostile answers, a cancel at every\n"
        "step, leftovers. Exit 0 when every check passes."
    )
    check.epilog = epilog(
        ("prorld plugin check .", "the project here, on fakes"),
        ("prorld plugin check . --sandbox bubblewrap", "in real sandboxes"),
    )
    check.add_argument("target", metavar="PATH|NAME", help="a project's directory, or an installed handler")
    check.add_argument(
        "--instances", metavar="FILE", help="instances, one per line (default: examples.jsonl beside it)"
    )
    check.add_argument(
        "--sandbox", choices=("fake", *SANDBOX_KINDS), default="fake", help="sandboxes (default fake)"
    )  # fmt: skip
    add_sandbox_options(check.add_argument_group("whose sandboxes, where they are real"))
    check.add_argument("--limit", type=int, default=3, metavar="N", help="use the first N instances (default 3)")
    add_json_option(check)
    check.set_defaults(act=_check)


def run(args: argparse.Namespace) -> int:
    """Do what was asked."""
    return int(args.act(args))


def _new(args: argparse.Namespace) -> int:
    from prorld.cli.plugin_files import write_plugin

    directory = Path(args.dir) if args.dir is not None else Path(f"prorld-{args.name}")
    for path in write_plugin(args.name, directory):
        say(f"wrote {path}")
    say(
        "",
        "next:",
        f"  cd {directory}",
        f"  {program()} plugin check .",
        "  pip install -e '.[dev]'   # beside prorld; where that is its own repository: ./just plugin DIR",
        "  pytest",
        f"  {program()} preflight prorld_{args.name.replace('-', '_')}/examples.jsonl --handler . --plays all",
    )
    return Exit.OK


def _check(args: argparse.Namespace) -> int:
    from prorld.cli.plugin_check import check

    return check(args)
