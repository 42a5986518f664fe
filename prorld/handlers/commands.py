"""Commands that a plugin brings: ``prorld NAME``, found by the entry point ``prorld.commands``.

A command declares its arguments and is run on trio; what it may use of prorld it is lent as a ``Workshop``.
"""

from __future__ import annotations

import argparse
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Literal, Protocol

from prorld.sandbox.contract import SandboxRuntime

__all__ = ["COMMANDS_GROUP", "PluginCommand", "Workshop"]

COMMANDS_GROUP = "prorld.commands"


class Workshop(Protocol):
    """What prorld lends to a command of a plugin."""

    @property
    def program(self) -> str:
        """How the user calls prorld, for what a command suggests."""
        ...

    @property
    def cache_dir(self) -> Path:
        """A directory of the state directory for what was fetched or can be made again; it exists."""
        ...

    def say(self, *lines: str) -> None:
        """Lines of the result, to standard output."""
        ...

    def progress(self, line: str) -> None:
        """How far it is, to standard error: a moving line on a terminal, a plain line now and then elsewhere."""
        ...

    def warn(self, line: str) -> None:
        """A line that stays, to standard error."""
        ...

    def runtime(self) -> AbstractAsyncContextManager[SandboxRuntime]:
        """The sandboxes that the daemon would make, by the configuration and the command line; open while entered."""
        ...

    async def package(
        self, requirement: str, *, kind: Literal["wheel", "sdist"] = "sdist", sha256: str | None = None
    ) -> Path:
        """A distribution of the package index (``name`` or ``name==version``), fetched once and kept by its hash."""
        ...


class PluginCommand(Protocol):
    """A module or an object under ``prorld.commands``. What is heavy is imported inside ``run``."""

    @property
    def SUMMARY(self) -> str:  # noqa: N802 - a constant of the module
        """One line for the list of commands."""
        ...

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare arguments, set ``description`` and ``epilog``. Options of sandboxes and ``--json`` are there."""
        ...

    async def run(self, args: argparse.Namespace, workshop: Workshop) -> int:
        """Do it; the exit code. Errors of ``prorld.errors`` become one readable line."""
        ...
