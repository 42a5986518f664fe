"""Changes of a source file as replaced stretches of its text, so that a diff shows just what was changed."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

__all__ = ["Edit", "Source", "apply_edits", "changed_lines", "diff_of"]

SOURCE_BYTES_MAX = 1 << 20


class Edit(msgspec.Struct, frozen=True, order=True):
    """The bytes from ``start`` to ``end`` become ``text``."""

    start: int
    end: int
    text: str


class Source:
    """A file of Python with its syntax tree, and where in its bytes a node stands."""

    def __init__(self, path: str, data: bytes) -> None:
        """Raises ``ValueError`` for what is no plain Python that can be changed as text."""
        if len(data) > SOURCE_BYTES_MAX or b"\r" in data or b"\f" in data or data.startswith(b"\xef\xbb\xbf"):
            raise ValueError(f"{path} is too large, or has other ends of lines")
        self.path = path
        self.data = data
        try:
            self.tree = ast.parse(data.decode(), path)
        except (SyntaxError, RecursionError, MemoryError) as exc:
            raise ValueError(f"{path} can't be parsed: {exc}") from exc
        self.lines = data.split(b"\n")
        self._starts = [0]
        for line in self.lines:
            self._starts.append(self._starts[-1] + len(line) + 1)

    def start(self, node: ast.expr | ast.stmt) -> int:
        """The first byte of a node."""
        return self._starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt) -> int:
        """The byte after a node."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr | ast.stmt) -> str:
        """A node as it is written."""
        return self.between(self.start(node), self.end(node))

    def between(self, start: int, end: int) -> str:
        """A stretch as text."""
        return self.data[start:end].decode()

    def replace(self, node: ast.expr, text: str) -> Edit:
        """A node written in another way."""
        return Edit(self.start(node), self.end(node), text)

    def whole_lines(self, first: ast.stmt, last: ast.stmt) -> tuple[int, int] | None:
        """The lines that statements stand on; ``None`` where they share one with something else."""
        assert last.end_lineno is not None
        before = self.lines[first.lineno - 1][: first.col_offset]
        after = self.lines[last.end_lineno - 1][last.end_col_offset :].strip()
        if before.strip() or (after and not after.startswith(b"#")):
            return None
        return self._starts[first.lineno - 1], min(self._starts[last.end_lineno], len(self.data))

    def line_start(self, number: int) -> int:
        """The first byte of a line, which are counted from 1."""
        return self._starts[number - 1]


def apply_edits(data: bytes, edits: Iterable[Edit]) -> bytes | None:
    """The text after the edits; ``None`` where they overlap."""
    ordered = sorted(edits)
    for earlier, later in pairwise(ordered):
        if later.start < earlier.end:
            return None
    for edit in reversed(ordered):
        data = data[: edit.start] + edit.text.encode() + data[edit.end :]
    return data


def diff_of(changes: Sequence[tuple[str, bytes, bytes]]) -> str:
    """The change of (path, before, after) as git writes and applies it."""
    out: list[str] = []
    for path, before, after in changes:
        out.append(f"diff --git a/{path} b/{path}\n")
        old, new = (text.decode().splitlines(keepends=True) for text in (before, after))
        out += [
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            for line in difflib.unified_diff(old, new, f"a/{path}", f"b/{path}")
        ]
    return "".join(out)


def changed_lines(diff: str) -> int:
    """How many lines a diff takes away and adds; one that is changed counts once."""
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++"))]
    return max(sum(line.startswith("-") for line in lines), sum(line.startswith("+") for line in lines))
