"""``trio.run``, with errors of the project out of their groups so that they can be told in one line."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from prorld.errors import ProrldError, leaves

T = TypeVar("T")


def run_trio(main: Callable[[], Awaitable[T]]) -> T:
    """Run to the end. Errors that are all ours are raised as the first of them; a bug keeps its whole group.

    A reader that has gone, as ``head`` does, is no bug, and neither is Ctrl-C.
    """
    try:
        return trio.run(main)
    except BaseExceptionGroup as group:
        found = [*leaves(group)]
        if not all(isinstance(leaf, ProrldError | KeyboardInterrupt | BrokenPipeError) for leaf in found):
            raise
        raise next((leaf for leaf in found if isinstance(leaf, KeyboardInterrupt)), found[0]) from group


def is_interrupt(error: BaseException | None) -> bool:
    """Whether it is the user's Ctrl-C, which what contains a plugin can't tell from the plugin's own doing."""
    while error is not None:
        if any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves(error)):
            return True
        error = error.__cause__
    return False


async def interruptible(work: Callable[[], Awaitable[T]]) -> T:
    """Do it; SIGINT and SIGTERM cancel it, which also ends work in threads and child processes.

    What cleans up is waited for; a second signal does what it does without us.
    """
    results: list[T] = []
    interrupted = False

    async def listen(*, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        nonlocal interrupted
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for _ in signals:
                interrupted = True
                break
        nursery.cancel_scope.cancel("interrupted")

    async with trio.open_nursery() as nursery:
        await nursery.start(listen, name="signals")
        results.append(await work())
        nursery.cancel_scope.cancel("done")
    if interrupted or not results:
        raise KeyboardInterrupt
    return results[0]
