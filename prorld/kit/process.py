"""Child processes: each in a session and process group of its own, and gone with its group before the call returns.

It owns how a child is run: with its output always drained and bounded, or for as long as a task wants it. On cancel
the group gets SIGTERM, the child a bounded wait, the group SIGKILL, and the child is reaped. When a child ends by
itself, what is left of its group gets SIGKILL. It never reaches what has moved to another
session: that takes a sandbox.

PR_SET_PDEATHSIG must not be used with children started here. trio spawns in a worker thread, the signal follows that
thread and not the process, and idle threads end after ten seconds. ``lifeline`` is what to use instead: a pipe whose
end of file tells the child that this process has gone, however it went.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal

import msgspec
import trio
from trio.lowlevel import FdStream

from prorld.kit.cleanup import afterwards
from prorld.kit.output import BoundedOutput
from prorld.kit.process_group import KILL_SECONDS_MAX, ProcessGroup, Stdio, spawn

__all__ = ["Child", "ProcessResult", "Stdio", "child", "run_group"]

OUTPUT_BYTES_MAX = 1 << 20
TERM_SECONDS_MAX = 2.0
DRAIN_SECONDS_MAX = 1.0

_RECEIVE_BYTES = 1 << 16


class ProcessResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a process ended and what it wrote.

    ``exit_code`` is negative for a signal. ``drained`` is ``False`` when something that had left the group still held
    the output open, so that more may have come.
    """

    exit_code: int
    stdout: bytes
    stderr: bytes
    stdout_omitted_bytes: int = 0
    stderr_omitted_bytes: int = 0
    drained: bool = True
    duration_s: float = 0.0


async def run_group(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | None = None,
    stdin: bytes | None = None,
    merge_stderr: bool = False,
    output_bytes_max: int = OUTPUT_BYTES_MAX,
    term_seconds: float = TERM_SECONDS_MAX,
) -> ProcessResult:
    """Run a program to its end. Raises OSError when it can't be started; any exit code is a result.

    ``env`` is the whole environment of the child. ``output_bytes_max`` bounds each stream; all of it is read.
    Cancelled, it returns when the group is dead, and the output is lost.
    """
    started_at = trio.current_time()
    output, errors = BoundedOutput(output_bytes_max), BoundedOutput(output_bytes_max)
    group = await spawn(
        argv,
        env=env,
        cwd=cwd,
        stdin="null" if stdin is None else "pipe",
        stdout="pipe",
        stderr="stdout" if merge_stderr else "pipe",
    )
    async with afterwards(term_seconds + KILL_SECONDS_MAX, f"ending {group.name}", partial(group.end, term_seconds)):
        async with trio.open_nursery() as nursery:
            if group.stdin is not None and stdin is not None:
                nursery.start_soon(_feed, group.stdin, stdin, name=f"stdin of {group.name}")
            for stream, into in ((group.stdout, output), (group.stderr, errors)):
                if stream is not None:
                    nursery.start_soon(_drain, stream, into, name=f"output of {group.name}")
            exit_code = await group.exited()
            # What is left of the group would hold the output open.
            group.signal(signal.SIGKILL)
            nursery.cancel_scope.deadline = trio.current_time() + DRAIN_SECONDS_MAX
        drained = not nursery.cancel_scope.cancelled_caught
    return ProcessResult(
        exit_code=exit_code,
        stdout=output.value(),
        stderr=errors.value(),
        stdout_omitted_bytes=output.omitted_bytes,
        stderr_omitted_bytes=errors.omitted_bytes,
        drained=drained,
        duration_s=trio.current_time() - started_at,
    )


class Child:
    """A live child process, as ``child`` hands it out. The streams that were asked for are the holder's to read."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    @property
    def pid(self) -> int:
        """Its process id, which is its group's and its session's, too."""
        return self._group.pid

    @property
    def stdin(self) -> FdStream:
        """What it reads, where ``stdin="pipe"`` was asked for."""
        assert self._group.stdin is not None
        return self._group.stdin

    @property
    def stdout(self) -> FdStream:
        """What it writes, where ``stdout="pipe"`` was asked for; unread, the child blocks at 64 KiB."""
        assert self._group.stdout is not None
        return self._group.stdout

    @property
    def stderr(self) -> FdStream:
        """What it says on the side, where ``stderr="pipe"`` was asked for; unread, the child blocks at 64 KiB."""
        assert self._group.stderr is not None
        return self._group.stderr

    @property
    def exit_code(self) -> int | None:
        """How it ended, negative for a signal; ``None`` while it runs."""
        return self._group.exit_code

    def signal(self, signal_number: int) -> None:
        """Send a signal to the whole group; nothing happens when it has gone."""
        self._group.signal(signal_number)

    async def wait(self) -> int:
        """Wait until it has ended and its group has gone; the exit code."""
        await self._group.ended.wait()
        # `None` only if the kernel did not let it die within the time of the ladder.
        return -signal.SIGKILL if self._group.exit_code is None else self._group.exit_code


async def child(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | None = None,
    stdin: Literal["null", "pipe"] = "null",
    stdout: Stdio = "null",
    stderr: Stdio | Literal["stdout"] = "null",
    lifeline: bool = False,
    term_seconds: float = TERM_SECONDS_MAX,
    task_status: trio.TaskStatus[Child] = trio.TASK_STATUS_IGNORED,
) -> int:
    """Keep a program running until it ends or this is cancelled; hands out a ``Child``; returns the exit code.

    Raises OSError when it can't be started. With ``lifeline`` the child finds in ``LIFELINE_FD`` the number of a
    descriptor that reads end of file when this process, or this task, has gone.

    What a program that ended by itself wrote last can still be read from the handle; after a cancel it can't.
    """
    group = await spawn(argv, env=env, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr, lifeline=lifeline)

    async def end() -> None:
        await group.end(term_seconds, keep_output=group.exit_code is not None)

    async with afterwards(term_seconds + KILL_SECONDS_MAX, f"ending {group.name}", end):
        task_status.started(Child(group))
        return await group.exited()


async def _feed(stream: FdStream, data: bytes) -> None:
    await trio.lowlevel.checkpoint()
    try:
        # A program may end without having read all of its input.
        with suppress(trio.BrokenResourceError):
            await stream.send_all(data)
    finally:
        stream.close()


async def _drain(stream: FdStream, into: BoundedOutput) -> None:
    while data := await stream.receive_some(_RECEIVE_BYTES):
        into.feed(data)
