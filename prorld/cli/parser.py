"""The parser of the command line: what was mistyped is told by the sub-command it belongs to, with what was meant."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import NoReturn

__all__ = ["Parser", "parsed"]

_WRONG_CHOICE = re.compile(r"invalid choice: '(?P<said>[^']*)' \(choose from (?P<choices>.*)\)")


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
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        chosen = _innermost(parser, args)
        said = next((word for word in unknown if word.startswith("-")), None)
        hint = "" if said is None else meant(said.partition("=")[0], _options(chosen))
        chosen.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return args


def _innermost(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.ArgumentParser:
    for action in parser._actions:  # noqa: SLF001 - argparse has no public way to ask
        if isinstance(action.choices, Mapping):
            child = action.choices.get(getattr(args, action.dest))
            if isinstance(child, argparse.ArgumentParser):
                return _innermost(child, args)
    return parser


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [name for action in parser._actions for name in action.option_strings]  # noqa: SLF001
