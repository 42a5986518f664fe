"""What prorld lends to a command of a plugin, in this process: its words, its sandboxes, a cache, distributions."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Literal, TextIO

from prorld.cli.output import clean, program, say, width
from prorld.cli.package_fetch import fetch
from prorld.cli.package_settings import settings
from prorld.cli.sandboxes import open_runtime
from prorld.config import Loaded
from prorld.handlers.packages import packages_dir
from prorld.ops.state_dir import make_private
from prorld.sandbox.contract import SandboxRuntime

__all__ = ["Bench", "MovingLine", "open_workshop"]

CACHE_DIRECTORY = "cache"
# How often a line moves on a terminal, and how often a plain one is written where there is none.
REDRAW_S = 0.1
PLAIN_S = 10.0

_CLEAR = "\r\x1b[K"


class MovingLine:
    """How far something is: one line that moves on a terminal; elsewhere the first one, then one now and then."""

    def __init__(self, stream: TextIO, *, redraw_s: float = REDRAW_S, plain_s: float = PLAIN_S) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._every_s = redraw_s if self._live else plain_s
        self._due = float("-inf")
        self._shown = False

    def show(self, line: str) -> None:
        """The newest line; it may be left out where the last one was just written."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + self._every_s
        text = clean(line).replace("\n", " ")
        self._write(_CLEAR + text[: width() - 1] if self._live else text + "\n")
        self._shown = self._live

    def clear(self) -> None:
        """Make room for a line that stays."""
        if self._shown:
            self._write(_CLEAR)
            self._shown, self._due = False, float("-inf")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


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
        self._line.clear()
        sys.stderr.write(clean(line).replace("\n", " ") + "\n")
        sys.stderr.flush()

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
