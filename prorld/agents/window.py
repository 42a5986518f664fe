"""SWE-agent's older way to read and edit: one open file, seen through a window of so many lines."""

from __future__ import annotations

import posixpath
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from prorld.agents.editor import Editor
from prorld.agents.editor_text import EditRefused, NotFoundOnce, as_bytes, count_lines, line_of, lines_from, replace_all
from prorld.agents.editor_tool import ECHO_BYTES, insert, replace, view_text
from prorld.agents.observation import Observation, ToolFacts, clip, refusal
from prorld.agents.tools import Tool, sandbox_tool
from prorld.sandbox.contract import Sandbox

__all__ = ["OVERLAP_LINES", "WINDOW_LINES", "Window"]

WINDOW_LINES = 100
OVERLAP_LINES = 2
LINE_CHARS = 2000

T = TypeVar("T", bound=msgspec.Struct)
Act = Callable[[T, Sandbox], Awaitable[Observation]]


class _Open(msgspec.Struct, frozen=True, kw_only=True):
    path: Annotated[str, Meta(description="The file to open.")]
    line_number: Annotated[int, Meta(description="The line to go to.")] = 1


class _Goto(msgspec.Struct, frozen=True, kw_only=True):
    line_number: Annotated[int, Meta(description="The line to go to.")]


class _Nothing(msgspec.Struct, frozen=True, kw_only=True):
    pass


class _Create(msgspec.Struct, frozen=True, kw_only=True):
    filename: Annotated[str, Meta(description="The file to make, empty, and to open.")]


class _Edit(msgspec.Struct, frozen=True, kw_only=True):
    search: Annotated[str, Meta(description="The text to replace in the open file; it has to stand there once.")]
    replace: Annotated[str, Meta(description="What comes instead.")]
    replace_all: Annotated[bool, Meta(description="Replace it wherever it stands.")] = False


class _Insert(msgspec.Struct, frozen=True, kw_only=True):
    text: Annotated[str, Meta(description="The lines to put into the open file.")]
    line: Annotated[int, Meta(description="The line after which they come; the end of the file by default.")] = -1


class Window:
    """The open file of one episode and where its reader is."""

    def __init__(self, editor: Editor) -> None:
        self._editor = editor
        self._sandbox_id: str | None = None
        self._path = ""
        self._first = 1

    @property
    def path(self) -> str:
        """The open file; empty where none is open."""
        return self._path

    def tools(self) -> tuple[Tool, ...]:
        """All that can be done with it."""
        return (
            self._tool("open", "Open a file and show a part of it.", _Open, self._open),
            self._tool("goto", "Show the open file around a line.", _Goto, self._goto),
            self._tool("scroll_up", "Show the part of the open file that is above.", _Nothing, self._up),
            self._tool("scroll_down", "Show the part of the open file that is below.", _Nothing, self._down),
            self._tool("create", "Make a new, empty file and open it.", _Create, self._create),
            self._tool("edit", "Replace a text in the open file.", _Edit, self._edit),
            self._tool("insert", "Put lines into the open file.", _Insert, self._insert),
        )

    def _tool(self, name: str, words: str, arguments: type[T], act: Act[T]) -> Tool:
        async def run(given: T, sandbox: Sandbox, _limit_s: float) -> Observation:
            if self._sandbox_id != sandbox.sandbox_id:
                self._sandbox_id, self._path = sandbox.sandbox_id, ""
            try:
                return await act(given, sandbox)
            except EditRefused as exc:
                return refusal(clip(exc.text), exc.code)

        return sandbox_tool(name, words, arguments, run)

    async def _open(self, given: _Open, sandbox: Sandbox) -> Observation:
        path = _absolute(given.path, sandbox)
        content = await self._editor.read(sandbox, path)
        view_text(content, path)
        self._path = path
        return self._around(content, given.line_number)

    async def _goto(self, given: _Goto, sandbox: Sandbox) -> Observation:
        content = await self._read(sandbox)
        count = count_lines(content)
        if not 1 <= given.line_number <= max(1, count):
            raise EditRefused(f"Line {given.line_number} is not within [1, {count}].", "no_line")
        return self._around(content, given.line_number)

    async def _up(self, _given: _Nothing, sandbox: Sandbox) -> Observation:
        content = await self._read(sandbox)
        self._first -= WINDOW_LINES - OVERLAP_LINES
        return self._show(content)

    async def _down(self, _given: _Nothing, sandbox: Sandbox) -> Observation:
        content = await self._read(sandbox)
        self._first += WINDOW_LINES - OVERLAP_LINES
        return self._show(content)

    async def _create(self, given: _Create, sandbox: Sandbox) -> Observation:
        path = _absolute(given.filename, sandbox)
        await self._editor.create(sandbox, path, b"")
        self._path = path
        return self._around(b"", 1)

    async def _edit(self, given: _Edit, sandbox: Sandbox) -> Observation:
        path = self._opened()
        if not given.replace_all:
            edited = await replace(self._editor, sandbox, path, given.search, given.replace)
        else:
            if not given.search or given.search == given.replace:
                raise EditRefused(
                    "Nothing was replaced: there is nothing to look for, or nothing changes.", "no_change"
                )
            old, new = as_bytes(given.search, "search"), as_bytes(given.replace, "replace")
            before = await self._editor.read(sandbox, path)
            try:
                change = replace_all(before, old, new)
            except NotFoundOnce:
                echo = clip(given.search, ECHO_BYTES)
                raise EditRefused(f"Nothing was replaced: `{echo}` does not stand in {path}.", "no_match") from None
            edited = await self._editor.edit(sandbox, path, before, change)
        return self._around(
            edited.content, line_of(edited.content, edited.start), f"The file {path} has been edited.\n"
        )

    async def _insert(self, given: _Insert, sandbox: Sandbox) -> Observation:
        path = self._opened()
        line = given.line
        if line == -1:
            line = count_lines(await self._editor.read(sandbox, path))
        edited = await insert(self._editor, sandbox, path, line, given.text)
        return self._around(edited.content, line + 1, f"The file {path} has been edited.\n")

    def _opened(self) -> str:
        if not self._path:
            raise EditRefused("No file is open: use `open` first.", "no_file")
        return self._path

    async def _read(self, sandbox: Sandbox) -> bytes:
        path = self._opened()
        content = await self._editor.read(sandbox, path)
        view_text(content, path)
        return content

    def _around(self, content: bytes, line: int, head: str = "") -> Observation:
        self._first = line - WINDOW_LINES // 2
        return self._show(content, head)

    def _show(self, content: bytes, head: str = "") -> Observation:
        count = count_lines(content)
        self._first = max(1, min(self._first, count - WINDOW_LINES + 1))
        last = min(count, self._first + WINDOW_LINES - 1)
        lines = lines_from(content, self._first, last)
        shown = [f"[File: {self._path} ({count} lines total)]"]
        if self._first > 1:
            shown.append(f"({self._first - 1} more lines above)")
        for number, line in enumerate(lines, self._first):
            text = line[: 4 * LINE_CHARS].decode("utf-8", "replace").removesuffix("\r")
            shown.append(f"{number}:{text[:LINE_CHARS]}")
        if last < count:
            shown.append(f"({count - last} more lines below)")
        text = clip("\n".join(shown))
        return Observation(text=head + text, facts=ToolFacts(output_bytes=len(text.encode())))


def _absolute(path: str, sandbox: Sandbox) -> str:
    return posixpath.join(sandbox.workdir, path)
