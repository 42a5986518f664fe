"""Source packages made for the tests, and a workshop whose sandboxes are real."""

from __future__ import annotations

import io
import sys
import tarfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Literal

import pytest

from prorld.cli.sandboxes import open_runtime
from prorld.config import load
from prorld.errors import NotFound
from prorld.sandbox.contract import SandboxRuntime

CODE = '''"""Numbers and words."""


def clamp(value, low=0, high=10):
    """The value, or the bound that it passes."""
    if low > high:
        raise ValueError("low is over high")
    if value < low:
        return low
    elif value > high:
        return high
    else:
        return value


def initials(words, limit=3):
    """The first letters of some words."""
    found = []
    for word in words[:limit]:
        word = word.strip()
        if not word:
            continue
        found.append(word[0].upper())
    return "".join(found)


def pairs(left, right):
    """Neighbours of two lists."""
    both = []
    for at in range(min(len(left), len(right))):
        both.append((left[at], right[at]))
    return both
'''
TESTS = """from wordy import clamp, initials, pairs
import pytest


@pytest.mark.parametrize(("value", "wanted"), [(-1, 0), (0, 0), (5, 5), (10, 10), (11, 10)])
def test_clamp(value, wanted):
    assert clamp(value) == wanted


def test_clamp_refuses():
    with pytest.raises(ValueError):
        clamp(1, 3, 2)


def test_initials():
    assert initials(["ada", " lovelace", "", "x"]) == "AL"


def test_no_initials():
    assert initials([]) == ""


def test_pairs():
    assert pairs([1, 2], "ab") == [(1, "a"), (2, "b")]


def test_shorter():
    assert pairs([1], "ab") == [(1, "a")]
"""
FILES = {"wordy/__init__.py": CODE, "tests/test_wordy.py": TESTS, "README.md": "Wordy.\n"}


def sdist(place: Path, files: Mapping[str, str], name: str = "wordy", version: str = "1.0") -> Path:
    """An honest source distribution."""
    members = [(f"{name}-{version}/{path}", text.encode()) for path, text in files.items()]
    return archive(place / f"{name}-{version}.tar.gz", members)


def archive(path: Path, members: list[tuple[str | tarfile.TarInfo, bytes]]) -> Path:
    """Any archive at all."""
    with tarfile.open(path, "w:gz") as tar:
        for member, data in members:
            info = tarfile.TarInfo(member) if isinstance(member, str) else member
            if info.isreg():
                info.size = len(data)
            tar.addfile(info, io.BytesIO(data) if info.isreg() else None)
    return path


class Shop:
    """A workshop that remembers what was said. Its index has the packages it is given."""

    program = "prorld"

    def __init__(self, place: Path, index: Mapping[str, Path] | None = None) -> None:
        self.cache_dir = place / "cache"
        self.cache_dir.mkdir(parents=True, exist_ok=True)
        self.index = dict(index or {})
        self.asked: list[tuple[str, str | None]] = []
        self.said: list[str] = []
        self.warned: list[str] = []
        self._place = place

    def say(self, *lines: str) -> None:
        self.said += lines

    def progress(self, line: str) -> None:
        pass

    def warn(self, line: str) -> None:
        self.warned.append(line)

    @asynccontextmanager
    async def runtime(self) -> AsyncIterator[SandboxRuntime]:
        async with open_runtime(None, load(None, {}, {"state.dir": str(self._place / "state")})) as runtime:
            yield runtime

    async def package(
        self, requirement: str, *, kind: Literal["wheel", "sdist"] = "sdist", sha256: str | None = None
    ) -> Path:
        self.asked.append((requirement, sha256))
        found = self.index.get(requirement)
        if found is None:
            raise NotFound(f"no package {requirement}")
        return found


@pytest.fixture
def kit() -> ModuleType:
    """All of the above: a plugin's tests are no package to import from."""
    return sys.modules[__name__]
