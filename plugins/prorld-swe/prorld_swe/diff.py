"""A diff, read without trust: sections by file, and only what can be shown to be a change of plain files.

Git writes it, but in the policy's sandbox. What is kept is written anew from what was understood, so that whoever
applies it sees what was judged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, Literal

import msgspec

__all__ = ["Diff", "FileChange", "parse_diff"]

FILES_MAX = 2_000

Kind = Literal["changed", "added", "deleted"]

_OPENING: Final = re.compile(rb"diff --git a/(?P<old>[^\x00-\x1f\"\\]+) b/(?P<new>[^\x00-\x1f\"\\]+)")
_HUNK: Final = re.compile(rb"@@ -\d+(?:,(?P<old>\d+))? \+\d+(?:,(?P<new>\d+))? @@.*")
_INDEX: Final = re.compile(rb"index [0-9a-f]{7,64}\.\.[0-9a-f]{7,64}(?: [0-7]{6})?")
_BINARY_SIZE: Final = re.compile(rb"(?:literal|delta) \d+")
_BINARY_LINE: Final = re.compile(rb"[A-Za-z][0-9A-Za-z!#$%&()*+;<=>?@^_`{|}~-]+")
_PLAIN_MODES: Final = frozenset({b"100644", b"100755"})


class FileChange(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to one file, and its section as it may be applied."""

    path: str
    kind: Kind
    binary: bool
    added: int
    removed: int
    text: bytes


class Diff(msgspec.Struct, frozen=True, kw_only=True):
    """The changes of plain files, and why other sections are none, by path."""

    changes: tuple[FileChange, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()


class _Refused(ValueError):
    pass


def parse_diff(data: bytes) -> Diff:
    """Every section of a diff of git; one that is not understood is refused and the others stand."""
    changes: list[FileChange] = []
    refused: list[tuple[str, str]] = []
    seen: set[str] = set()
    for name, lines in _sections(data):
        if len(changes) + len(refused) >= FILES_MAX:
            refused.append(("", f"more than {FILES_MAX} files"))
            break
        try:
            change = _read(lines)
        except _Refused as exc:
            refused.append((name, str(exc)))
            continue
        if change.path in seen:
            refused.append((name, "a second section for the same file"))
            continue
        seen.add(change.path)
        changes.append(change)
    return Diff(changes=tuple(changes), refused=tuple(refused))


def _sections(data: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """Lines from one opening to the next. A line of a hunk never begins like an opening."""
    lines: list[bytes] = []
    for line in data.split(b"\n"):
        if line.startswith(b"diff --git "):
            if lines:
                yield _name(lines[0]), lines
            lines = [line]
        elif lines:
            lines.append(line)
    if lines:
        yield _name(lines[0]), lines


def _name(opening: bytes) -> str:
    return opening.rpartition(b" b/")[2].decode("utf-8", "replace")[:300]


def _read(lines: list[bytes]) -> FileChange:
    opening = _OPENING.fullmatch(lines[0])
    if opening is None:
        raise _Refused("a name with odd characters")
    old, new = opening["old"], opening["new"]
    if old != new:
        raise _Refused("a renamed or copied file")
    path = _plain_path(new)
    if lines[-1] == b"":
        lines = lines[:-1]
    kind, head, at = _header(lines)
    rest = lines[at:]
    if not rest:
        if kind == "changed":
            raise _Refused("only its mode changes")
        body, added, removed, binary = [], 0, 0, False
    elif rest[0] == b"GIT binary patch":
        body, added, removed, binary = _binary(rest), 0, 0, True
    else:
        body, added, removed = _text(rest, path, kind)
        binary = False
    text = b"\n".join([lines[0], *head, *body]) + b"\n"
    return FileChange(path=path, kind=kind, binary=binary, added=added, removed=removed, text=text)


def _plain_path(name: bytes) -> str:
    try:
        path = name.decode("utf-8")
    except UnicodeDecodeError:
        raise _Refused("a name that is no UTF-8") from None
    parts = path.split("/")
    if any(part in {"", ".", ".."} for part in parts):
        raise _Refused("a path out of the repository")
    if any(part.lower().startswith(".git") and part.lower() != ".github" for part in parts):
        raise _Refused("a file of git")
    return path


def _header(lines: list[bytes]) -> tuple[Kind, list[bytes], int]:
    """What happens to the file, the lines of the head that are kept, and where the body begins. Modes stay."""
    kind: Kind = "changed"
    kept: list[bytes] = []
    at = 1
    while at < len(lines):
        line = lines[at]
        if line.startswith((b"old mode ", b"new mode ")):
            if line.rpartition(b" ")[2] not in _PLAIN_MODES:
                raise _Refused("no plain file")
        elif line.startswith((b"new file mode ", b"deleted file mode ")):
            if line.rpartition(b" ")[2] not in _PLAIN_MODES:
                raise _Refused("no plain file")
            kind = "added" if line.startswith(b"new") else "deleted"
            kept.append(line)
        elif _INDEX.fullmatch(line):
            if line.count(b" ") == 2 and line.rpartition(b" ")[2] not in _PLAIN_MODES:
                raise _Refused("no plain file")
            kept.append(line)
        elif line.startswith((b"--- ", b"GIT binary patch")):
            break
        else:
            raise _Refused("a header that is not understood")
        at += 1
    return kind, kept, at


def _text(lines: list[bytes], path: str, kind: Kind) -> tuple[list[bytes], int, int]:
    name = path.encode()
    # Git ends a name that has a blank in it with a tab.
    tail = b"\t" if b" " in name else b""
    before = b"--- /dev/null" if kind == "added" else b"--- a/" + name + tail
    after = b"+++ /dev/null" if kind == "deleted" else b"+++ b/" + name + tail
    if (
        len(lines) < 3
        or lines[0].rstrip(b"\t") != before.rstrip(b"\t")
        or lines[1].rstrip(b"\t") != after.rstrip(b"\t")
    ):
        raise _Refused("names that do not fit")
    added = removed = 0
    at = 2
    while at < len(lines):
        hunk = _HUNK.fullmatch(lines[at])
        if hunk is None:
            raise _Refused("a hunk that is not understood")
        old, new = int(hunk["old"] or 1), int(hunk["new"] or 1)
        at += 1
        while old > 0 or new > 0 or (at < len(lines) and lines[at].startswith(b"\\")):
            if at >= len(lines):
                raise _Refused("a hunk that ends early")
            sign = lines[at][:1]
            if sign == b"+":
                new, added = new - 1, added + 1
            elif sign == b"-":
                old, removed = old - 1, removed + 1
            elif sign == b" ":
                old, new = old - 1, new - 1
            elif sign != b"\\":
                raise _Refused("a hunk that is not understood")
            if old < 0 or new < 0:
                raise _Refused("a hunk that is longer than it says")
            at += 1
    return lines, added, removed


def _binary(lines: list[bytes]) -> list[bytes]:
    for line in lines[1:]:
        if line and not _BINARY_SIZE.fullmatch(line) and not _BINARY_LINE.fullmatch(line):
            raise _Refused("a binary change that is not understood")
    # An empty line ends each part, and the last one was taken off above.
    return [*lines, b""] if lines[-1] else lines
