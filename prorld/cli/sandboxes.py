"""Sandboxes for a command that runs without a daemon: in name only, or those that the configuration describes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path

import trio

from prorld.config import Loaded
from prorld.errors import SandboxError
from prorld.ops.users import sandbox_user
from prorld.ops.walls import image_store, places_of, wall_of
from prorld.sandbox.contract import SandboxRuntime
from prorld.sandbox.kinds import KINDS, ROOTLESS
from prorld.sandbox.probe import check_wall
from prorld.sandbox.registry import SandboxHost, run_runtime, runtime_factory
from prorld.sandbox.runtime import Runtime
from prorld.sandbox.warden_client import Warden, run_warden
from prorld.testing.fake_sandbox import FakeRuntime

__all__ = ["FAKE", "open_runtime"]

FAKE = "fake"
_BOOT_ID = "try"


@asynccontextmanager
async def open_runtime(kind: str | None, loaded: Loaded, hide: Sequence[str] = ()) -> AsyncIterator[SandboxRuntime]:
    """A runtime for the length of a block; its warden and its directories are gone afterwards.

    ``None`` is the one of the configuration. Images are those of the daemon of this configuration. What is to ``hide``
    is not seen inside, as the code of handlers is not in the daemon's.
    """
    kind = kind or loaded.config.sandbox.runtime
    if kind == FAKE:
        yield FakeRuntime()
        return
    # Small and short-lived; in a thread it would need clean-up of its own against cancellation.
    with tempfile.TemporaryDirectory(prefix="prorld-try-", dir=loaded.config.sandbox.scratch_dir) as name:
        place = Path(name)
        os.chmod(place, 0o711)  # noqa: PTH101, S103 - the sandboxes' user passes through
        async with trio.open_nursery() as nursery:
            if kind in KINDS:
                with closing(image_store(loaded)) as store:
                    await store.prepare()
                    chosen, user = loaded.config.sandbox, sandbox_user(loaded.config.sandbox.user)
                    wall, places = wall_of(chosen, kind, hide), places_of(loaded.config, kind, store)
                    # Docker has images of its own, and none are there without walls.
                    image = chosen.image if kind in (chosen.runtime, *ROOTLESS) else None
                    trouble = await check_wall(wall, user=user, image=image, images=store, exposed=places)
                    if trouble is not None:
                        raise SandboxError(f"no sandbox can be made here: {trouble}", retryable=False)
                    run = partial(run_warden, user=user, exposed=[name, *places])
                    warden: Warden = await nursery.start(run, name="warden")
                    yield Runtime(
                        wall, warden, runtime_dir=place, boot_id=_BOOT_ID, images=store, default_image=image
                    )  # fmt: skip
            else:
                host = SandboxHost(runtime_dir=place, boot_id=_BOOT_ID, user=sandbox_user(loaded.config.sandbox.user))
                runtime: SandboxRuntime = await nursery.start(run_runtime, runtime_factory(kind), host)
                yield runtime
            nursery.cancel_scope.cancel("the command is over")
