"""One process group: starting it with its pipes, watching its first process, killing all of it.

It owns the descriptors of a child and the kill ladder. It decides nothing about output, and what has moved to another
session is out of its reach.

The first process is reaped last, after the group was killed: until then its number can't be given to anybody else, so
no signal ever reaches a stranger. This is why it is watched through a pidfd and read with ``WNOWAIT``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Literal

import trio
from trio.lowlevel import FdStream

__all__ = ["KILL_SECONDS_MAX", "LIFELINE_ENV", "ProcessGroup", "Stdio", "spawn"]

# How long a group that got SIGKILL may take to be gone. Longer means a process stuck in the kernel.
KILL_SECONDS_MAX = 5.0

LIFELINE_ENV = "LIFELINE_FD"

# "inherit" is this process's own stream; an int is an open descriptor that stays the caller's.
Stdio = Literal["null", "pipe", "inherit"] | int

_RECEIVE_BYTES = 1 << 16
_WATCH_SECONDS = 0.05
# Where a process's group and session stand behind its name in its stat file.
_GROUP, _SESSION = 2, 3
_GONE_PAUSES_SECONDS = (0.001, 0.002, 0.004)


class ProcessGroup:
    """A started group. ``exit_code`` is that of its first process, negative for a signal."""

    def __init__(
        self,
        name: str,
        process: trio.Process,
        *,
        stdin: FdStream | None,
        stdout: FdStream | None,
        stderr: FdStream | None,
        lifeline: FdStream | None,
    ) -> None:
        self.name = name
        self.pid = process.pid
        self.stdin = stdin
        self.stdout = stdout
        self.stderr = stderr
        self.exit_code: int | None = None
        self.ended = trio.Event()
        self._lifeline = lifeline
        self._process = process
        self._pidfd: int | None = None
        self._reaped = False
        # Out of descriptors is no reason to lose a process that runs already: `exited` can do without.
        with suppress(OSError):
            self._pidfd = os.pidfd_open(process.pid)

    async def exited(self) -> int:
        """Wait for the first process to end, and leave it unreaped. One task at a time."""
        if self._pidfd is None:
            await trio.lowlevel.checkpoint()
            while not self._has_exited():  # noqa: ASYNC110
                await trio.sleep(_WATCH_SECONDS)
        else:
            await trio.lowlevel.wait_readable(self._pidfd)
        assert self._has_exited()
        assert self.exit_code is not None
        return self.exit_code

    def signal(self, signal_number: int) -> None:
        """Signal every process of the group; nothing happens when it has gone."""
        if self._reaped:
            return
        # EPERM: all that is left of it changed its user.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal_number)

    async def end(self, term_seconds: float, *, keep_output: bool = False) -> None:
        """Climb the kill ladder, then close everything. To be called shielded, with a deadline.

        The lifeline holds until SIGTERM has had its time: what it is tied to would end without a word.

        ``keep_output`` leaves the output pipes unread and open. Otherwise they are emptied meanwhile, so that a process
        which says something on its way out does not block on it.
        """
        self._close(self.stdin)
        try:
            async with trio.open_nursery() as nursery:
                for stream in () if keep_output else (self.stdout, self.stderr):
                    if stream is not None:
                        nursery.start_soon(_discard, stream, name=f"last output of {self.name}")
                await self._kill(term_seconds)
                nursery.cancel_scope.cancel("the group has gone")
        finally:
            self._close(self._lifeline)
            if not keep_output:
                self._close(self.stdout, self.stderr)
            self._close_pidfd()
            self.ended.set()

    async def _kill(self, term_seconds: float) -> None:
        if not self._has_exited():
            self.signal(signal.SIGTERM)
            with trio.move_on_after(term_seconds):
                await self.exited()
        self.signal(signal.SIGKILL)
        await self.exited()
        await self._process.wait()
        self._reaped = True
        await self._emptied()

    async def _emptied(self) -> None:
        # SIGKILL is not instant. Mostly the group's number is free after a millisecond; but where nobody reaps orphans,
        # dead members keep it for ever, and only looking at each process tells.
        await trio.lowlevel.checkpoint()
        for pause in _GONE_PAUSES_SECONDS:
            try:
                os.killpg(self.pid, 0)
            except ProcessLookupError:
                return
            except PermissionError:
                pass
            await trio.sleep(pause)
        while await trio.to_thread.run_sync(_has_living_member, self.pid, _GROUP):  # noqa: ASYNC110
            await trio.sleep(_WATCH_SECONDS)

    async def session_emptied(self) -> None:
        """Wait until nothing of the group's session lives; the caller bounds the wait.

        For a program whose children have groups of their own and die with it.
        """
        while await trio.to_thread.run_sync(_has_living_member, self.pid, _SESSION):  # noqa: ASYNC110
            await trio.sleep(_GONE_PAUSES_SECONDS[0])

    def _has_exited(self) -> bool:
        if self.exit_code is None:
            seen = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if seen is not None:
                self.exit_code = seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status
        return self.exit_code is not None

    def _close(self, *streams: FdStream | None) -> None:
        for stream in streams:
            if stream is not None:
                stream.close()

    def _close_pidfd(self) -> None:
        if self._pidfd is not None:
            trio.lowlevel.notify_closing(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None


async def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | None,
    stdin: Literal["null", "pipe"],
    stdout: Stdio,
    stderr: Stdio | Literal["stdout"],
    lifeline: bool = False,
) -> ProcessGroup:
    """Start a program in a session of its own. Raises OSError. Its caller ends the group, with no await in between.

    Cancelled before the program has started, it raises; afterwards it returns the group all the same.
    """
    with ExitStack() as theirs, ExitStack() as ours:
        pipes = _Pipes(theirs, ours)
        child_in, our_in = pipes.into_child(stdin)
        child_out, our_out = pipes.out_of_child(stdout, inherited=1)
        child_err, our_err = (child_out, None) if stderr == "stdout" else pipes.out_of_child(stderr, inherited=2)
        child_line, our_line = pipes.into_child("pipe") if lifeline else (None, None)
        process = await trio.lowlevel.open_process(
            list(argv),
            stdin=child_in,
            stdout=child_out,
            stderr=child_err,
            cwd=cwd,
            env={**env, LIFELINE_ENV: str(child_line)} if child_line is not None else dict(env),
            start_new_session=True,
            pass_fds=() if child_line is None else (child_line,),
        )
        ours.pop_all()
        return ProcessGroup(
            f"{Path(argv[0]).name} {process.pid}",
            process,
            stdin=our_in,
            stdout=our_out,
            stderr=our_err,
            lifeline=our_line,
        )


class _Pipes:
    """The ends of the pipes while a child is started: ``theirs`` are closed in any case, ``ours`` if starting fails."""

    def __init__(self, theirs: ExitStack, ours: ExitStack) -> None:
        self._theirs = theirs
        self._ours = ours

    def into_child(self, how: Literal["null", "pipe"]) -> tuple[int, FdStream | None]:
        """A descriptor that the child reads, and our end."""
        if how == "null":
            return self._null(), None
        read_fd, write_fd = os.pipe()
        return self._pair(read_fd, write_fd)

    def out_of_child(self, how: Stdio, *, inherited: int) -> tuple[int, FdStream | None]:
        """A descriptor that the child writes, and our end."""
        if how == "pipe":
            read_fd, write_fd = os.pipe()
            return self._pair(write_fd, read_fd)
        if how == "null":
            return self._null(), None
        return (inherited if how == "inherit" else how), None

    def _pair(self, child_fd: int, our_fd: int) -> tuple[int, FdStream]:
        self._theirs.callback(os.close, child_fd)
        stream = FdStream(our_fd)
        self._ours.callback(stream.close)
        return child_fd, stream

    def _null(self) -> int:
        fd = os.open(os.devnull, os.O_RDWR)
        self._theirs.callback(os.close, fd)
        return fd


async def _discard(stream: FdStream) -> None:
    # Somebody else may be reading it still, or have closed it: then there is nothing to do here.
    await trio.lowlevel.checkpoint()
    with suppress(trio.BrokenResourceError, trio.BusyResourceError, trio.ClosedResourceError):
        while await stream.receive_some(_RECEIVE_BYTES):
            pass


def _has_living_member(number: int, field: int) -> bool:
    return any(map(partial(_lives_in, number, field), Path("/proc").glob("[0-9]*/stat")))


def _lives_in(number: int, field: int, stat: Path) -> bool:
    try:
        content = stat.read_bytes()
    except OSError:
        return False
    # The name in parentheses may hold anything; after it come the state, the parent, the group and the session.
    fields = content.rpartition(b")")[2].split()[:4]
    return int(fields[field]) == number and fields[0] not in {b"Z", b"X"}
