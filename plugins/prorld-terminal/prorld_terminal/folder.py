"""A task folder on this host: read within bounds, and never beyond itself. Blocks; whole folders are for a thread."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import msgspec

from prorld.errors import HandlerError

__all__ = ["ENTRIES_MAX", "FOLDER_BYTES_MAX", "TEXT_BYTES_MAX", "Entry", "digest_of", "read_text", "tree_of"]

ENTRIES_MAX = 4000
FOLDER_BYTES_MAX = 256 << 20
TEXT_BYTES_MAX = 1 << 20
DEPTH_MAX = 32


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A file, a directory or a link of the folder; ``path`` is below it."""

    path: str
    kind: str
    mode: int
    size: int = 0
    target: str = ""


def bad(folder: Path, words: str) -> HandlerError:
    """A folder that can't be used."""
    return HandlerError(f"the task folder {folder}: {words}", code="bad_task")


def read_text(folder: Path, name: str) -> str | None:
    """A small text file of the folder; ``None`` where there is none."""
    path = folder / name
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise bad(folder, f"{name} is no plain file")
        with path.open("rb") as file:
            raw = file.read(TEXT_BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise bad(folder, f"{name} can't be read: {exc.strerror}") from exc
    if len(raw) > TEXT_BYTES_MAX:
        raise bad(folder, f"{name} is larger than {TEXT_BYTES_MAX} bytes")
    try:
        return raw.decode()
    except UnicodeDecodeError as exc:
        raise bad(folder, f"{name} is no UTF-8 text") from exc


def tree_of(folder: Path) -> list[Entry]:
    """All that is in the folder, by path. Links that leave it, devices, and more than the bounds are refused."""
    found: list[Entry] = []
    total = 0
    todo: list[tuple[Path, int]] = [(folder, 0)]
    while todo:
        place, depth = todo.pop()
        if depth > DEPTH_MAX:
            raise bad(folder, f"directories are more than {DEPTH_MAX} deep")
        for item in _listed(folder, place):
            if len(found) >= ENTRIES_MAX:
                raise bad(folder, f"it has more than {ENTRIES_MAX} entries")
            entry = _entry(folder, item)
            total += entry.size
            if total > FOLDER_BYTES_MAX:
                raise bad(folder, f"it holds more than {FOLDER_BYTES_MAX} bytes")
            found.append(entry)
            if entry.kind == "directory":
                todo.append((Path(item.path), depth + 1))
    return sorted(found, key=lambda entry: entry.path)


def digest_of(folder: Path, entries: list[Entry] | None = None) -> str:
    """The SHA-256 of all names, contents, links and whether files can be run."""
    whole = hashlib.sha256()
    for entry in tree_of(folder) if entries is None else entries:
        content = ""
        if entry.kind == "file":
            content = _hash_of(folder, entry)
        line = f"{entry.kind}\0{entry.path}\0{bool(entry.mode & 0o100)}\0{entry.target}\0{content}\n"
        whole.update(line.encode("utf-8", "surrogateescape"))
    return whole.hexdigest()


def _listed(folder: Path, place: Path) -> list[os.DirEntry[str]]:
    found: list[os.DirEntry[str]] = []
    try:
        with os.scandir(place) as listing:
            for item in listing:
                if len(found) >= ENTRIES_MAX:
                    raise bad(folder, f"it has more than {ENTRIES_MAX} entries")
                found.append(item)
    except OSError as exc:
        raise bad(folder, f"it can't be listed: {exc.strerror}") from exc
    return found


def _entry(folder: Path, item: os.DirEntry[str]) -> Entry:
    path = str(Path(item.path).relative_to(folder))
    info = item.stat(follow_symlinks=False)
    if stat.S_ISLNK(info.st_mode):
        target = str(Path(item.path).readlink())
        # By what it leads to, and not by its text: a link may go through other links.
        root = Path(os.path.realpath(folder))
        if target.startswith("/") or not Path(os.path.realpath(item.path)).is_relative_to(root):
            raise bad(folder, f"the link {path} leaves it")
        return Entry(path=path, kind="link", mode=0, target=target)
    if stat.S_ISDIR(info.st_mode):
        return Entry(path=path, kind="directory", mode=info.st_mode & 0o777)
    if not stat.S_ISREG(info.st_mode):
        raise bad(folder, f"{path} is no file, directory or link")
    return Entry(path=path, kind="file", mode=info.st_mode & 0o777, size=info.st_size)


def _hash_of(folder: Path, entry: Entry) -> str:
    left = entry.size
    found = hashlib.sha256()
    try:
        with (folder / entry.path).open("rb") as file:
            while piece := file.read(min(1 << 20, left + 1)):
                left -= len(piece)
                if left < 0:
                    raise bad(folder, f"{entry.path} grows while it is read")
                found.update(piece)
    except OSError as exc:
        raise bad(folder, f"{entry.path} can't be read: {exc.strerror}") from exc
    return found.hexdigest()
