"""The signals that a daemon obeys and goes on: SIGHUP reads the configuration again, SIGQUIT shows what it does.

Those that end it are the composition root's.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TextIO

import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.domain.job import JobState
from prorld.ops.task_tree import TaskAges, format_tree, task_tree
from prorld.rollout.supervisor import Supervisor

__all__ = ["Terminal", "obey", "snapshot"]

log: FilteringBoundLogger = structlog.get_logger("prorld.ops")

JOBS_SHOWN_MAX = 1000
WRITE_S = 10.0


class Terminal:
    """The terminal that the daemon was started on, where it was. When it goes away, SIGHUP means what it says."""

    def __init__(self, descriptor: int = 0) -> None:
        self._descriptor = descriptor
        self._was_there = self._is_there()

    @property
    def is_gone(self) -> bool:
        """Whether there was one and is none any more."""
        return self._was_there and not self._is_there()

    def _is_there(self) -> bool:
        try:
            os.tcgetpgrp(self._descriptor)
        except OSError:
            return False
        return True


async def obey(
    reload: Callable[[], Awaitable[None]],
    show: Callable[[], str],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Obey both signals until cancelled. ``show`` gives what SIGQUIT puts on standard error."""
    terminal = Terminal()
    with trio.open_signal_receiver(signal.SIGHUP, signal.SIGQUIT) as signals, _stacks(sys.stderr):
        task_status.started()
        async for number in signals:
            if number == signal.SIGQUIT:
                await _put(show(), sys.stderr)
            elif terminal.is_gone:
                signal.raise_signal(signal.SIGTERM)
            else:
                await reload()


def snapshot(ages: TaskAges, supervisor: Supervisor) -> str:
    """The tree of tasks, then one line for each job that has not ended, active ones first."""
    lines = [format_tree(task_tree(ages)).rstrip("\n"), "", "jobs:"]
    room = JOBS_SHOWN_MAX
    for state in (JobState.EVALUATING, JobState.RUNNING, JobState.INITIALISING, JobState.QUEUED):
        for record in supervisor.live_records(state, room):
            where = f", waits for {record.waiting_for}" if record.waiting_for else ""
            lines.append(f"  {record.job_id}  {record.state}{where}, turn {record.turns}, since {record.created_at}")
            room -= 1
    left = sum(supervisor.counts().get(state.value, 0) for state in JobState if state is not JobState.DONE)
    shown = JOBS_SHOWN_MAX - room
    lines.append(f"  {left - shown} more" if left > shown else f"  {shown} in all")
    return "\n".join(lines) + "\n"


@contextmanager
def _stacks(stream: TextIO) -> Iterator[None]:
    """SIGQUIT shows Python's stacks at once, also while the loop is blocked; then what trio set up gets the signal.

    A handler of Python's own, which runs in the main thread between two steps: ``faulthandler`` looks at the frames of
    threads that go on running, and now and then ends the process for it. A main thread that is stuck in compiled code
    is not shown; the watchdog's SIGABRT shows it.
    """
    loops_own = signal.getsignal(signal.SIGQUIT)
    assert callable(loops_own)

    def show_first(number: int, frame: FrameType | None) -> None:
        _put_at_once(_all_stacks(frame), stream)
        loops_own(number, frame)

    signal.signal(signal.SIGQUIT, show_first)
    try:
        yield
    finally:
        signal.signal(signal.SIGQUIT, loops_own)


def _all_stacks(interrupted: FrameType | None) -> str:
    """Every thread of Python's, the main one last, where a reader's eye is."""
    # The documented way, in spite of its name.
    frames = sys._current_frames()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.get_ident()
    frames.pop(main, None)
    shown = [(names.get(ident, "not made by Python"), frame) for ident, frame in frames.items()]
    lines = []
    for name, frame in [*shown, ("main", interrupted)]:
        lines += [f"thread {name} (most recent call last):\n", *traceback.format_stack(frame), "\n"]
    return "".join(lines)


def _put_at_once(text: str, stream: TextIO) -> None:
    """Write as much as fits: past the stream's own buffer, which may be half-way in a write, and without waiting."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return  # there are no stacks, and the tree still comes
    data = memoryview(text.encode("utf-8", "backslashreplace"))
    writable = select.poll()
    writable.register(descriptor, select.POLLOUT)
    with suppress(OSError):
        while data and writable.poll(0) == [(descriptor, select.POLLOUT)]:
            data = data[os.write(descriptor, data[: select.PIPE_BUF]) :]


async def _put(text: str, stream: TextIO) -> None:
    """Write in a thread: a reader that sleeps must not stop the loop."""

    def write() -> None:
        stream.write(text)
        stream.flush()

    with trio.move_on_after(WRITE_S):
        await trio.to_thread.run_sync(write, abandon_on_cancel=True)
        log.info("tasks.shown", lines=text.count("\n"))
