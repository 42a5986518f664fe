"""Sandboxes without a wall, for comparison alone: the same sessions, the same warden, nothing around them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import trio

from prorld.kit.cleanup import afterwards
from prorld.sandbox.births import CONTROL_FD
from prorld.sandbox.box import Box
from prorld.sandbox.contract import Sandbox, SandboxInfo, SandboxSpec
from prorld.sandbox.link import Child
from prorld.sandbox.reaper import remove_place
from prorld.sandbox.warden_client import Warden

__all__ = ["BareRuntime"]

CLOSE_SECONDS = 10.0
_HOLD = ("/bin/bash", "--norc", "--noprofile", "-c", f"while IFS= read -r -u {CONTROL_FD} _; do :; done")


class _NoWall(Warden):
    """A warden whose children all start outside: there is nothing to enter."""

    def __init__(self, inner: Warden) -> None:
        super().__init__(inner.uid, inner.gid)
        self._inner = inner

    async def spawn(self, argv: Sequence[str], **wish: Any) -> Child:
        """As the warden's own, with neither walls nor limits."""
        return await self._inner.spawn(argv, env=wish["env"])


class BareRuntime:
    """Gives what a sandbox gives, and keeps nobody from anything."""

    name = "bare"

    def __init__(self, warden: Warden, *, runtime_dir: Path) -> None:
        self._warden = _NoWall(warden)
        self._runtime_dir = runtime_dir
        self._boxes: dict[str, Box] = {}

    def list(self) -> tuple[SandboxInfo, ...]:
        """The live ones."""
        return tuple(box.info(self.name) for box in self._boxes.values())

    async def run(
        self,
        spec: SandboxSpec,
        *,
        sandbox_id: str,
        job_id: str,
        task_status: trio.TaskStatus[Sandbox] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Two sessions in a directory, until cancelled."""
        place = self._runtime_dir / sandbox_id
        place.mkdir()
        os.chown(place, self._warden.uid, self._warden.gid)
        env = {"HOME": str(place), **spec.env}
        spec = msgspec.structs.replace(spec, workdir=str(place))
        box = Box(self._warden, spec, sandbox_id=sandbox_id, job_id=job_id, env=env, seccomp=b"")
        self._boxes[sandbox_id] = box
        try:
            holder = await self._warden.spawn(_HOLD, env=env)
            box.hold(holder)
            async with afterwards(CLOSE_SECONDS, f"closing {sandbox_id}", box.end), trio.open_nursery() as nursery:
                await box.furnish(holder, nursery)
                task_status.started(box)
                await holder.wait()
        finally:
            del self._boxes[sandbox_id]
            remove_place(place)
