"""How a persistent interpreter is driven: ``guest/pychild.py`` runs in the sandbox and takes cells in frames."""

from __future__ import annotations

import json
import signal
import struct
from collections.abc import Sequence
from importlib.resources import files

from prorld.sandbox.session import Rung

__all__ = ["PythonDialect"]

CELL_BYTES_MAX = 1 << 20


# The program comes over the socket: it is in no image, and it would be long to look at in a list of processes.
_LOAD = """\
import os
program = b""
while len(program) < {count}:
    program += os.read(9, {count} - len(program))
exec(program)
"""


class PythonDialect:
    """The interpreter that PATH names in the sandbox. It needs nothing but its standard library."""

    typed_once = b""
    typed_each = b""
    ladder: Sequence[Rung] = (Rung(signal.SIGINT, 1.0), Rung(signal.SIGKILL, 1.0))

    def __init__(self) -> None:
        self.sent_once = files("prorld.sandbox.guest").joinpath("pychild.py").read_bytes()
        load = _LOAD.format(count=len(self.sent_once))
        # The shell is here to look PATH up: the sandbox may come from an image that keeps its interpreter anywhere.
        self.argv: Sequence[str] = ("/bin/bash", "--norc", "--noprofile", "-c", 'exec python3 -c "$1"', "python", load)

    def frame(self, nonce: bytes, text: str) -> bytes:
        """A length and a JSON object. Raises ``ValueError`` for a cell that is too long."""
        body = json.dumps({"nonce": nonce.decode(), "code": text}).encode()
        if len(body) > CELL_BYTES_MAX:
            raise ValueError(f"a cell can't be longer than {CELL_BYTES_MAX} bytes")
        return struct.pack(">I", len(body)) + body

    def change_directory(self, path: str) -> str:
        """``os.chdir``, leaving no name behind; a directory that has gone is no error."""
        return f"with __import__('contextlib').suppress(OSError): __import__('os').chdir({path!r})"
