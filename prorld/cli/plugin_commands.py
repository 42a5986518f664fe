"""Commands of plugins in the command line: found by entry point, and loaded only when they are asked for.

A command that can't be loaded is a line in the list and one line when it is called; it takes nothing from the others.
What prorld brings itself is never looked for here, so no plugin comes before it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from prorld.cli.common import Help, add_json_option
from prorld.cli.configuration import SANDBOX_KINDS, add_sandbox_options
from prorld.cli.output import clean
from prorld.errors import ProrldError, chain

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from prorld.handlers.commands import PluginCommand, Workshop

__all__ = ["GROUP", "BrokenCommandError", "Found", "declare", "find", "names", "run_command"]

# ``prorld.handlers.commands.COMMANDS_GROUP``; written out so that help of prorld's own commands needs no trio.
GROUP = "prorld.commands"

_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")
_SUMMARY_CHARS = 60


class BrokenCommandError(ProrldError):
    """A command of a plugin is there and can't be used; the message says why."""

    code = "command_broken"


class Found(NamedTuple):
    """A command of a plugin: what it loaded to, or why it can't be used."""

    name: str
    origin: str
    command: PluginCommand | None = None
    error: str | None = None

    def must_work(self) -> PluginCommand:
        """The command; ``BrokenCommandError`` where it is none."""
        if self.command is None:
            message = f"the command {clean(self.name)} of {clean(self.origin)} can't be used: {clean(self.error or '')}"
            raise BrokenCommandError(message.replace("\n", " "))
        return self.command


def find(
    built_in: Iterable[str], only: str | None = None, *, found: Iterable[EntryPoint] | None = None
) -> dict[str, Found]:
    """The commands of installed plugins by name, loaded; or only the one of that name, and nothing else is loaded."""
    from importlib.metadata import entry_points

    taken = frozenset(built_in)
    points: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP) if found is None else found:
        if only is None or point.name == only:
            points.setdefault(point.name, []).append(point)
    return {name: _load(name, points[name], taken) for name in sorted(points)}


def names() -> dict[str, Found]:
    """The commands of installed plugins, none of them loaded: to say what was meant by one that is not there."""
    from importlib.metadata import entry_points

    return {
        point.name: Found(point.name, _origin(point), error="it was not loaded") for point in entry_points(group=GROUP)
    }


def _load(name: str, points: Sequence[EntryPoint], taken: frozenset[str]) -> Found:
    broken = Found(name, ", ".join(_origin(point) for point in points))
    if name in taken:
        return broken._replace(error=f"prorld has a command {name} of its own")
    if _NAME.fullmatch(name) is None:
        return broken._replace(error=f"{name!r} can't be the name of a command")
    if len(points) > 1:
        return broken._replace(error="more than one distribution has a command of this name")
    try:
        command: object = points[0].load()
        _check(command)
        # Declared once for nothing: what fails in it must not leave half a command behind.
        trial = argparse.ArgumentParser(prog=name, formatter_class=Help)
        _declare(trial, command)  # type: ignore[arg-type]
        trial.format_help()
    except (Exception, SystemExit) as exc:  # noqa: BLE001  (a plugin may raise anything)
        return broken._replace(error=chain(exc))
    return broken._replace(command=command)  # type: ignore[arg-type]


def _check(command: object) -> None:
    summary = getattr(command, "SUMMARY", None)
    if not isinstance(summary, str) or not summary.strip():
        raise BrokenCommandError("it has no SUMMARY, a line of text")
    for name in ("add_arguments", "run"):
        if not callable(getattr(command, name, None)):
            raise BrokenCommandError(f"it has no function {name}")


def _origin(point: EntryPoint) -> str:
    return "an unknown distribution" if point.dist is None else f"{point.dist.name} {point.dist.version}"


def summary_of(found: Found) -> str:
    """One line for the list of commands."""
    words = f"broken: {found.error}" if found.command is None else found.command.SUMMARY
    line = " ".join(clean(words).split())
    return line if len(line) <= _SUMMARY_CHARS else line[: _SUMMARY_CHARS - 1] + "…"


def declare(
    add_parser: Callable[..., argparse.ArgumentParser], found: Iterable[Found], built_in: Iterable[str]
) -> None:
    """Put commands of plugins beside those of prorld; a broken one says so when it is called, whatever follows it."""
    taken = frozenset(built_in)
    for each in found:
        if each.name in taken:
            continue
        summary = summary_of(each).replace("%", "%%")
        sub = add_parser(each.name, help=summary, description=summary, formatter_class=Help)
        if each.command is not None:
            _declare(sub, each.command)


def _declare(parser: argparse.ArgumentParser, command: PluginCommand) -> None:
    add_json_option(parser)
    group = parser.add_argument_group("its sandboxes (by default those of the daemon's configuration)")
    group.add_argument(
        "--sandbox", choices=(*SANDBOX_KINDS, "fake"),
        help="another kind; the fake ones understand echo and print only",
    )  # fmt: skip
    add_sandbox_options(group)
    command.add_arguments(parser)


def run_command(found: Found, args: argparse.Namespace) -> int:
    """Run it on trio with a workshop; Ctrl-C cancels it, and its clean-up is waited for."""
    from prorld.cli.configuration import load_for_sandboxes
    from prorld.cli.local import silence_logs
    from prorld.cli.running import interruptible, run_trio
    from prorld.cli.workshop import open_workshop

    command = found.must_work()
    silence_logs()
    with open_workshop(found.name, load_for_sandboxes(args), args.sandbox) as workshop:
        return run_trio(partial(interruptible, partial(_run, found, command, args, workshop)))


async def _run(found: Found, command: PluginCommand, args: argparse.Namespace, workshop: Workshop) -> int:
    from prorld.kit.containment import contained

    with contained(f"the command {found.name}"):
        code: object = await command.run(args, workshop)
    if not isinstance(code, int) or not 0 <= code <= 255:
        raise BrokenCommandError(f"the command {found.name} of {found.origin} returned {code!r:.80}, and no exit code")
    return int(code)
