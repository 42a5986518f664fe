"""Files in and out of a sandbox: one short-lived process inside for each, its content over the control socket.

The process is the image's own bash with ``head`` or ``cat``, so it sees what a program in there sees and an image needs
no Python. What it says is untrusted and bounded.
"""

from __future__ import annotations

import os
import posixpath
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing, suppress

import trio

from prorld.sandbox.link import Child

__all__ = ["Files"]

FILE_SECONDS = 30.0
FILES_AT_ONCE = 2
COMPLAINT_BYTES_MAX = 1 << 12

_RECEIVE_BYTES = 1 << 16
_MISSING, _FORBIDDEN, _DIRECTORY, _SPECIAL = 2, 13, 21, 22

_READ = (
    "[[ -d $1 ]] && exit 21; [[ -e $1 ]] || exit 2; [[ -f $1 ]] || exit 22; [[ -r $1 ]] || exit 13; "
    'exec head -c "$2" -- "$1" >&9'
)
_WRITE = (
    'exec 2>&9; [[ -d $1 ]] && exit 21; directory=${1%/*}; [[ -d ${directory:-/} ]] || mkdir -p -- "$directory" || '
    'exit 1; [[ -e $1 && ! -f $1 ]] && exit 22; cat <&9 >"$1"'
)


class Files:
    """Reads and writes in one sandbox. ``spawn`` starts a process in it."""

    def __init__(self, spawn: Callable[[Sequence[str]], Awaitable[Child]], workdir: str) -> None:
        self._spawn = spawn
        self._workdir = workdir
        self._at_once = trio.CapacityLimiter(FILES_AT_ONCE)

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        """A regular file's content. Raises as ``Sandbox.read_file`` says."""
        place = self._place(path)
        code, content = await self._call(_READ, path, [place, str(max_bytes + 1)], b"", max_bytes + 1)
        if code == 0 and len(content) > max_bytes:
            raise ValueError(f"{path}: larger than {max_bytes} bytes")
        _check(code, path, b"")
        return content

    async def write(self, path: str, data: bytes) -> None:
        """Put a file in place, with its directories. Raises ``OSError`` where the sandbox refuses."""
        code, complaint = await self._call(_WRITE, path, [self._place(path)], data, COMPLAINT_BYTES_MAX)
        _check(code, path, complaint)

    def _place(self, path: str) -> str:
        if "\0" in path or not path:
            raise FileNotFoundError(f"no such file: {path!r}")
        with suppress(UnicodeEncodeError):
            os.fsencode(path)
            return posixpath.join(self._workdir, path)
        raise FileNotFoundError(f"no such file: {path!r}")

    async def _call(
        self, script: str, path: str, arguments: list[str], data: bytes, answer_bytes: int
    ) -> tuple[int, bytes]:
        argv = ["/bin/bash", "--norc", "--noprofile", "-c", script, "files", *arguments]
        async with self._at_once:
            with trio.move_on_after(FILE_SECONDS):
                with closing(await self._spawn(argv)) as child:
                    with suppress(OSError):  # it refused before it read everything; its exit code says why
                        await _send(child.control, data)
                    answer = await _receive(child.control, answer_bytes)
                    return await child.wait(), answer
        # What runs in there can hold up its own files: with a lease, or with a pipe put into their place.
        raise TimeoutError(f"{path}: not let go of in {FILE_SECONDS:.0f} s")


async def _send(sock: trio.socket.SocketType, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[await sock.send(view) :]
    sock.shutdown(socket.SHUT_WR)


async def _receive(sock: trio.socket.SocketType, bytes_max: int) -> bytes:
    """Everything until the end, of which ``bytes_max`` bytes are kept."""
    kept = bytearray()
    with suppress(ConnectionResetError):
        while piece := await sock.recv(_RECEIVE_BYTES):
            kept += piece[: bytes_max - len(kept)]
    return bytes(kept)


def _check(code: int, path: str, complaint: bytes) -> None:
    if code == 0:
        return
    if code == _DIRECTORY:
        raise IsADirectoryError(f"a directory: {path}")
    if code == _MISSING:
        raise FileNotFoundError(f"no such file: {path}")
    if code == _FORBIDDEN:
        raise PermissionError(f"not readable: {path}")
    if code == _SPECIAL:
        raise ValueError(f"not a regular file: {path}")
    raise OSError(complaint.decode("utf-8", "replace").strip() or f"{path}: the sandbox refused ({code})")
