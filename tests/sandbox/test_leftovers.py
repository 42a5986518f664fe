"""Trees that hostile programs leave, deeper than any path and closed to their owner, are counted and removed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from prorld.sandbox.leftovers import disk_bytes, remove_tree
from prorld.sandbox.reaper import make_place, remove_boot
from tests.sandbox.support import open_descriptors

LEVELS = 2500
FILE_BYTES = 1 << 20


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that is removed here where a test did not: pytest can't remove a deep one."""
    made = Path(tempfile.mkdtemp(prefix="prorld-test-"))
    yield made
    if made.exists():
        remove_tree(made)


def _dig(place: Path, levels: int, *, name: str = "d" * 20) -> None:
    """Directories within one another, and a file at the bottom."""
    here = os.open(place, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    file = os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=here)
    os.write(file, bytes(FILE_BYTES))
    os.close(file)
    os.close(here)


def test_a_deep_tree_is_removed(place: Path) -> None:
    """However deep, with the descriptors that there were, and what it links to stays."""
    before = open_descriptors()
    sandbox = make_place(place / "runtime", "boot", "sandbox")
    _dig(sandbox, LEVELS)
    kept = place / "kept"
    kept.mkdir()
    (kept / "file").write_text("x")
    (sandbox / "link").symlink_to(kept)
    closed = sandbox / "closed" / "below"
    closed.mkdir(parents=True)
    (closed / "file").write_text("x")
    for path in (closed, closed.parent):
        path.chmod(0)
    remove_boot(place / "runtime", "boot")
    assert list((place / "runtime" / "sandboxes").iterdir()) == []
    assert (kept / "file").read_text() == "x"
    assert open_descriptors() == before


def test_what_lies_deep_is_counted(place: Path) -> None:
    """A file below the longest path that the kernel takes is found; a tree that is deeper than all reason is over."""
    before = open_descriptors()
    _dig(place / ".", LEVELS // 2)
    most = LEVELS << 14
    assert FILE_BYTES <= disk_bytes(str(place), stop_at=most) < most
    _dig(place / ("d" * 20), LEVELS, name="e" * 40)
    assert disk_bytes(str(place), stop_at=most) == most + 1
    assert open_descriptors() == before


def test_counting_stops(place: Path) -> None:
    """What is over is not looked through to its end; where nothing is, nothing is held."""
    _dig(place, 1)
    assert disk_bytes(str(place), stop_at=1) > 1
    assert disk_bytes(str(place / "none"), stop_at=1) == 0


def test_a_closed_directory_is_counted(place: Path) -> None:
    """Whoever writes to a directory that it has closed to readers hides nothing, and finds it as it was."""
    closed = place / "closed"
    closed.mkdir()
    (closed / "file").write_bytes(bytes(FILE_BYTES))
    closed.chmod(0o300)
    child = os.fork()
    if child == 0:
        if os.getuid() == 0:
            os.chown(place, 65534, 65534)
            os.chown(closed, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
        os._exit(disk_bytes(str(place), stop_at=FILE_BYTES << 4) >= FILE_BYTES)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert closed.stat().st_mode & 0o777 == 0o300
