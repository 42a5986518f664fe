"""What a command of a plugin is lent, in memory: for tests of such commands."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Literal

import trio

from prorld.errors import NotFound
from prorld.sandbox.contract import SandboxRuntime
from prorld.testing.real_sandboxes import real_sandboxes

__all__ = ["FakeWorkshop"]


class FakeWorkshop:
    """A ``Workshop`` that keeps what was said; its index has the packages that it is given, and its sandboxes are real.

    ``asked`` has what was fetched, with the hash that it had to have.
    """

    program = "prorld"

    def __init__(self, place: Path, index: Mapping[str, Path] | None = None) -> None:
        self.cache_dir = place / "cache"
        self.cache_dir.mkdir(parents=True, exist_ok=True)
        self.index = dict(index or {})
        self.asked: list[tuple[str, str | None]] = []
        self.said: list[str] = []
        self.warned: list[str] = []

    def say(self, *lines: str) -> None:
        """Kept in ``said``."""
        self.said += lines

    def progress(self, line: str) -> None:
        """Held to being something that can be shown."""
        assert line
        assert "\n" not in line

    def warn(self, line: str) -> None:
        """Kept in ``warned``."""
        self.warned.append(line)

    def runtime(self) -> AbstractAsyncContextManager[SandboxRuntime]:
        """Real sandboxes."""
        return real_sandboxes()

    async def package(
        self, requirement: str, *, kind: Literal["wheel", "sdist"] = "sdist", sha256: str | None = None
    ) -> Path:
        """What the index has under that word."""
        await trio.lowlevel.checkpoint()
        self.asked.append((requirement, sha256))
        found = self.index.get(requirement)
        if found is None:
            raise NotFound(f"no package {requirement}")
        return found
