"""How a persistent interpreter is driven: a program of ``guest`` runs in the sandbox and takes cells in frames.

Which one is the spec's ``kernel``: ``pychild.py`` by itself, with IPython, or with a Jupyter kernel. It comes over
the control socket, and is hostile as soon as a cell has run.
"""

from __future__ import annotations

import signal
import struct
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

from prorld.errors import SandboxError
from prorld.sandbox.contract import SandboxSpec
from prorld.sandbox.session import BOOT_SECONDS, Rung

__all__ = ["JupyterDialect", "PythonDialect", "dialect_of"]

CELL_BYTES_MAX = 1 << 20
JUPYTER_BOOT_SECONDS = 60.0  # some kernels compile themselves first

# What a guest answers where there is nothing to run cells with, and where that is there and does not start.
_NO_KERNEL, _NOT_STARTED = 127, 126
_WHY_CHARS = 500

# The program comes over the socket: it is in no image, and it would be long to look at in a list of processes.
_LOAD = """\
import os
program = b""
while len(program) < {count}:
    program += os.read(9, {count} - len(program))
exec(program)
"""
_KINDS = {"auto": "IPythonCells, Plain", "ipython": "IPythonCells", "plain": "Plain"}


class _Directory(str):
    """A directory to go to, where a cell is expected: it is told apart by its type, since any text can be a cell."""

    __slots__ = ()


class _GuestDialect:
    """A guest program, run by the interpreter that PATH names in the sandbox."""

    typed_once = b""
    typed_each = b""
    ladder: Sequence[Rung] = (Rung(signal.SIGINT, 1.0), Rung(signal.SIGKILL, 1.0))
    boot_seconds = BOOT_SECONDS
    kernel = "plain"

    def __init__(self, *names: str, last: str) -> None:
        self.sent_once = b"\n".join([*map(_guest, names), last.encode()])
        load = _LOAD.format(count=len(self.sent_once))
        # The shell is here to look PATH up: the sandbox may come from an image that keeps its interpreter anywhere.
        self.argv: Sequence[str] = ("/bin/bash", "--norc", "--noprofile", "-c", 'exec python3 -c "$1"', "python", load)

    def frame(self, nonce: bytes, text: str) -> bytes:
        """A length, a line that says what comes, and the text. Raises ``ValueError`` for a cell that is too long."""
        kind = b"directory" if isinstance(text, _Directory) else b"code"
        body = b"%b %b\n%b" % (nonce, kind, text.encode("utf-8", "surrogatepass"))
        if len(body) > CELL_BYTES_MAX:
            raise ValueError(f"a cell can't be longer than {CELL_BYTES_MAX} bytes")
        return struct.pack(">I", len(body)) + body

    def change_directory(self, path: str) -> str:
        """No cell, so that it counts as none; a directory that has gone is no error."""
        return _Directory(path)

    def check_start(self, exit_code: int, said: bytes) -> None:
        """Raises ``SandboxError`` where the sandbox lacks what the spec asks for."""
        why = said.decode("utf-8", "replace").strip()[-_WHY_CHARS:]
        if exit_code == _NO_KERNEL:
            raise SandboxError(f"no {self.kernel} kernel in the sandbox: {why}", code="kernel_missing", retryable=False)
        if exit_code == _NOT_STARTED:
            raise SandboxError(f"the {self.kernel} kernel did not start: {why}")


@cache
def _guest(name: str) -> bytes:
    return files("prorld.sandbox.guest").joinpath(name).read_bytes()


class PythonDialect(_GuestDialect):
    """An interpreter with IPython, without it, or with it where it is there. The plain one needs nothing else."""

    def __init__(self, kernel: str = "auto") -> None:
        self.kernel = kernel
        names = ["pychild.py"] if kernel == "plain" else ["pychild.py", "ipython_cells.py"]
        super().__init__(*names, last=f"main({_KINDS[kernel]})\n")


class JupyterDialect(_GuestDialect):
    """Any kernel of Jupyter that the sandbox has, driven by ``jupyter_cells.py``. Needs jupyter_client in there."""

    boot_seconds = JUPYTER_BOOT_SECONDS
    ladder: Sequence[Rung] = (Rung(signal.SIGINT, 2.0), Rung(signal.SIGKILL, 1.0))

    def __init__(self, name: str) -> None:
        self.kernel = f"Jupyter {name!r}"
        super().__init__("pychild.py", "jupyter_cells.py", last=f"main(lambda: JupyterCells({name!r}))\n")


def dialect_of(spec: SandboxSpec) -> _GuestDialect:
    """What runs Python cells in a sandbox, as its spec says."""
    return JupyterDialect(spec.jupyter_kernel) if spec.kernel == "jupyter" else _python(spec.kernel)


@cache
def _python(kernel: str) -> PythonDialect:
    """Nothing in it changes, and there are few kinds."""
    return PythonDialect(kernel)
