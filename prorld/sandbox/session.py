"""A persistent session in a sandbox: one program that runs one text after the other, and is replaced when it dies.

The program's kind (``Dialect``) says how it is started and how a text is handed to it; everything else is here: one
call at a time, output bounded, the ladder of signals when a limit passes, the restart. Output and status come over the
control socket between marks that carry a nonce (see ``collector``), so nothing is ever read off a prompt. That keeps
order; it is no proof: what runs in a session can read the nonce and say what it likes.

A call that is cancelled half-way leaves a program nobody knows the state of: it is killed at once and replaced by the
next call, which says so with ``restarted``.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

import msgspec
import trio

from prorld.errors import SandboxError
from prorld.sandbox.collector import Collector, EndOfCommand
from prorld.sandbox.contract import CommandResult
from prorld.sandbox.link import Child

__all__ = ["BOOT_SECONDS", "NO_END", "TIMED_OUT", "Dialect", "Rung", "Session", "Spawn", "keep_empty"]

TIMED_OUT = 124  # the exit code of a text that its limit ended, as timeout(1) has it
NO_END = 125  # the exit code of a text that never came to its end, although its program ended with 0
BOOT_SECONDS = 20.0
TRIES = 2  # of a text that no program has taken yet
SYNC_SECONDS = 2.0
DEATH_SECONDS = 2.0

_RECEIVE_BYTES = 1 << 16
# From here on a flood of output is read with pauses, so that no command takes the loop from the others.
_FLOOD_BYTES = 16 << 20
_FLOOD_PAUSE_SECONDS = 0.001

Spawn = Callable[[Sequence[str]], Awaitable[Child]]


class Rung(msgspec.Struct, frozen=True):
    """One step of the ladder: a signal, and how long it may take to help."""

    number: signal.Signals
    seconds: float


class Dialect(Protocol):
    """One kind of program."""

    @property
    def argv(self) -> Sequence[str]:
        """How the program is started, inside the sandbox."""
        ...

    @property
    def typed_once(self) -> bytes:
        """What is typed at its tty when it starts."""
        ...

    @property
    def sent_once(self) -> bytes:
        """What is sent over the control socket when it starts."""
        ...

    @property
    def typed_each(self) -> bytes:
        """What is typed at its tty for each text."""
        ...

    @property
    def boot_seconds(self) -> float:
        """How long a start may take."""
        ...

    @property
    def ladder(self) -> Sequence[Rung]:
        """What is done to a text that outlives its limit."""
        ...

    def frame(self, nonce: bytes, text: str) -> bytes:
        """What is sent for one text. Raises ``ValueError`` where this program can't be told such a text."""
        ...

    def change_directory(self, path: str) -> str:
        """A text that goes to a directory, quietly."""
        ...

    def check_start(self, exit_code: int, said: bytes) -> None:
        """Look at how that text ended when the program was new. Raises ``SandboxError`` where it can't work."""
        ...


class _DiedError(Exception):
    """The program ended, or does not react any more; never leaves this module."""


class Session:
    """One program of a kind, over all its lives."""

    def __init__(
        self, spawn: Spawn, dialect: Dialect, *, nursery: trio.Nursery, output_bytes: int, workdir: str, name: str
    ) -> None:
        self._spawn = spawn
        self._dialect = dialect
        self._nursery = nursery  # the sandbox's own: who empties a tty lives as long as the sandbox
        self._output_bytes = output_bytes
        self._cwd = workdir
        self._name = name
        self._lock = trio.Lock()
        self._child: Child | None = None
        self._lives = 0

    @property
    def pid(self) -> int | None:
        """The process, while there is one."""
        return None if self._child is None else self._child.pid

    async def start(self) -> None:
        """Bring the program up before it is needed. Raises ``SandboxError``."""
        async with self._lock:
            if self._child is None:
                await self._start()

    async def run(self, text: str, *, limit_s: float) -> CommandResult:
        """Run a text, bounded in time and in output. Raises ``SandboxError`` when the sandbox is gone."""
        async with self._lock:
            replaced = self._child is None and self._lives > 0
            child = self._child or await self._start()
            nonce = _nonce()
            try:
                frame = self._dialect.frame(nonce, text)
            except ValueError as exc:
                return CommandResult(exit_code=2, output=f"{self._name}: {exc}\n".encode(), restarted=replaced)
            started_at = trio.current_time()
            for _ in range(TRIES):
                collector = Collector(nonce, self._output_bytes)
                left_s = max(0.0, started_at + limit_s - trio.current_time())
                code, timed_out = await self._try(child, frame, collector, left_s)
                if self._child is None:
                    child, replaced = await self._start(), True
                if code is not None:
                    return CommandResult(
                        exit_code=code,
                        output=collector.output,
                        omitted_bytes=collector.omitted_bytes,
                        timed_out=timed_out,
                        restarted=replaced,
                        duration_s=trio.current_time() - started_at,
                    )
            raise SandboxError(f"the {self._name} session does not live long enough to take a text")

    def close(self) -> None:
        """Let go of the program; it is killed if it still runs."""
        child, self._child = self._child, None
        if child is not None:
            child.close()

    async def _try(self, child: Child, frame: bytes, collector: Collector, limit_s: float) -> tuple[int | None, bool]:
        """The exit code of a text, and whether a limit ended it. A program that has died in it is let go.

        There is no code where the program was dead before it took the text: what that death says is no answer to it.
        Nor is 0, where the program ended within the text.
        """
        end, timed_out = await self._climb(child, frame, collector, limit_s)
        if end is not None:
            self._cwd = os.fsdecode(end.cwd) or self._cwd
            return (TIMED_OUT if timed_out else end.exit_code), timed_out
        died_with = await self._bury(child, waiting=not timed_out)
        if timed_out:
            return TIMED_OUT, True
        return (died_with or NO_END) if collector.started else None, False

    async def _climb(
        self, child: Child, frame: bytes, collector: Collector, limit_s: float
    ) -> tuple[EndOfCommand | None, bool]:
        """Run a text to its end; no end means that the program has none either. The second value: a limit ended it."""
        sent = timed_out = False
        with self._no_half_measures():
            try:
                with trio.move_on_after(limit_s):
                    await _send(child, self._dialect.typed_each, frame)
                    sent = True
                    return await _read(child, collector), False
                timed_out = True
                # Half sent, it can't be saved: the program would take the next text for the rest of this one.
                for rung in self._dialect.ladder if sent else ():
                    child.interrupt(rung.number)
                    with trio.move_on_after(rung.seconds):
                        end = await _read(child, collector)
                        await self._synchronise(child)
                        return end, True
            except _DiedError:
                pass
        return None, timed_out

    async def _synchronise(self, child: Child) -> None:
        """Make sure that a program which was just interrupted takes texts again."""
        nonce = _nonce()
        with trio.move_on_after(SYNC_SECONDS):
            await _send(child, self._dialect.typed_each, self._dialect.frame(nonce, ""))
            await _read(child, Collector(nonce, 0))
            return
        raise _DiedError

    async def _start(self) -> Child:
        """A new life, in the directory where the last one ended."""
        child = await self._spawn(self._dialect.argv)
        self._child = child
        with self._no_half_measures():
            self._nursery.start_soon(keep_empty, child.tty, name=f"tty of {self._name}")
            child.silence_at_end()
            nonce = _nonce()
            collector = Collector(nonce, 1 << 12)
            try:
                with trio.fail_after(self._dialect.boot_seconds):
                    await _send(child, self._dialect.typed_once, self._dialect.sent_once)
                    frame = self._dialect.frame(nonce, self._dialect.change_directory(self._cwd))
                    await _send(child, self._dialect.typed_each, frame)
                    end = await _read(child, collector)
            except (_DiedError, trio.TooSlowError) as exc:
                raise SandboxError(f"the {self._name} session did not come up") from exc
            self._dialect.check_start(end.exit_code, collector.output)
        self._lives += 1
        self._cwd = os.fsdecode(end.cwd) or self._cwd
        return child

    async def _bury(self, child: Child, *, waiting: bool) -> int:
        """The exit code of a program that has ended, or that is ended here because it does not react."""
        if waiting:
            with trio.move_on_after(DEATH_SECONDS):
                await child.wait()
        self.close()
        with trio.move_on_after(DEATH_SECONDS):
            code = await child.wait()
            return code if code >= 0 else 128 - code
        raise SandboxError(f"the {self._name} session could not be killed")

    @contextmanager
    def _no_half_measures(self) -> Iterator[None]:
        """Let go of the program when the block does not come to its end: nobody knows then what it is doing."""
        try:
            yield
        except BaseException:
            self.close()
            raise


def _nonce() -> bytes:
    return secrets.token_hex(8).encode()


async def _send(child: Child, typed: bytes, frame: bytes) -> None:
    try:
        if typed:
            await child.tty.send_all(typed)
        while frame:
            frame = frame[await child.control.send(frame) :]
    except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as exc:
        raise _DiedError from exc


async def _read(child: Child, collector: Collector) -> EndOfCommand:
    while True:
        try:
            data = await child.control.recv(_RECEIVE_BYTES)
        except (OSError, trio.ClosedResourceError) as exc:
            raise _DiedError from exc
        if not data:
            raise _DiedError
        end = collector.feed(data)
        if end is not None:
            return end
        if collector.bytes_seen > _FLOOD_BYTES:
            await trio.sleep(_FLOOD_PAUSE_SECONDS)


async def keep_empty(tty: trio.lowlevel.FdStream) -> None:
    """Read away what a program says on its tty: a full one would stop it."""
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        while await tty.receive_some(_RECEIVE_BYTES):
            pass
