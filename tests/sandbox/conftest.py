"""Real sandboxes for the tests: a warden, a runtime, and what must be gone after each test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trio

from prorld.sandbox.bubblewrap import Bubblewrap
from prorld.sandbox.contract import Sandbox
from prorld.sandbox.runtime import Runtime
from prorld.sandbox.warden_client import Warden, run_warden
from prorld.testing.sandbox_contract import open_sandbox
from tests.sandbox.support import BOOT_ID, children, needed_by_real_ones, open_descriptors


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A directory that an ordinary user can pass through, which pytest's own is not."""
    place = Path(tempfile.mkdtemp(prefix="prorld-test-"))
    place.chmod(0o755)
    yield place
    left = [str(path) for path in place.glob("sandboxes/*/*") if path.name != "owner"]
    shutil.rmtree(place)
    assert left == []


@pytest.fixture
async def warden() -> AsyncIterator[Warden]:
    """A warden; after the test neither it nor anything of it is left, nor a descriptor on this side."""
    before, others = open_descriptors(), children()
    async with trio.open_nursery() as nursery:
        handle: Warden = await nursery.start(_run_warden)
        yield handle
        nursery.cancel_scope.cancel("the test has ended")
    assert open_descriptors() <= before
    assert children() <= others


async def _run_warden(*, task_status: trio.TaskStatus[Warden] = trio.TASK_STATUS_IGNORED) -> None:
    await run_warden(exposed=needed_by_real_ones(), task_status=task_status)


@pytest.fixture
async def runtime(warden: Warden, runtime_dir: Path) -> Runtime:
    """Real sandboxes."""
    return Runtime(Bubblewrap(), warden, runtime_dir=runtime_dir, boot_id=BOOT_ID)


@pytest.fixture
async def sandbox(runtime: Runtime) -> AsyncIterator[Sandbox]:
    """One real sandbox."""
    async with open_sandbox(runtime) as opened:
        yield opened
