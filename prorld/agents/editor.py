"""The editor that all presets share: it reads and writes the files of one episode's sandbox and can take edits back.

It never runs a program: reads and writes go beside the agent's shell, so neither what the agent redefined nor a shell
that hangs matters. A write replaces the whole file in place; where it fails, what was there is put back.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque

import msgspec

from prorld.agents.editor_text import EDITABLE_BYTES, Change, EditRefused
from prorld.sandbox.contract import Sandbox

__all__ = ["HISTORY_BYTES", "HISTORY_EDITS", "HISTORY_FILES", "Edited", "Editor", "check_path"]

# What can be undone: so many edits of a file, in so many files, and what they removed in so many bytes.
HISTORY_EDITS = 16
HISTORY_FILES = 64
HISTORY_BYTES = 4 << 20
PATH_CHARS_MAX = 4096


class Edited(msgspec.Struct, frozen=True, kw_only=True):
    """A file after an edit: its content, and where what came in begins and ends."""

    content: bytes
    start: int
    end: int


class _Step(msgspec.Struct, frozen=True, kw_only=True):
    """What takes an edit back. It holds for exactly the content that the edit had left."""

    at: int
    removed: bytes
    added_bytes: int
    left: bytes


class Editor:
    """Files and the history of their edits. Made for one episode; in another sandbox it begins anew."""

    def __init__(self) -> None:
        self._sandbox_id: str | None = None
        self._history: OrderedDict[str, deque[_Step]] = OrderedDict()
        self._held_bytes = 0

    async def read(self, sandbox: Sandbox, path: str) -> bytes:
        """A file's content. Raises ``EditRefused``."""
        self._meet(sandbox)
        check_path(path)
        try:
            return await sandbox.read_file(path, max_bytes=EDITABLE_BYTES)
        except FileNotFoundError:
            raise EditRefused(f"The path {path} does not exist.", "not_found") from None
        except IsADirectoryError:
            raise EditRefused(f"The path {path} is a directory, and only `view` takes one.", "directory") from None
        except PermissionError:
            raise EditRefused(f"The file {path} can't be read: permission denied.", "forbidden") from None
        except ValueError as exc:
            raise EditRefused(f"The file {path} can't be opened here: {_last(exc)}.", "unfit") from None
        except OSError as exc:
            raise EditRefused(f"The file {path} can't be read: {_last(exc)}.", "io") from None

    async def create(self, sandbox: Sandbox, path: str, content: bytes) -> None:
        """Write a file that is not there yet. Raises ``EditRefused``."""
        self._meet(sandbox)
        check_path(path)
        try:
            await sandbox.read_file(path, max_bytes=0)
        except FileNotFoundError:
            pass
        except (IsADirectoryError, PermissionError, ValueError):
            raise _exists(path) from None
        except OSError as exc:
            raise EditRefused(f"The file {path} can't be written: {_last(exc)}.", "io") from None
        else:
            raise _exists(path)
        self._forget(path)  # what stood there before is gone, and its history with it
        await self._write(sandbox, path, content, before=None)

    async def edit(self, sandbox: Sandbox, path: str, before: bytes, change: Change) -> Edited:
        """Write a file's content with a change, and remember how to take it back. Raises ``EditRefused``."""
        self._meet(sandbox)
        after = change.apply(before)
        if len(after) > EDITABLE_BYTES:
            raise EditRefused(f"The file {path} would be larger than {EDITABLE_BYTES} bytes.", "unfit")
        await self._write(sandbox, path, after, before=before)
        step = _Step(at=change.at, removed=change.removed, added_bytes=len(change.added), left=_digest(after))
        self._remember(path, step)
        return Edited(content=after, start=change.at, end=change.at + len(change.added))

    async def undo(self, sandbox: Sandbox, path: str) -> Edited:
        """Take the last edit of a file back. Raises ``EditRefused``, and then nothing has changed."""
        self._meet(sandbox)
        check_path(path)
        steps = self._history.get(path)
        if not steps:
            raise EditRefused(f"No edit of {path} is left that could be undone.", "no_history")
        now = await self.read(sandbox, path)
        step = steps[-1]
        if _digest(now) != step.left:
            why = f"The file {path} has been changed by something else since its last edit, which can't be undone now."
            raise EditRefused(why, "changed")
        before = now[: step.at] + step.removed + now[step.at + step.added_bytes :]
        await self._write(sandbox, path, before, before=now)
        steps.pop()
        self._held_bytes -= len(step.removed)
        if not steps:
            del self._history[path]
        return Edited(content=before, start=step.at, end=step.at + len(step.removed))

    def _meet(self, sandbox: Sandbox) -> None:
        """Nothing that was done in one sandbox is known in another."""
        if self._sandbox_id != sandbox.sandbox_id:
            self._sandbox_id = sandbox.sandbox_id
            self._history.clear()
            self._held_bytes = 0

    async def _write(self, sandbox: Sandbox, path: str, content: bytes, *, before: bytes | None) -> None:
        if len(content) > EDITABLE_BYTES:
            raise EditRefused(f"The file {path} would be larger than {EDITABLE_BYTES} bytes.", "unfit")
        try:
            await sandbox.write_file(path, content)
        except (OSError, ValueError) as exc:
            why = _last(exc)
        else:
            return
        fate = ""
        if before is not None:
            fate = " It is as it was." if await _put_back(sandbox, path, before) else " It may be damaged."
        raise EditRefused(f"The file {path} can't be written: {why}.{fate}", "io")

    def _remember(self, path: str, step: _Step) -> None:
        if len(step.removed) > HISTORY_BYTES:
            self._forget(path)
            return
        steps = self._history.setdefault(path, deque())
        self._history.move_to_end(path)
        steps.append(step)
        self._held_bytes += len(step.removed)
        while len(steps) > HISTORY_EDITS:
            self._held_bytes -= len(steps.popleft().removed)
        while len(self._history) > HISTORY_FILES or self._held_bytes > HISTORY_BYTES:
            oldest = next(iter(self._history))
            if oldest == path:
                self._held_bytes -= len(steps.popleft().removed)
            else:
                self._forget(oldest)

    def _forget(self, path: str) -> None:
        self._held_bytes -= sum(len(step.removed) for step in self._history.pop(path, ()))


def check_path(path: str) -> None:
    """Refuse what names no file, and what would mean another file after a ``cd``."""
    if len(path) > PATH_CHARS_MAX:
        raise EditRefused(f"The path is {len(path)} characters long; at most {PATH_CHARS_MAX} can be taken.", "path")
    if "\0" in path:
        raise EditRefused("The path contains a NUL character.", "path")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise EditRefused("The path contains a lone surrogate, which is not text.", "path") from None
    if not path.startswith("/"):
        raise EditRefused(f"The path {path} is not absolute: it has to start with `/`.", "path")


async def _put_back(sandbox: Sandbox, path: str, before: bytes) -> bool:
    try:
        if await sandbox.read_file(path, max_bytes=EDITABLE_BYTES) == before:
            return True
        await sandbox.write_file(path, before)
    except (OSError, ValueError):
        return False
    return True


def _exists(path: str) -> EditRefused:
    text = f"File already exists at: {path}. Cannot overwrite files using command `create`."
    return EditRefused(text, "exists")


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _last(exc: Exception) -> str:
    """What went wrong, on one bounded line."""
    return " ".join(str(exc).split())[:300].rstrip(".") or type(exc).__name__
