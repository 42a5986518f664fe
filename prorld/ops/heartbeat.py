"""The daemon's sign of life: asks its heart whether it lives, and only then tells the service manager.

A blocked event loop does not come round to it, and a stuck supervisor does not answer it; both look dead to a watchdog.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.errors import ProrldError
from prorld.kit.mailbox import MailboxClosed
from prorld.ops.notify import Notifier

__all__ = ["Heartbeat"]

log: FilteringBoundLogger = structlog.get_logger("prorld.ops")

STATUS_S = 5.0
# Two beats may be late or lost before a watchdog's time is up.
BEATS_PER_WATCHDOG = 3
ASK_AGAIN_S = 0.05
# While stopping: the next beat asks again long before this much more time is used up.
EXTENSION_BEATS = 4


class Heartbeat:
    """One beat after the other, until cancelled. ``ping`` asks the heart, ``describe`` gives the line of status."""

    def __init__(self, notifier: Notifier, ping: Callable[[], Awaitable[None]], describe: Callable[[], str]) -> None:
        self._notifier = notifier
        self._ping = ping
        self._describe = describe
        self._extend_until: float | None = None
        watchdog_s = notifier.watchdog_s
        self.period_s = STATUS_S if watchdog_s is None else min(STATUS_S, watchdog_s / BEATS_PER_WATCHDOG)

    def stop_within(self, seconds: float) -> None:
        """The end has begun and may take so long: until then each beat asks the manager for more time."""
        self._extend_until = trio.current_time() + seconds

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Beat until cancelled."""
        task_status.started()
        if not self._notifier.is_heard:
            return
        was_alive = True
        while True:
            due = trio.current_time() + self.period_s
            alive = await self._lives()
            if alive != was_alive:
                (log.info if alive else log.error)("heart.answered" if alive else "heart.stuck", within_s=self.period_s)
            was_alive = alive
            status = self._describe() if alive else "the supervisor does not answer"
            await self._notifier.beat(status, alive=alive, extend_s=self._extension() if alive else None)
            await trio.sleep_until(due)

    def _extension(self) -> float | None:
        if self._extend_until is None or trio.current_time() >= self._extend_until:
            return None
        return EXTENSION_BEATS * self.period_s

    async def _lives(self) -> bool:
        with trio.move_on_after(self.period_s):
            # Nobody tells when there is room in a mailbox again.
            while not await self._answers():  # noqa: ASYNC110
                await trio.sleep(ASK_AGAIN_S)
            return True
        return False

    async def _answers(self) -> bool:
        try:
            await self._ping()
        except MailboxClosed:
            # It has ended, which is not the same as being stuck: the daemon is on its way out.
            return True
        except ProrldError:
            # Its mailbox is full. One that reads it comes to our question, too.
            return False
        return True
