"""Sandboxes for a command that runs without a daemon: in name only, or real ones."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import trio

from prorld.errors import SandboxError
from prorld.ops.users import sandbox_user
from prorld.sandbox.bubblewrap import Bubblewrap
from prorld.sandbox.contract import SandboxRuntime
from prorld.sandbox.probe import check_bubblewrap
from prorld.sandbox.runtime import Runtime
from prorld.sandbox.warden_client import Warden, run_warden
from prorld.testing.fake_sandbox import FakeRuntime

__all__ = ["KINDS", "open_runtime"]

KINDS = ("bubblewrap", "fake")
USER = "nobody"


@asynccontextmanager
async def open_runtime(kind: str) -> AsyncIterator[SandboxRuntime]:
    """A runtime for the length of a block; its warden and its directories are gone afterwards."""
    if kind == "fake":
        yield FakeRuntime()
        return
    user = sandbox_user(USER)
    trouble = await check_bubblewrap(user=user)
    if trouble is not None:
        raise SandboxError(f"no sandbox can be made here: {trouble}", retryable=False)
    # Small and short-lived, as the probe's.
    with tempfile.TemporaryDirectory(prefix="prorld-try-") as place:
        async with trio.open_nursery() as nursery:
            warden: Warden = await nursery.start(partial(run_warden, user=user), name="warden")
            yield Runtime(Bubblewrap(), warden, runtime_dir=Path(place), boot_id="try")
            nursery.cancel_scope.cancel("the command is over")
