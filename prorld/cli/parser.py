"""The parser of the command line: what was mistyped is told by the sub-command it belongs to, with what was meant.

Two things argparse can't say are settled before it: what follows ``--`` for a command that hands it on to another
program, and the action of a command that was named alone, or after options of its own.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

__all__ = ["Parser", "parsed"]

_WRONG_CHOICE = re.compile(r"invalid choice: '(?P<said>[^']*)' \(choose from (?P<choices>.*)\)")

# argparse takes options after ``--`` for its own, or not, as its versions differ; these get them as ``more``.
_HANDS_ON = ("engine", "start")
_LISTS = frozenset({"backends", "batch", "data", "image", "policies"})
_HELP = frozenset({"-h", "--help"})


class Parser(argparse.ArgumentParser):
    """Adds what was probably meant to what is wrong."""

    def error(self, message: str) -> NoReturn:
        """Usage, the message, exit 2."""
        found = _WRONG_CHOICE.search(message)
        if found is not None:
            choices = re.findall(r"[^\s',]+", found["choices"])
            message += meant(found["said"], choices)
        super().error(message)


def meant(said: str, choices: Sequence[str]) -> str:
    """The nearest choice as a question, or nothing."""
    near = difflib.get_close_matches(said, choices, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; what nobody knows is refused by the innermost sub-command that was named."""
    words = _with_action(parser, sys.argv[1:] if argv is None else [*argv])
    more: list[str] = []
    if tuple(words[: len(_HANDS_ON)]) == _HANDS_ON and "--" in words:
        at = words.index("--")
        words, more = words[:at], words[at + 1 :]
    args, unknown = parser.parse_known_args(words)
    if more:
        args.more = more
    if unknown:
        chosen = _innermost(parser, args)
        said = next((word for word in unknown if word.startswith("-")), None)
        hint = "" if said is None else meant(said.partition("=")[0], _options(chosen))
        chosen.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return args


def _with_action(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """With the action before the options, and ``list`` where a command that has it was named without one."""
    if not words or words[0] not in _LISTS or not (len(words) == 1 or words[1].startswith("-")):
        return words
    actions = _children(_children(parser)[words[0]])
    listed = actions["list"]
    valued = {name for action in listed._actions if action.nargs != 0 for name in action.option_strings}  # noqa: SLF001
    at = 1
    while at < len(words) and words[at].startswith("-"):
        if words[at] in _HELP:
            return words
        at += 2 if words[at] in valued else 1
    if at < len(words) and words[at] in actions:
        return [words[0], words[at], *words[1:at], *words[at + 1 :]]
    return [words[0], "list", *words[1:]]


def _children(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Its sub-commands."""
    found = _subparsers(parser)
    return {} if found is None else found[1]


def _innermost(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.ArgumentParser:
    found = _subparsers(parser)
    child = None if found is None else found[1].get(getattr(args, found[0]))
    return parser if child is None else _innermost(child, args)


def _subparsers(parser: argparse.ArgumentParser) -> tuple[str, Mapping[str, argparse.ArgumentParser]] | None:
    """Where the name of the chosen sub-command goes, and all of them."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no public way to ask
        if isinstance(action.choices, Mapping):
            return action.dest, action.choices
    return None


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [name for action in parser._actions for name in action.option_strings]  # noqa: SLF001
