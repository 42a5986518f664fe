"""A place for stores that the user of the sandboxes can pass through, and a real Apptainer where there is one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from prorld.errors import SandboxError
from prorld.sandbox.images.apptainer import VARIABLE, find_apptainer
from prorld.sandbox.images.store import ImageStore
from tests.sandbox.images.support import OWNER, StandIn


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that an ordinary user can pass through, which pytest's own is not. Any tree in it goes afterwards."""
    with tempfile.TemporaryDirectory(prefix="prorld-images-", ignore_cleanup_errors=False) as name:
        Path(name).chmod(0o755)
        yield Path(name)
        for path, directories, _ in os.walk(name):
            for directory in directories:
                if not (Path(path) / directory).is_symlink():
                    (Path(path) / directory).chmod(0o700)


@pytest.fixture
def stand_in(place: Path) -> StandIn:
    """A program in Apptainer's place."""
    return StandIn(place / "tool")


@pytest.fixture
def store(place: Path, stand_in: StandIn) -> Iterator[ImageStore]:
    """An empty store."""
    opened = ImageStore(place / "store", owner=OWNER, apptainer=stand_in.path)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def apptainer() -> str:
    """The real one."""
    try:
        return find_apptainer()
    except SandboxError as exc:
        pytest.skip(f"{exc.message}; or ${VARIABLE} names one")
