"""Tasks that outlive whoever asked for them: an asker may leave, and the work goes on to its end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.errors import Overloaded, RequestError

__all__ = ["Work", "Workshop"]

log: FilteringBoundLogger = structlog.get_logger()

T = TypeVar("T")


class Work(Generic[T]):
    """A task that was started for somebody who may have gone when it is done."""

    def __init__(self) -> None:
        self.begun = trio.Event()
        self.done = trio.Event()
        self.result: T | None = None
        self.error: Exception | None = None

    async def outcome(self) -> T:
        """What came of it. The caller's scope bounds the wait, and not the work."""
        await self.done.wait()
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


class Workshop:
    """Where such tasks live. ``run`` is their nursery."""

    def __init__(self) -> None:
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Let tasks live here until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None

    def must_be_open(self) -> None:
        """``Overloaded`` where no work can be begun any more."""
        if self._nursery is None:
            raise _closing()

    def start(
        self, do: Callable[[Work[T]], Awaitable[T]], name: str, when_done: Callable[[], None] | None = None
    ) -> Work[T]:
        """Do it in a task of its own; ``when_done`` is called before anybody learns that it is done."""
        self.must_be_open()
        assert self._nursery is not None
        work: Work[T] = Work()
        self._nursery.start_soon(_do, do, work, when_done, name=name)
        return work

    def beside(self, do: Callable[[], Awaitable[None]], name: str) -> None:
        """Do what nobody waits for, unless the daemon is going away."""
        if self._nursery is not None:
            self._nursery.start_soon(do, name=name)


def _closing() -> Overloaded:
    return Overloaded("the daemon is going away", code="closing")


async def _do(do: Callable[[Work[T]], Awaitable[T]], work: Work[T], when_done: Callable[[], None] | None) -> None:
    try:
        work.result = await do(work)
    except Exception as exc:
        # Whatever it is, it belongs to whoever asked; the others' work goes on.
        if not isinstance(exc, RequestError):
            log.exception("policy.broken")
        work.error = exc
    finally:
        if work.result is None and work.error is None:
            work.error = _closing()
        if when_done is not None:
            when_done()
        work.begun.set()
        work.done.set()
