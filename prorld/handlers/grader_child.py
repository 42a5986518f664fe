"""The child's side of a grader: cuts itself off, imports one function, then forks once for each grade.

Started by its path in a fresh interpreter, so that nothing of prorld but its walls and no trio is loaded into it; it
never starts a thread. Its parent is on the other end of two pipes; their end of file makes it kill what it does and
leave. What a grader prints goes into a pipe of which the tail is kept; only the frame with the request's nonce is an
answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import math
import os
import resource
import select
import signal
import struct
import sys
import time
import traceback
import typing
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

import msgspec

if TYPE_CHECKING:
    from prorld.sandbox.isolation import Walls

FRAME_BYTES = 8 << 20
REPLY_BYTES = 1 << 20
LOG_BYTES = 2048
OPEN_FILES_MAX = 256
_LENGTH = struct.Struct("!I")
_PR_SET_PDEATHSIG = 1


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """First frame to the child: where to import from, which function, and what has to be around it.

    Without ``namespaces`` the filter of system calls stands alone, as on a kernel that has none to give.
    """

    function: str
    path: list[str]
    isolated: bool = True
    namespaces: bool = True


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One grade."""

    nonce: str
    limit_s: float
    memory_bytes: int
    payload: msgspec.Raw


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a grade; ``words`` and ``log`` are for people."""

    nonce: str
    what: Literal["ready", "bare", "value", "raised", "timeout", "died", "unreadable"]
    value: msgspec.Raw = msgspec.Raw(b"null")
    words: str = ""
    log: str = ""


class Room(NamedTuple):
    """What one grade is run in: the function, what stands around it, and its parent's descriptors, which it closes."""

    function: Callable[[Any], Any]
    takes: Any
    walls: Walls | None
    processes_max: int | None
    requests: int
    answers: int


def main() -> None:
    """Serve grades: requests on what is standard input at the start, answers on what is standard output."""
    signal.signal(signal.SIGTERM, _leave)
    requests, answers = _private_pipes()
    hello = msgspec.json.decode(_receive(requests), type=Hello)
    sys.path[:] = hello.path
    sys.dont_write_bytecode = True
    walls, most = None, None
    try:
        if hello.isolated:
            walls = _cut_off(hello.path, namespaces=hello.namespaces)
    except (OSError, ImportError) as exc:
        _send(answers, Answer(nonce="", what="bare", words=_one_line(exc)))
        return
    try:
        function, takes = _load(hello.function)
    except (Exception, SystemExit, KeyboardInterrupt) as exc:  # noqa: BLE001  (reported to the parent)
        _send(answers, Answer(nonce="", what="raised", words=_one_line(exc)))
        return
    try:
        if walls is not None:
            most = walls.step_down()
    except OSError as exc:
        _send(answers, Answer(nonce="", what="bare", words=_one_line(exc)))
        return
    _send(answers, Answer(nonce="", what="ready"))
    room = Room(function, takes, walls, most, requests, answers)
    while True:
        request = msgspec.json.decode(_receive(requests), type=Request)
        _send(answers, _grade_in_fork(room, request))


def _cut_off(path: Sequence[str], *, namespaces: bool) -> Walls:
    from prorld.sandbox.isolation import enter  # noqa: PLC0415  (where it lies was in the first frame)

    return enter([*path, sys.prefix, sys.base_prefix], namespaces=namespaces)


def _leave(_signal: int, _frame: object) -> NoReturn:
    raise SystemExit(0)


def _private_pipes() -> tuple[int, int]:
    requests, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.closerange(max(requests, answers, 2) + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return requests, answers


def _load(name: str) -> tuple[Callable[[Any], Any], Any]:
    module_name, _, attribute = name.partition(":")
    module = importlib.import_module(module_name)
    function = getattr(module, attribute)
    # What a library builds on first use is built here once, and not again in every fork.
    if (warm_up := getattr(module, "warm_up", None)) is not None:
        warm_up()
    hints = typing.get_type_hints(function)
    hints.pop("return", None)
    return function, next(iter(hints.values()), Any)


def _grade_in_fork(room: Room, request: Request) -> Answer:
    answer_r, answer_w = os.pipe()
    log_r, log_w = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        for not_its_own in (room.requests, room.answers, answer_r, log_r):
            os.close(not_its_own)
        _be_the_grade(room, request, parent, answer_w, log_w)
    os.close(answer_w)
    os.close(log_w)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    log = bytearray()
    try:
        body, in_time = _collect(room.requests, answer_r, log_r, log, request.limit_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        # Nothing of a grade outlives it. Where that can't be had this process ends, and another one serves the next.
        if room.walls is not None and not room.walls.sweep():
            raise SystemExit(1)
        _drain(log_r, log)
        os.close(answer_r)
        os.close(log_r)
    words = log.decode("utf-8", "replace")
    if not in_time:
        return Answer(nonce=request.nonce, what="timeout", log=words)
    return _judge(body, request.nonce, status, words)


def _judge(body: bytes, nonce: str, status: int, log: str) -> Answer:
    if not body:
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"
        return Answer(nonce=nonce, what="died", words=how, log=log)
    try:
        answer = msgspec.json.decode(body, type=Answer)
    except msgspec.DecodeError as exc:
        return Answer(nonce=nonce, what="unreadable", words=str(exc), log=log)
    if answer.nonce != nonce:
        return Answer(nonce=nonce, what="unreadable", words="an answer without this request's nonce", log=log)
    return msgspec.structs.replace(answer, log=log)


def _collect(requests: int, answer_r: int, log_r: int, log: bytearray, limit_s: float) -> tuple[bytes, bool]:
    """The answer's bytes (none where the child died), and whether they came in time."""
    deadline = time.monotonic() + limit_s
    poll = select.poll()
    poll.register(requests, 0)
    poll.register(answer_r, select.POLLIN)
    poll.register(log_r, select.POLLIN)
    body = bytearray()
    while (left := deadline - time.monotonic()) > 0:
        for fd, _ in poll.poll(math.ceil(left * 1000)):
            if fd == requests:
                raise SystemExit(0)
            piece = os.read(fd, 65536)
            if fd == answer_r:
                body += piece
                if not piece or len(body) >= _LENGTH.size + REPLY_BYTES:
                    return b"", True
                if len(body) >= _LENGTH.size and len(body) >= _LENGTH.size + _LENGTH.unpack_from(body)[0]:
                    return bytes(body[_LENGTH.size :]), True
            elif piece:
                _keep(log, piece)
            else:
                poll.unregister(log_r)
    return b"", False


def _keep(log: bytearray, piece: bytes) -> None:
    log += piece
    del log[:-LOG_BYTES]


def _drain(log_r: int, log: bytearray) -> None:
    # The answer can be there before the last words are read; a pipe holds no more than this.
    os.set_blocking(log_r, False)
    with contextlib.suppress(BlockingIOError):
        for _ in range(4):
            _keep(log, os.read(log_r, 65536))


def _be_the_grade(room: Room, request: Request, parent: int, answer_w: int, log_w: int) -> NoReturn:
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setpgid(0, 0)
        # The signal follows the parent's thread, and this parent has one only.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        os.dup2(log_w, 1)
        os.dup2(log_w, 2)
        os.close(log_w)
        _limit(request, room.processes_max)
        answer = _answer(room.function, room.takes, request)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        _send(answer_w, answer)
    finally:
        os._exit(0)


def _answer(function: Callable[[Any], Any], takes: Any, request: Request) -> Answer:
    try:
        value = msgspec.json.encode(function(msgspec.json.decode(request.payload, type=takes)))
    except MemoryError:
        return Answer(nonce=request.nonce, what="raised", words="it ran out of memory")
    except (Exception, SystemExit, KeyboardInterrupt) as exc:  # noqa: BLE001  (reported to the parent)
        with contextlib.suppress(OSError, ValueError):
            traceback.print_exc(limit=-4)
        return Answer(nonce=request.nonce, what="raised", words=_one_line(exc))
    if len(value) > REPLY_BYTES // 2:
        return Answer(nonce=request.nonce, what="unreadable", words=f"the result is {len(value)} bytes long")
    return Answer(nonce=request.nonce, what="value", value=msgspec.Raw(value))


def _limit(request: Request, processes_max: int | None) -> None:
    limits = {
        resource.RLIMIT_CPU: math.ceil(request.limit_s) + 1,
        resource.RLIMIT_AS: request.memory_bytes,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: OPEN_FILES_MAX,
    }
    if processes_max is not None:
        limits[resource.RLIMIT_NPROC] = processes_max
    for which, most in limits.items():
        _, hard = resource.getrlimit(which)
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (bound, bound))


def _one_line(exc: BaseException) -> str:
    return " ".join("".join(traceback.format_exception_only(exc)).split())[:LOG_BYTES]


def _receive(requests: int) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(requests, _LENGTH.size))
    return _exactly(requests, length)


def _exactly(requests: int, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        piece = os.read(requests, min(65536, size - len(parts)))
        if not piece:
            raise SystemExit(0)
        parts += piece
    return bytes(parts)


def _send(fd: int, answer: Answer) -> None:
    body = msgspec.json.encode(answer)
    view = memoryview(_LENGTH.pack(len(body)) + body)
    while view:
        view = view[os.write(fd, view) :]


if __name__ == "__main__":
    main()
