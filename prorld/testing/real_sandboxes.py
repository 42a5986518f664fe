"""Real sandboxes for the tests of a plugin: bubblewrap, without an image, and nothing left of them afterwards."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import trio

from prorld.sandbox.bubblewrap import Bubblewrap
from prorld.sandbox.runtime import Runtime
from prorld.sandbox.warden_client import Warden, run_warden

__all__ = ["real_sandboxes"]


@asynccontextmanager
async def real_sandboxes() -> AsyncIterator[Runtime]:
    """A runtime for the length of a block, which asserts at its end that no sandbox has left a directory.

    Inside are this host's programs and this interpreter, to be read only. It starts processes: a test that opens one
    is no fast test.
    """
    with _directory() as place:
        async with trio.open_nursery() as nursery:
            warden: Warden = await nursery.start(run_warden)
            yield Runtime(Bubblewrap(), warden, runtime_dir=place, boot_id="boot-of-the-test")
            nursery.cancel_scope.cancel("the block has ended")


@contextmanager
def _directory() -> Iterator[Path]:
    """One that an ordinary user can pass through, which pytest's own are not."""
    place = Path(tempfile.mkdtemp(prefix="prorld-test-"))
    try:
        place.chmod(0o755)
        yield place
        left = [str(path) for path in place.glob("sandboxes/*/*") if path.is_dir()]
        assert left == [], f"sandboxes have left {left}"
    finally:
        shutil.rmtree(place)
