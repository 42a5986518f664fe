"""What several commands share: options, the way to the daemon, the shape of help."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from prorld.cli.exits import NOTE, UsageError
from prorld.cli.output import program, typed

if TYPE_CHECKING:
    from prorld.client import Client


# A longer example gets its comment on a line of its own.
_EXAMPLE_WIDTH = 60


class Help(argparse.RawDescriptionHelpFormatter):
    """Help that keeps the line breaks of examples."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)

    def format_help(self) -> str:
        """With commands as the caller has to type them."""
        return typed(super().format_help())


def epilog(*examples: tuple[str, str], codes: str = NOTE) -> str:
    """Examples and exit codes for the end of a command's help."""
    shown = [(command.replace("prorld ", f"{program()} "), what) for command, what in examples]
    wide = max((len(command) for command, _ in shown if len(command) <= _EXAMPLE_WIDTH), default=0)
    lines: list[str] = []
    for command, what in shown:
        lines += [f"  {command.ljust(wide)}   # {what}"] if len(command) <= wide else [f"  # {what}", f"  {command}"]
    return "\n".join(["examples:", *lines, "", codes])


def add_client_options(parser: argparse.ArgumentParser) -> None:
    """Options of every command that talks to a daemon."""
    group = parser.add_argument_group("which daemon (by default the one of your state directory)")
    group.add_argument(
        "--address", metavar="ADDRESS", help="HOST:PORT, http://HOST:PORT or unix:/PATH [$PRORLD_ADDRESS]"
    )
    group.add_argument(
        "--state-dir", metavar="DIR", help="where the daemon keeps endpoint.json and token [$PRORLD_STATE]"
    )
    group.add_argument(
        "--token-file", metavar="FILE", help="a file with the token [else $PRORLD_TOKEN, else the state directory's]"
    )


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON for scripts")


def client_of(args: argparse.Namespace, *, patience_s: float = 0.0) -> Client:
    """The client that the options name."""
    from prorld.client import Client

    token = None if args.token_file is None else _token_of(args.token_file)
    # The commands say themselves how far something is.
    return Client(args.address, token, args.state_dir, patience_s=patience_s, progress=False)


def _token_of(path: str) -> str:
    if path == "-":
        return read_text(path).strip()
    from prorld.client.find import read_token_file

    token = read_token_file(Path(path))
    if token is None:
        raise UsageError(f"{path} can't be read: there is no such file, or it is empty")
    return token


def read_text(path: str, *, limit_bytes: int = 64 << 20) -> str:
    """A text file that the user named, ``-`` for stdin."""
    try:
        if path == "-":
            data = sys.stdin.buffer.read(limit_bytes + 1)
        else:
            with open(path, "rb") as file:  # noqa: PTH123 - FILE arguments stay as they were typed in messages
                data = file.read(limit_bytes + 1)
        if len(data) > limit_bytes:
            raise UsageError(f"{path} is larger than {limit_bytes} bytes")
        return data.decode()
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(f"{path} can't be read: {getattr(exc, 'strerror', None) or exc}") from exc


def positive(text: str) -> int:
    """An argparse type: a whole number from 1."""
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)
