"""The command line's door: parses, runs one command, turns errors into one readable line and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

from prorld import __version__
from prorld.cli import (
    backends,
    batch,
    bench,
    cancel,
    check_config,
    completion,
    data,
    demo,
    doctor,
    drain,
    engine,
    export,
    handlers,
    image,
    jobs,
    learn_demo,
    plugin,
    plugin_commands,
    policies,
    preflight,
    reevaluate,
    run_tasks,
    serve,
    show,
    status,
    submit,
    train,
    try_rollout,
    verify,
)
from prorld.cli.common import Help, epilog
from prorld.cli.exits import Exit, exit_of
from prorld.cli.output import program, typed
from prorld.cli.parser import Parser, parsed
from prorld.errors import ProrldError


class Command(Protocol):
    """A module of this room that is a command. It imports what is heavy inside ``run``."""

    @property
    def SUMMARY(self) -> str:  # noqa: N802 - a constant of the module
        """One line for the list of commands."""
        ...

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare arguments, set ``description`` and ``epilog``."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Do it; the exit code."""
        ...


COMMANDS: dict[str, Command] = {
    "serve": serve,
    "demo": demo,
    "submit": submit,
    "batch": batch,
    "jobs": jobs,
    "show": show,
    "verify": verify,
    "reevaluate": reevaluate,
    "export": export,
    "cancel": cancel,
    "status": status,
    "drain": drain,
    "backends": backends,
    "handlers": handlers,
    "policies": policies,
    "preflight": preflight,
    "train": train,
    "learn-demo": learn_demo,
    "run": run_tasks,
    "try": try_rollout,
    "engine": engine,
    "image": image,
    "data": data,
    "plugin": plugin,
    "doctor": doctor,
    "bench": bench,
    "check-config": check_config,
    "completion": completion,
}

_DESCRIPTION = """\
prorld runs rollouts for reinforcement learning of LLM agents: it makes a sandbox, lets a model act in it, grades the
result and hands out a trajectory with the very tokens the engine sampled.

New here? `prorld doctor` looks at this machine, `prorld demo` shows a few real rollouts."""

_EXAMPLES = epilog(
    ("prorld demo", "a few rollouts of a small real model, then stops"),
    ("prorld serve", "the daemon, on 127.0.0.1:8650"),
    ("prorld submit job.json --wait", "hand in a job and wait for its end"),
    ("prorld show JOB", "its conversation, tokens and reward"),
)


def build_parser(more: Iterable[plugin_commands.Found] = ()) -> argparse.ArgumentParser:
    """The whole command line; ``more`` are commands of plugins."""
    parser = Parser(prog=program(), description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=Help)
    parser.add_argument("--version", action="version", version=f"prorld {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.SUMMARY, description=command.SUMMARY, formatter_class=Help)
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    plugin_commands.declare(commands.add_parser, more, COMMANDS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command."""
    words = sys.argv[1:] if argv is None else [*argv]
    as_json = "--json" in words
    try:
        found = _of_plugins(words)
        chosen = found.get(words[0]) if words else None
        if chosen is not None:
            chosen.must_work()
        args = parsed(build_parser(found.values()), words)
        as_json = getattr(args, "json", False)
        run = args.run if chosen is None else partial(plugin_commands.run_command, chosen)
        code = int(run(args))
        sys.stdout.flush()
    except ProrldError as exc:
        _complain(exc, as_json=as_json)
        return exit_of(exc)
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # The reader has gone, and Python flushes once more at exit: give it another place to write to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.BROKEN_PIPE
    return code


def _of_plugins(words: Sequence[str]) -> dict[str, plugin_commands.Found]:
    """What plugins add for this call: nothing where prorld's own command is named, all for the list of commands."""
    if not words or words[0] in COMMANDS:
        return {}
    if words[0].startswith("-"):
        return plugin_commands.find(COMMANDS) if words[0] in {"-h", "--help"} else {}
    return plugin_commands.find(COMMANDS, words[0]) or plugin_commands.names()


def _complain(error: ProrldError, *, as_json: bool) -> None:
    if as_json:
        import msgspec

        body = {
            "code": error.stable_code,
            "message": typed(error.message),
            "retryable": error.may_retry,
            "details": error.details,
        }
        line = msgspec.json.encode({"error": body}).decode()
    else:
        where = (error.details or {}).get("path")
        line = f"prorld: {typed(error.message)}" + (f" ({where})" if where and str(where) not in error.message else "")
    sys.stderr.write(line + "\n")
