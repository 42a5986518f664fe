"""Graders that can be killed: a plain Python function, named ``package.module:function``, in child processes.

A grader meets hostile answers: endless ones, huge ones, ones that crash the interpreter. Here that ends as
``GraderError`` and never as a reward. A child imports the module once and forks for every grade, so a grade starts
warm, leaves nothing behind for the next, and dies alone. The daemon's process never imports the module. A child has no
network, no privilege and, where the daemon is root, another user; ``prorld.sandbox.isolation`` is what sees to that.
"""

from __future__ import annotations

import os
import secrets
import struct
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Generic, TypeVar

import msgspec
import trio

from prorld.errors import GraderError, boundary
from prorld.handlers import grader_child
from prorld.handlers.grader_child import Answer, Hello, Request
from prorld.kit.cleanup import shielded
from prorld.kit.process_group import KILL_SECONDS_MAX, ProcessGroup, spawn

__all__ = ["Grader", "open_grader", "run_grader"]

LIMIT_S = 10.0
MEMORY_BYTES = 1 << 30
START_S = 60.0
# What the child may take beyond a grade's own limit to kill it and say so.
GRACE_S = 5.0
TERM_S = 2.0
# Whether children ask the kernel for namespaces; without, the filter of system calls alone keeps them off the network.
NAMESPACES = True
_LENGTH = struct.Struct("!I")

ResultT = TypeVar("ResultT")


@asynccontextmanager
async def open_grader(
    function: str,
    result_type: type[ResultT],
    *,
    children: int = 2,
    limit_s: float = LIMIT_S,
    memory_bytes: int = MEMORY_BYTES,
    isolated: bool = True,
) -> AsyncIterator[Grader[ResultT]]:
    """A grader for many grades, at most ``children`` at a time; its processes are gone when the block is left.

    Where the function's module has a function ``warm_up()``, a child calls it once before its first grade. Where the
    kernel refuses what keeps a child off the network, nothing is graded, unless ``isolated`` is false.
    """
    grader = Grader(
        function, result_type, children=children, limit_s=limit_s, memory_bytes=memory_bytes, isolated=isolated
    )
    try:
        yield grader
    finally:
        with shielded((TERM_S + KILL_SECONDS_MAX) * children, f"closing the grader {function}"):
            await grader.aclose()


async def run_grader(
    function: str,
    payload: object,
    result_type: type[ResultT],
    *,
    limit_s: float = LIMIT_S,
    memory_bytes: int = MEMORY_BYTES,
    isolated: bool = True,
) -> ResultT:
    """One grade in a child of its own, the import included; ``open_grader`` saves the import where there are many."""
    async with open_grader(
        function, result_type, children=1, limit_s=limit_s, memory_bytes=memory_bytes, isolated=isolated
    ) as grader:
        return await grader.grade(payload)


class Grader(Generic[ResultT]):
    """A few warm children for one function. Made by ``open_grader``."""

    def __init__(
        self,
        function: str,
        result_type: type[ResultT],
        *,
        children: int,
        limit_s: float,
        memory_bytes: int,
        isolated: bool = True,
    ) -> None:
        assert children >= 1, children
        self._function = function
        self._result_type = result_type
        self._limit_s = limit_s
        self._memory_bytes = memory_bytes
        self._isolated = isolated
        self._slots = trio.CapacityLimiter(children)
        self._idle: list[_Child] = []

    def __repr__(self) -> str:
        return f"<Grader {self._function}: {self._slots.borrowed_tokens} busy, {len(self._idle)} idle>"

    async def warm(self) -> None:
        """Have one child ready, so that the first grade need not wait for the import."""
        async with self._slots:
            if not self._idle:
                self._idle.append(await _Child.start(self._function, isolated=self._isolated))

    async def grade(self, payload: object, *, limit_s: float | None = None) -> ResultT:
        """Run the function on ``payload`` (as JSON, decoded into the type of its parameter). Raises ``GraderError``.

        The limit is the function's own time: neither the wait for a child nor an import counts.
        """
        request = Request(
            nonce=secrets.token_hex(16),
            limit_s=self._limit_s if limit_s is None else limit_s,
            memory_bytes=self._memory_bytes,
            payload=msgspec.Raw(self._encode(payload)),
        )
        async with self._slots:
            answer = await self._ask(request)
        if answer.what != "value":
            raise _error(self._function, answer, request)
        try:
            return msgspec.json.decode(answer.value, type=self._result_type)
        except msgspec.DecodeError as exc:
            message = f"{self._function} returned something else than a {self._result_type.__name__}"
            raise GraderError(message, code="grader_bad_output") from exc

    async def aclose(self) -> None:
        """End all idle children."""
        while self._idle:
            await self._idle.pop().aclose()

    def _encode(self, payload: object) -> bytes:
        try:
            encoded = msgspec.json.encode(payload)
        except (TypeError, ValueError) as exc:
            raise GraderError(f"the payload for {self._function} is not JSON", code="grader_bad_payload") from exc
        if len(encoded) > grader_child.FRAME_BYTES // 2:
            message = f"the payload for {self._function} is {len(encoded)} bytes long"
            raise GraderError(message, code="grader_bad_payload")
        return encoded

    async def _ask(self, request: Request) -> Answer:
        # A child that was killed while it was idle says nothing about the grade: ask a fresh one, once.
        if self._idle:
            with suppress(_ChildLostError):
                return await self._ask_one(self._idle.pop(), request)
        try:
            return await self._ask_one(await _Child.start(self._function, isolated=self._isolated), request)
        except _ChildLostError as exc:
            raise GraderError(f"the process of {self._function} was lost", code="grader_lost", retryable=True) from exc

    async def _ask_one(self, child: _Child, request: Request) -> Answer:
        sound = False
        try:
            with trio.move_on_after(request.limit_s + GRACE_S):
                answer = await child.ask(request)
                sound = True
                return answer
        finally:
            if sound:
                self._idle.append(child)
            else:
                await child.aclose()
        raise _ChildLostError


class _ChildLostError(Exception):
    """The child's process is gone, or does not answer any more."""


class _Child:
    """One child process and the pipes to it."""

    def __init__(self, group: ProcessGroup) -> None:
        assert group.stdin is not None
        assert group.stdout is not None
        self._group = group
        self._requests = group.stdin
        self._answers = group.stdout

    @classmethod
    async def start(cls, function: str, *, isolated: bool) -> _Child:
        """A child that has imported the function."""
        with boundary(GraderError, f"starting a process for {function}", code="grader_not_started"):
            child = cls(
                await spawn(
                    [sys.executable, "-I", grader_child.__file__],
                    env=_environment(os.environ),
                    cwd="/",
                    stdin="pipe",
                    stdout="pipe",
                    stderr="null",
                )
            )
        ready: Answer | None = None
        try:
            with trio.move_on_after(START_S):
                hello = Hello(function=function, path=_import_path(), isolated=isolated, namespaces=NAMESPACES)
                await child._send(msgspec.json.encode(hello))
                ready = await child._receive()
        except _ChildLostError as exc:
            message = f"the process of {function} did not start"
            raise GraderError(message, code="grader_not_started", retryable=True) from exc
        finally:
            if ready is None or ready.what != "ready":
                await child.aclose()
        if ready is None:
            raise GraderError(f"{function} was not imported within {START_S:g} s", code="grader_not_started")
        if ready.what == "bare":
            message = f"{function} can't be kept off the network on this machine: {ready.words}"
            raise GraderError(message, code="grader_not_isolated")
        if ready.what != "ready":
            raise GraderError(f"{function} can't be imported: {ready.words}", code="grader_not_started")
        return child

    async def ask(self, request: Request) -> Answer:
        """One grade."""
        await self._send(msgspec.json.encode(request))
        answer = await self._receive()
        if answer.nonce != request.nonce:
            raise _ChildLostError
        return answer

    async def aclose(self) -> None:
        """End it, and the grade that it may be at."""
        with shielded(TERM_S + KILL_SECONDS_MAX, f"ending {self._group.name}"):
            await self._group.end(TERM_S)
            # A grade has a group of its own and dies with this child, a moment after it.
            await self._group.session_emptied()

    async def _send(self, body: bytes) -> None:
        try:
            await self._requests.send_all(_LENGTH.pack(len(body)) + body)
        except trio.BrokenResourceError as exc:
            raise _ChildLostError from exc

    async def _receive(self) -> Answer:
        try:
            (length,) = _LENGTH.unpack(await self._exactly(_LENGTH.size))
            if length > grader_child.FRAME_BYTES:
                raise _ChildLostError
            return msgspec.json.decode(await self._exactly(length), type=Answer)
        except (trio.BrokenResourceError, msgspec.DecodeError) as exc:
            raise _ChildLostError from exc

    async def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            piece = await self._answers.receive_some(size - len(parts))
            if not piece:
                raise _ChildLostError
            parts += piece
        return bytes(parts)


def _import_path() -> list[str]:
    # The child stands in another directory; an empty entry is the current one.
    return [os.path.abspath(entry) for entry in sys.path]  # noqa: PTH100  (resolve() would follow links)


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    # An interpreter outside the usual places needs its library path; nothing else of ours gets in.
    kept = {name: ours[name] for name in ("LD_LIBRARY_PATH", "PATH") if name in ours}
    return {"LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", **kept}


def _error(function: str, answer: Answer, request: Request) -> GraderError:
    details = {"log": answer.log} if answer.log else None
    match answer.what:
        case "timeout":
            message = f"{function} was killed after {request.limit_s:g} s"
            return GraderError(message, code="grader_timeout", details=details)
        case "died":
            return GraderError(f"{function} ended with {answer.words}", code="grader_crashed", details=details)
        case "unreadable":
            return GraderError(f"{function} gave no result: {answer.words}", code="grader_bad_output", details=details)
        case _:
            return GraderError(f"{function} raised {answer.words}", details=details)
