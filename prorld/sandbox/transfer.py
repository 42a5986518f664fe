"""Files and trees between this host and a sandbox, of any size, a piece at a time.

What comes out of a sandbox is hostile: it lands beside its target in a directory of this process's own, is bounded in
bytes, names and time, and takes its place by a rename when all of it has come. Content goes to and from this host's
disk in a thread. Inside, a short-lived bash of the image does the work with its ``tar``, or without one, more slowly.
"""

from __future__ import annotations

import os
import posixpath
import re
import secrets
import socket
import stat
import tempfile
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from functools import cache, partial
from importlib.resources import files
from pathlib import Path

import trio

from prorld.errors import SandboxError
from prorld.kit.cleanup import afterwards
from prorld.kit.lanes import Lane
from prorld.sandbox.leftovers import remove_tree
from prorld.sandbox.link import Child
from prorld.sandbox.tar_pack import pack_file, pack_tree
from prorld.sandbox.tar_unpack import Unpacker

__all__ = ["Transfers"]

TRANSFER_SECONDS = 900.0
STALL_SECONDS = 30.0  # without a byte
CLEAN_SECONDS = 60.0
LEAVE_SECONDS = 2.0
COMPLAINT_BYTES_MAX = 1 << 12
_THREADS = 2  # so many transfers of one sandbox at once
_RECEIVE_BYTES = 1 << 18
_OPENING_BYTES_MAX = 16

_START = b"!"
_OPENING = re.compile(rb"F([0-7]{1,4})")
_REFUSALS: dict[int, tuple[type[Exception], str]] = {
    2: (FileNotFoundError, "no such file"),
    13: (PermissionError, "not readable"),
    17: (FileExistsError, "a directory that is not empty"),
    20: (NotADirectoryError, "not a directory"),
    21: (IsADirectoryError, "a directory"),
    22: (ValueError, "neither a file nor a directory"),
}


@cache
def _script() -> str:
    return files("prorld.sandbox.guest").joinpath("transfer.bash").read_text("utf-8")


class Transfers:
    """Uploads and downloads of one sandbox. ``spawn`` starts a process in it."""

    def __init__(self, spawn: Callable[[Sequence[str]], Awaitable[Child]], workdir: str) -> None:
        self._spawn = spawn
        self._workdir = workdir
        self._lane = Lane("sandbox transfers", _THREADS)
        self._at_once = trio.CapacityLimiter(_THREADS)
        self._script = _script()

    async def upload(self, source: Path, path: str) -> None:
        """Put a file or a directory of this host in place. Raises as ``Sandbox.upload`` says."""
        place, mark = self._place(path), f".upload-{secrets.token_hex(8)}"
        argv, pieces = await self._lane.run(_look, source, place, mark)

        async def move(child: Child) -> None:
            complaint = bytearray()
            failure: Exception | None = None
            leaving = afterwards(LEAVE_SECONDS, f"ending an upload to {path}", partial(_leave, child))
            async with leaving:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_listen, child, complaint)
                    try:
                        await self._send(child, pieces)
                    except (BrokenPipeError, ConnectionResetError):
                        pass  # it refused; its exit code says why
                    except (OSError, ValueError, trio.TooSlowError) as exc:  # raised below: no group comes out
                        failure = exc
                        nursery.cancel_scope.cancel("what is to be sent can't be had")
                    child.control.shutdown(socket.SHUT_WR)
                if failure is not None:
                    raise failure
                _check(await child.wait(), path, bytes(complaint))

        with closing(pieces):
            await self._run(argv, move)

    async def download(self, path: str, target: Path, *, max_bytes: int) -> None:
        """Take a file or a directory out. Raises as ``Sandbox.download`` says."""
        place = self._place(path)
        landing = _Landing(target, max_bytes)

        async def move(child: Child) -> None:
            await self._lane.run(landing.prepare)
            while True:
                with trio.fail_after(STALL_SECONDS):
                    piece = await child.control.recv(_RECEIVE_BYTES)
                if not piece:
                    break
                await self._lane.run(landing.feed, piece)
            _check(await child.wait(), path, b"")
            await self._lane.run(landing.finish)

        async with afterwards(CLEAN_SECONDS, f"removing what came of {path}", partial(self._lane.run, landing.clear)):
            await self._run(["download", place, str(max_bytes + 1)], move)

    def _place(self, path: str) -> str:
        if "\0" in path or not path:
            raise FileNotFoundError(f"no such file: {path!r}")
        with suppress(UnicodeEncodeError):
            os.fsencode(path)
            return posixpath.normpath(posixpath.join(self._workdir, path))
        raise FileNotFoundError(f"no such file: {path!r}")

    async def _run(self, argv: Sequence[str], move: Callable[[Child], Awaitable[None]]) -> None:
        """The process inside, for as long as a transfer may take."""
        program = ["/bin/bash", "--norc", "--noprofile", "-c", f'{self._script}\n"$@"', "transfer", *argv]
        async with self._at_once:
            with suppress(trio.TooSlowError), trio.fail_after(TRANSFER_SECONDS):
                with closing(await self._spawn(program)) as child:
                    await move(child)
                return
        raise SandboxError("a file transfer stood still, or did not come to an end")

    async def _send(self, child: Child, pieces: Iterator[bytes]) -> None:
        piece: bytes | None = _START
        while piece is not None:
            view = memoryview(piece)
            while view:
                with trio.fail_after(STALL_SECONDS):
                    view = view[await child.control.send(view) :]
            piece = await self._lane.run(next, pieces, None)


class _Landing:
    """Where a download comes to, until all of it is there. Its methods block, and are called one at a time."""

    def __init__(self, target: Path, max_bytes: int) -> None:
        self._target = target
        self._left = self._max_bytes = max_bytes
        self._place: Path | None = None
        self._opening = b""
        self._file: int | None = None
        self._mode = 0
        self._tree: Unpacker | None = None

    def prepare(self) -> None:
        """A directory of its own beside the target. Raises ``FileExistsError`` where the target can't be taken."""
        if self._target.is_dir() and any(self._target.iterdir()):
            raise FileExistsError(f"a directory that is not empty: {self._target}")
        self._target.parent.mkdir(parents=True, exist_ok=True)
        self._place = Path(tempfile.mkdtemp(prefix=".download-", dir=self._target.parent))

    def feed(self, data: bytes) -> None:
        """Take what arrived. Raises ``ValueError`` for what is refused."""
        if self._tree is None and self._file is None:
            data = self._open(self._opening + data)
        if self._tree is not None:
            self._tree.feed(data)
        elif self._file is not None:
            self._left -= len(data)
            if self._left < 0:
                raise ValueError(f"{self._target.name}: larger than {self._max_bytes} bytes")
            while data:
                data = data[os.write(self._file, data) :]

    def finish(self) -> None:
        """Put it in its place."""
        assert self._place is not None
        if self._tree is not None:
            self._tree.finish()
            (self._place / "tree").rename(self._target)
        elif self._file is not None:
            os.fchmod(self._file, self._mode & 0o777 | 0o600)
            (self._place / "file").replace(self._target)
        else:
            raise OSError("the sandbox sent nothing")

    def clear(self) -> None:
        """Remove whatever has not been put in its place."""
        if self._tree is not None:
            self._tree.close()
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if self._place is not None:
            remove_tree(self._place)
            self._place = None

    def _open(self, data: bytes) -> bytes:
        """See what it is that comes; returns what is left of the data."""
        assert self._place is not None
        if data.startswith(b"D"):
            (self._place / "tree").mkdir(mode=0o700)
            self._tree = Unpacker(self._place / "tree", max_bytes=self._left)
            return data[1:]
        said, end, rest = data.partition(b"\n")
        if end and (mode := _OPENING.fullmatch(said)):
            self._mode = int(mode[1], 8)
            self._file = os.open(self._place / "file", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            return rest
        if end or len(data) > _OPENING_BYTES_MAX:
            raise ValueError("the sandbox sent what is neither a file nor a directory")
        self._opening = data
        return b""


def _look(source: Path, place: str, mark: str) -> tuple[list[str], Generator[bytes]]:
    """What has to run inside for a source, and what it is sent."""
    source = source.resolve(strict=True)
    found = source.stat()
    if stat.S_ISDIR(found.st_mode):
        return ["upload_tree", place, mark], pack_tree(source, mark)
    if stat.S_ISREG(found.st_mode):
        permissions = f"{found.st_mode & 0o777:o}"
        return ["upload_file", place, mark, permissions, str(found.st_size)], pack_file(source, found.st_size)
    raise ValueError(f"{source}: neither a file nor a directory")


async def _leave(child: Child) -> None:
    """Let it see that no more comes, and remove what it has of an upload that is not complete."""
    with suppress(OSError):
        child.control.shutdown(socket.SHUT_WR)
    await child.wait()


async def _listen(child: Child, complaint: bytearray) -> None:
    """Hear a complaint out while things are sent: who complains at length would else stop reading."""
    with suppress(ConnectionResetError):
        while piece := await child.control.recv(_RECEIVE_BYTES):
            complaint.extend(piece[: COMPLAINT_BYTES_MAX - len(complaint)])


def _check(code: int, path: str, complaint: bytes) -> None:
    if code == 0:
        return
    kind, why = _REFUSALS.get(code, (OSError, complaint.decode("utf-8", "replace").strip()))
    raise kind(f"{why or f'the sandbox refused ({code})'}: {path}")
