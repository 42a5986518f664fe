"""The bounded inbox of an actor, with tell (one way) and ask (with an answer).

It owns the queue and the questions that are still open. It never waits on behalf of an actor: an answer is given
without awaiting, and an asker that has gone disturbs nobody. It never leaves an asker hanging: when the receiving side
ends, every open question fails with ``MailboxClosed``. It knows no time: an ask stands under a deadline of its caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import msgspec
import trio

from prorld.errors import Overloaded, ProrldError

__all__ = ["Mailbox", "MailboxClosed", "MailboxStatistics", "Reply"]

M = TypeVar("M")
T = TypeVar("T")

_UNSET = object()


class MailboxClosed(ProrldError):
    """The actor behind a mailbox has gone. A question that was open may or may not have been acted upon."""

    code = "mailbox_closed"


class MailboxStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A mailbox at one moment; ``peak`` is the fullest it has been, ``refused_total`` counts ``Overloaded``."""

    name: str
    size: int
    used: int
    peak: int
    told_total: int
    asked_total: int
    refused_total: int
    open_asks: int


class Reply(Generic[T]):
    """Where the answer to one question goes. It holds one answer; giving it never blocks and never raises."""

    def __init__(self) -> None:
        self._is_wanted = True
        self._value: object = _UNSET
        self._error: Exception | None = None
        self._asker: trio.lowlevel.Task | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether the asker still waits for an answer."""
        return self._is_wanted

    def answer(self, value: T) -> bool:
        """Give the answer. ``True``: the asker gets it, even if it is cancelled from now on; ``False``: it has gone."""
        if not self._is_wanted:
            return False
        self._value = value
        self._settle()
        return True

    def fail(self, error: Exception) -> bool:
        """Let the question raise ``error`` in the asker; the result is that of ``answer``."""
        if not self._is_wanted:
            return False
        self._error = error
        self._settle()
        return True

    def _settle(self) -> None:
        self._is_wanted = False
        if self._asker is not None:
            trio.lowlevel.reschedule(self._asker)

    async def _wait(self) -> T:
        # Not an Event: a cancelled asker must stop wanting at the instant of the cancel and not when it runs again, or
        # an answer that falls in between is lost while the actor believes it was delivered. The other way round trio
        # helps: a task that is scheduled already is not cancelled any more.
        if self._is_wanted:
            self._asker = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._give_up)
        else:
            await trio.lowlevel.cancel_shielded_checkpoint()
        if self._error is not None:
            raise self._error
        assert self._value is not _UNSET
        return self._value  # type: ignore[return-value]  # only `answer` sets it, and it takes a T

    def _give_up(self, _: object) -> trio.lowlevel.Abort:
        self._is_wanted = False
        return trio.lowlevel.Abort.SUCCEEDED


class Mailbox(Generic[M]):
    """A bounded queue of messages into one actor."""

    def __init__(self, name: str, size: int) -> None:
        assert size >= 1, f"mailbox {name}: size {size}"
        self.name = name
        self.size = size
        self._tx, self._rx = trio.open_memory_channel[M](size)
        self._open: dict[Reply[object], None] = {}
        self._had_reader = False
        self._receiving = False
        self._peak = 0
        self._told = 0
        self._asked = 0
        self._refused = 0

    def tell_nowait(self, message: M) -> None:
        """Put a message in. Raises ``Overloaded`` when the mailbox is full, ``MailboxClosed`` when it is closed."""
        try:
            self._tx.send_nowait(message)
        except trio.WouldBlock:
            self._refused += 1
            raise Overloaded(f"mailbox {self.name} is full ({self.size} messages)") from None
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise self._closed_error() from None
        self._count()

    async def tell(self, message: M) -> None:
        """Put a message in, waiting for room. Cancelled, it has not put it in. Raises ``MailboxClosed``."""
        try:
            await self._tx.send(message)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise self._closed_error() from None
        self._count()

    async def ask(self, make: Callable[[Reply[T]], M]) -> T:
        """Send ``make(reply)`` and wait for the answer. Raises what the actor fails it with.

        A full mailbox raises ``Overloaded`` at once, and nothing was sent. An actor that goes first raises
        ``MailboxClosed``.
        """
        reply: Reply[T] = Reply()
        self.tell_nowait(make(reply))
        self._asked += 1
        key: Reply[object] = reply  # type: ignore[assignment]  # invariance; the book only ever fails a reply
        self._open[key] = None
        try:
            return await reply._wait()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  # its own half
        finally:
            del self._open[key]

    @contextmanager
    def receive(self) -> Iterator[trio.MemoryReceiveChannel[M]]:
        """Read the mailbox: one reader, once. Leaving the block closes it and fails every open question."""
        assert not self._had_reader, f"mailbox {self.name} has had a reader already"
        self._had_reader = True
        self._receiving = True
        try:
            with self._rx:
                yield self._rx
        finally:
            self._receiving = False
            self.close()

    def close(self) -> None:
        """Take no more messages. A reader gets what is queued, then its loop ends; with no reader all asks fail."""
        self._tx.close()
        if self._receiving:
            return
        self._rx.close()
        for reply in tuple(self._open):
            reply.fail(self._closed_error())

    def statistics(self) -> MailboxStatistics:
        """What it holds and has held."""
        return MailboxStatistics(
            name=self.name,
            size=self.size,
            used=self._tx.statistics().current_buffer_used,
            peak=self._peak,
            told_total=self._told,
            asked_total=self._asked,
            refused_total=self._refused,
            open_asks=len(self._open),
        )

    def _count(self) -> None:
        self._told += 1
        self._peak = max(self._peak, self._tx.statistics().current_buffer_used)

    def _closed_error(self) -> MailboxClosed:
        return MailboxClosed(f"mailbox {self.name} is closed")
