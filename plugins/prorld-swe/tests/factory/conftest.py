"""Source packages made for the tests, and a workshop whose sandboxes are real."""

from __future__ import annotations

import gzip
import io
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

from prorld.testing.workshop import FakeWorkshop

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
    # Without the time of day, which would make it another archive, and its bugs come in another order, each second.
    with gzip.GzipFile(path, "wb", mtime=0) as file, tarfile.open(fileobj=file, mode="w") as tar:
        for member, data in members:
            info = tarfile.TarInfo(member) if isinstance(member, str) else member
            if info.isreg():
                info.size = len(data)
            tar.addfile(info, io.BytesIO(data) if info.isreg() else None)
    return path


Shop = FakeWorkshop


@pytest.fixture
def kit() -> ModuleType:
    """All of the above: a plugin's tests are no package to import from."""
    return sys.modules[__name__]
