"""What prorld lends to a command of a plugin, in this process: its words, its sandboxes, a cache, distributions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Literal

from prorld.cli.moving_line import MovingLine
from prorld.cli.output import clean, program, say
from prorld.cli.package_fetch import fetch
from prorld.cli.package_settings import settings
from prorld.cli.sandboxes import open_runtime
from prorld.config import Loaded
from prorld.handlers.packages import packages_dir
from prorld.ops.state_dir import make_private
from prorld.sandbox.contract import SandboxRuntime

__all__ = ["Bench", "open_workshop"]

CACHE_DIRECTORY = "cache"


class Bench:
    """A ``prorld.handlers.Workshop`` for one run of one command."""

    def __init__(self, name: str, loaded: Loaded, sandbox: str | None) -> None:
        self._loaded = loaded
        self._sandbox = sandbox
        self._line = MovingLine(sys.stderr)
        make_private(loaded.state_dir)
        self._cache_dir = loaded.state_dir / CACHE_DIRECTORY / name
        self._cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def program(self) -> str:
        """How the user calls prorld, for what a command suggests."""
        return program()

    @property
    def cache_dir(self) -> Path:
        """A directory of the state directory for what was fetched or can be made again; it exists."""
        return self._cache_dir

    def say(self, *lines: str) -> None:
        """Lines of the result, to standard output."""
        self._line.clear()
        say(*(clean(line) for line in lines))

    def progress(self, line: str) -> None:
        """How far it is, to standard error: a moving line on a terminal, a plain line now and then elsewhere."""
        self._line.show(line)

    def warn(self, line: str) -> None:
        """A line that stays, to standard error."""
        self._line.stay(line)

    def runtime(self) -> AbstractAsyncContextManager[SandboxRuntime]:
        """The sandboxes that the daemon would make, by the configuration and the command line; open while entered."""
        return open_runtime(self._sandbox, self._loaded)

    async def package(
        self, requirement: str, *, kind: Literal["wheel", "sdist"] = "sdist", sha256: str | None = None
    ) -> Path:
        """A distribution of the package index (``name`` or ``name==version``), fetched once and kept by its hash."""
        found = await fetch(
            requirement, kind=kind, sha256=sha256, into=packages_dir(), index=settings(), progress=self.progress
        )
        return found.path

    def close(self) -> None:
        """Leave the line empty for what comes next."""
        self._line.clear()


@contextmanager
def open_workshop(name: str, loaded: Loaded, sandbox: str | None) -> Iterator[Bench]:
    """A workshop for the length of a block."""
    bench = Bench(name, loaded, sandbox)
    try:
        yield bench
    finally:
        bench.close()
