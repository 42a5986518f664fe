"""``prorld completion``: completion for a shell, made from the command line's own parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from prorld.cli.common import epilog
from prorld.cli.exits import Exit
from prorld.cli.output import say

SUMMARY = "print completion for bash, zsh or fish"

SHELLS = ("bash", "zsh", "fish")

# Options and arguments that name a file or a directory, by the metavar they show.
_FILES = frozenset({"FILE", "DIR", "PATH", "TASKS", "OUT", "TARGET", "PATH|NAME"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = "Prints a script that makes the shell complete commands, options and their values."
    parser.epilog = epilog(
        ("source <(prorld completion bash)", "in ~/.bashrc"),
        ("source <(prorld completion zsh)", "in ~/.zshrc, after compinit"),
        ("prorld completion fish > ~/.config/fish/completions/prorld.fish", "once"),
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")


def run(args: argparse.Namespace) -> int:
    """Print it."""
    from prorld.cli.main import COMMANDS, build_parser
    from prorld.cli.plugin_commands import find

    places = [*walk(build_parser(each for each in find(COMMANDS).values() if each.command is not None))]
    makers = {"bash": bash_lines, "zsh": zsh_lines, "fish": fish_lines}
    say(*makers[args.shell](places))
    return Exit.OK


class Option(NamedTuple):
    """An option: its spellings, what it is, its values where they are few, and whether it takes one, a file maybe."""

    names: tuple[str, ...]
    words: str
    choices: tuple[str, ...]
    takes_value: bool
    is_file: bool


class Place(NamedTuple):
    """Where a command line can be: after these words, with these that may follow."""

    path: tuple[str, ...]
    commands: tuple[tuple[str, str], ...]
    options: tuple[Option, ...]
    words: tuple[str, ...]
    takes_files: bool


def walk(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[Place]:
    """The parser and every parser below it."""
    commands: list[tuple[str, str]] = []
    options: list[Option] = []
    words: list[str] = []
    below: list[tuple[str, argparse.ArgumentParser]] = []
    takes_files = False
    for action in parser._actions:  # noqa: SLF001 - argparse has no public way to ask
        if isinstance(action.choices, Mapping):
            # Its choices are parsers; what each is for stands in a list of its own.
            summaries = {choice.dest: choice.help or "" for choice in vars(action)["_choices_actions"]}
            commands = [(name, summaries.get(name, "")) for name in action.choices]
            below = [*action.choices.items()]
        elif action.option_strings:
            options.append(_option(action))
        else:
            words += [str(choice) for choice in action.choices or ()]
            takes_files = takes_files or _is_file(action)
    yield Place(path, tuple(commands), tuple(options), tuple(words), takes_files)
    for name, child in below:
        yield from walk(child, (*path, name))


def _option(action: argparse.Action) -> Option:
    choices = tuple(str(choice) for choice in action.choices or ())
    words = (action.help or "").partition(" (")[0].replace("%", "")
    return Option(tuple(action.option_strings), words, choices, action.nargs != 0, _is_file(action))


def _is_file(action: argparse.Action) -> bool:
    return isinstance(action.metavar, str) and action.metavar in _FILES


# --- bash and zsh -----------------------------------------------------------------------------------------------------


def bash_lines(places: list[Place]) -> Iterator[str]:
    """A function that looks up where it is, and ``compgen``s what may follow."""
    yield "# prorld completion for bash"
    yield "_prorld() {"
    yield '    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} place="" word i'
    yield "    COMPREPLY=()"
    yield from _find_place('"${COMP_WORDS[@]:1:COMP_CWORD-1}"', places)
    yield '    case "$place:$prev" in'
    for place, option in _valued(places):
        pattern = " | ".join(f'"{_key(place)}:{name}"' for name in option.names)
        yield f"        {pattern}) {_values_of(option)} return ;;"
    yield "    esac"
    yield '    case "$place" in'
    for place in places:
        words = " ".join(_words(place))
        files = ' [[ $cur == -* ]] || COMPREPLY+=($(compgen -f -- "$cur"));' if place.takes_files else ""
        yield f'        "{_key(place)}") COMPREPLY=($(compgen -W "{words}" -- "$cur"));{files} ;;'
    yield "    esac"
    yield "}"
    yield "complete -o filenames -F _prorld prorld"


def _values_of(option: Option) -> str:
    if option.choices:
        return f'COMPREPLY=($(compgen -W "{" ".join(option.choices)}" -- "$cur"));'
    return 'COMPREPLY=($(compgen -f -- "$cur"));' if option.is_file else ""


def zsh_lines(places: list[Place]) -> Iterator[str]:
    """The same for zsh, with what each command and option is for."""
    yield "#compdef prorld"
    yield "_prorld() {"
    yield '    local place="" word prev=${words[CURRENT-1]}'
    yield "    local -a found"
    yield from _find_place("${words[2,CURRENT-1]}", places)
    yield '    case "$place:$prev" in'
    for place, option in _valued(places):
        pattern = " | ".join(f'"{_key(place)}:{name}"' for name in option.names)
        values = f"compadd -- {' '.join(option.choices)};" if option.choices else "_files;" if option.is_file else ""
        yield f"        {pattern}) {values} return ;;"
    yield "    esac"
    yield '    case "$place" in'
    for place in places:
        described = [f"{name}:{words}" for name, words in place.commands]
        described += [f"{name}:{option.words}" for option in place.options for name in option.names]
        described += list(place.words)
        quoted = " ".join(f"'{entry.replace(chr(39), '')}'" for entry in described)
        files = " [[ $PREFIX == -* ]] || _files;" if place.takes_files else ""
        yield f'        "{_key(place)}") found=({quoted}); _describe prorld found;{files} ;;'
    yield "    esac"
    yield "}"
    yield "compdef _prorld prorld"


def _find_place(words: str, places: list[Place]) -> Iterator[str]:
    """Follow the words that are commands; what is an option, or its value, is stepped over."""
    steps = [(place, name) for place in places for name, _ in place.commands]
    yield f"    for word in {words}; do"
    yield '        case "$place/$word" in'
    for place, name in steps:
        yield f'            "{_key(place)}/{name}") place="{_key(place)}/{name}" ;;'
    yield "        esac"
    yield "    done"


def _valued(places: list[Place]) -> Iterator[tuple[Place, Option]]:
    for place in places:
        for option in place.options:
            if option.takes_value:
                yield place, option


def _words(place: Place) -> Iterator[str]:
    yield from (name for name, _ in place.commands)
    yield from place.words
    for option in place.options:
        yield from option.names


def _key(place: Place) -> str:
    return "".join(f"/{word}" for word in place.path)


# --- fish -------------------------------------------------------------------------------------------------------------


def fish_lines(places: list[Place]) -> Iterator[str]:
    """One ``complete`` per command and option."""
    yield "# prorld completion for fish"
    yield "complete -c prorld -f"
    for place in places:
        taken = " ".join(name for name, _ in place.commands)
        here = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in place.path)
        free = f"not __fish_seen_subcommand_from {taken}" if taken else ""
        when = _quoted("; and ".join(part for part in (here, free) if part) or "true")
        for name, words in place.commands:
            yield f"complete -c prorld -n {when} -a {name} -d {_quoted(words)}"
        for word in place.words:
            yield f"complete -c prorld -n {when} -a {word}"
        if place.takes_files:
            yield f"complete -c prorld -n {when} -F"
        for option in place.options:
            yield f"complete -c prorld -n {when}{_fish_option(option)}"


def _fish_option(option: Option) -> str:
    names = "".join(f" -l {name[2:]}" if name.startswith("--") else f" -s {name[1:]}" for name in option.names)
    value = ""
    if option.choices:
        value = f" -x -a {_quoted(' '.join(option.choices))}"
    elif option.takes_value:
        value = " -r -F" if option.is_file else " -x"
    return f"{names}{value} -d {_quoted(option.words)}"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
