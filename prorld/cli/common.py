"""What several commands share: options, the way to the daemon, the shape of help."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from prorld.cli.exits import NOTE, UsageError

if TYPE_CHECKING:
    from prorld.client import Client


# A longer example gets its comment on a line of its own.
_EXAMPLE_WIDTH = 60


class Help(argparse.RawDescriptionHelpFormatter):
    """Help that keeps the line breaks of examples."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)


def epilog(*examples: tuple[str, str]) -> str:
    """Examples and exit codes for the end of a command's help."""
    wide = max(len(command) for command, _ in examples if len(command) <= _EXAMPLE_WIDTH)
    lines: list[str] = []
    for command, what in examples:
        lines += [f"  {command.ljust(wide)}   # {what}"] if len(command) <= wide else [f"  # {what}", f"  {command}"]
    return "\n".join(["examples:", *lines, "", NOTE])


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

    token = None if args.token_file is None else read_text(args.token_file).strip()
    return Client(args.address, token, args.state_dir, patience_s=patience_s)


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
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 up")
    return value
