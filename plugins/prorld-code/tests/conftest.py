"""Real sandboxes for the tests of this plugin."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trio

from prorld.sandbox.bubblewrap import Bubblewrap
from prorld.sandbox.runtime import Runtime
from prorld.sandbox.warden_client import Warden, run_warden


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A directory that an ordinary user can pass through, which pytest's own is not."""
    place = Path(tempfile.mkdtemp(prefix="prorld-code-test-"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


@pytest.fixture
async def runtime(runtime_dir: Path) -> AsyncIterator[Runtime]:
    """Real sandboxes without an image: this host's programs and this interpreter, read-only."""
    async with trio.open_nursery() as nursery:
        warden: Warden = await nursery.start(run_warden)
        yield Runtime(Bubblewrap(), warden, runtime_dir=runtime_dir, boot_id="boot-of-the-test")
        nursery.cancel_scope.cancel("the test has ended")
