"""Many sandboxes that live at the same time."""

from __future__ import annotations

import trio

from prorld.bench.sandbox_world import World
from prorld.errors import SandboxError, chain
from prorld.sandbox.contract import Sandbox

__all__ = ["Crowd"]

STARTERS = 4  # sandboxes that begin at the same time


class Crowd:
    """Sandboxes behind one wall, in a nursery of the caller's that ends them."""

    def __init__(self, world: World, wall: str, name: str) -> None:
        self._world, self._wall, self._name = world, wall, name
        self._failures: list[str] = []
        self.sandboxes: list[Sandbox] = []

    async def begin(self, count: int, nursery: trio.Nursery) -> None:
        """Start so many, a few at the same time. One that does not come up is missing from ``sandboxes``."""
        starting = trio.CapacityLimiter(STARTERS)
        async with trio.open_nursery() as births:
            for number in range(count):
                births.start_soon(self._begin_one, number, nursery, starting)

    def notes(self) -> list[str]:
        """What there is to say of those that did not come up."""
        if not self._failures:
            return []
        why = " ".join(self._failures[0].split())
        return [f"{self._wall}_{self._name}: {len(self._failures)} did not come up, the first because {why}"]

    async def _begin_one(self, number: int, nursery: trio.Nursery, starting: trio.CapacityLimiter) -> None:
        async with starting:
            try:
                self.sandboxes.append(await nursery.start(self._run, number))
            except SandboxError as exc:
                self._failures.append(chain(exc))

    async def _run(self, number: int, task_status: trio.TaskStatus[Sandbox] = trio.TASK_STATUS_IGNORED) -> None:
        await self._world.runtimes[self._wall].run(
            self._world.spec(self._wall),
            sandbox_id=f"{self._wall}-{self._name}-{number}",
            job_id="bench",
            task_status=task_status,
        )
