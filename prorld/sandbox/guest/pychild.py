"""A persistent interpreter, driven over the socket on descriptor 9. Runs alone inside a sandbox.

What runs a cell is the first of several kinds that this sandbox has; ``main`` is called with them by a last line that
the daemon appends. Where it has none, every request is answered with the exit code 127 and the reason.

A request is a length (4 bytes, big-endian), a line with a nonce and ``code`` or ``directory``, and what it names.
Standard output and standard error are the same socket, so whatever writes there, child processes and C code included,
keeps its order with the marks around it: NUL nonce "<" NUL before, NUL nonce " " exit code " " directory NUL after.

Nothing is imported here that the smallest interpreter of a distribution lacks.
"""

from __future__ import annotations

import ast
import linecache
import os
import signal
import socket
import sys
import traceback
import types
from collections.abc import Callable, Iterable
from typing import Any

CONTROL = 9
FRAME_BYTES_MAX = 1 << 21
CELLS_KEPT = 256
NO_KERNEL = 127


class Interrupts:
    """Lets SIGINT reach a cell, and nothing but a cell."""

    def __init__(self) -> None:
        self.wanted = False

    def __call__(self, number: int, frame: object) -> None:
        if self.wanted:
            self.wanted = False
            raise KeyboardInterrupt


class Plain:
    """Runs cells in one namespace; the value of a last expression is shown."""

    def __init__(self) -> None:
        main = types.ModuleType("__main__")
        main.__dict__["__builtins__"] = __builtins__
        sys.modules["__main__"] = main
        self.names = main.__dict__
        self.cells: list[str] = []

    def run(self, code: str) -> int:
        if not code:
            return 0  # asked of us, and no cell of anybody's: the next one has the number that it would have had
        name = "<cell {}>".format(len(self.cells) + 1)
        self.cells.append(name)
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        if len(self.cells) > CELLS_KEPT:
            linecache.cache.pop(self.cells[-CELLS_KEPT - 1], None)
        tree = ast.parse(code, name)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        exec(compile(tree, name, "exec", dont_inherit=True), self.names)
        if isinstance(last, ast.Expr):
            value = compile(ast.Expression(last.value), name, "eval", dont_inherit=True)
            sys.displayhook(eval(value, self.names))
        return 0


class Missing:
    """Stands where a sandbox has nothing that runs cells."""

    def __init__(self, why: str) -> None:
        self.why = why

    def run(self, code: str) -> int:
        print(self.why)
        return NO_KERNEL


def choose(kinds: Iterable[Callable[[], Any]]) -> Any:
    """The first kind that can be made here."""
    why = "nothing to run cells with"
    for kind in kinds:
        try:
            return kind()
        except Exception as exc:
            why = "{}: {}".format(type(exc).__name__, exc)
    return Missing(why)


def run_cell(runner: Any, interrupts: Interrupts, code: str) -> int:
    """Run a cell and say how it ended, as a process would."""
    try:
        interrupts.wanted = True
        exit_code = int(runner.run(code))
        interrupts.wanted = False
        return exit_code
    except SystemExit as exc:
        interrupts.wanted = False
        if exc.code is None or isinstance(exc.code, int):
            return (exc.code or 0) & 255
        print(exc.code, file=sys.stderr)
        return 1
    except BaseException as exc:
        interrupts.wanted = False
        show(exc)
        return 130 if isinstance(exc, KeyboardInterrupt) else 1


def show(exc: BaseException) -> None:
    """The traceback, without the frames of this file."""
    try:
        trace = exc.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == "<string>":
            trace = trace.tb_next
        traceback.print_exception(type(exc), exc, trace)
    except BaseException:
        print("{}: its traceback can't be shown".format(type(exc).__name__), file=sys.__stderr__)


def receive(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            os._exit(0)
        data += piece
    return bytes(data)


def flush() -> None:
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            stream.flush()  # type: ignore[union-attr]  # whatever the cell has put there
        except BaseException:
            continue


def directory() -> bytes:
    try:
        return os.fsencode(os.getcwd())
    except OSError:
        return b""


def go_to(path: str) -> None:
    try:
        os.chdir(path)
    except (OSError, ValueError):
        pass  # a directory that has gone is no error: the program stays where it is, and says so


def take_over() -> socket.socket:
    """Move the socket to a descriptor that no child inherits, and make it standard output and error."""
    sock = socket.socket(fileno=os.dup(CONTROL))
    os.set_inheritable(sock.fileno(), False)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(CONTROL, 1)
    os.dup2(CONTROL, 2)
    os.close(CONTROL)
    return sock


def open_streams(*, fresh: bool) -> None:
    """Make the standard streams, or give back those that a cell has closed: ``exit()`` closes the standard input."""
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if fresh or getattr(getattr(sys, name), "closed", False):
            errors = "backslashreplace" if mode == "w" else "replace"
            stream = open(number, mode, buffering=1, encoding="utf-8", errors=errors, closefd=False)
            setattr(sys, name, stream)
            setattr(sys, "__{}__".format(name), stream)


def main(*kinds: Callable[[], Any]) -> None:
    sock = take_over()
    open_streams(fresh=True)
    interrupts = Interrupts()
    sys.argv = [""]
    runner = choose(kinds)
    own = os.getpid()
    while True:
        signal.signal(signal.SIGINT, interrupts)
        length = int.from_bytes(receive(sock, 4), "big")
        if length > FRAME_BYTES_MAX:
            os._exit(1)
        line, _, text = receive(sock, length).partition(b"\n")
        nonce, _, kind = line.partition(b" ")
        wanted = text.decode("utf-8", "surrogatepass")
        sock.sendall(b"\0" + nonce + b"<\0")
        open_streams(fresh=False)
        if kind == b"directory":
            go_to(wanted)
        code = run_cell(runner, interrupts, wanted if kind == b"code" else "")
        if os.getpid() != own:
            flush()
            os._exit(code)
        flush()
        sock.sendall(b"\0" + nonce + b" %d " % code + directory() + b"\0")
