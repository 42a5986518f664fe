"""``str_replace_editor``: the commands of the editor as policies have learnt them, and what they answer."""

from __future__ import annotations

import posixpath
import re
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from prorld.agents.editor import Edited, Editor
from prorld.agents.editor_text import (
    EditRefused,
    NotFoundOnce,
    as_bytes,
    count_lines,
    insert_after,
    line_of,
    lines_from,
    numbered,
    replace_one,
)
from prorld.agents.helper import RESTARTED
from prorld.agents.listing import list_directory
from prorld.agents.observation import Observation, ToolFacts, clip, refusal
from prorld.agents.tools import Tool, sandbox_tool
from prorld.sandbox.contract import Sandbox

__all__ = ["COMMANDS", "RESPONSE_CHARS", "SNIPPET_LINES", "EditorArguments", "editor_tool", "missing_text", "view_text"]

RESPONSE_CHARS = 16_000
# No more of them fit, and a file of nothing but line ends is not taken apart.
LINES_MAX = RESPONSE_CHARS // 8
SNIPPET_LINES = 4
ECHO_BYTES = 2000
COMMANDS = ("view", "create", "str_replace", "insert", "undo_edit")

_CLIPPED = (
    "<response clipped><NOTE>Only the beginning is shown here. Look for the line numbers you need, and view them with "
    "`view_range`.</NOTE>"
)
_REVIEW = "Check that this is what you meant: indentation, and no line twice. Edit the file again where it is not."
# What a concise view of Python keeps: what is imported, defined and decorated.
_OUTLINE = re.compile(rb"^[ \t]*(?:async[ \t]+def|def|class|import|from|@)[ \t\w]", re.MULTILINE)

_Command = Annotated[
    str, Meta(description="What to do: one of these words.", extra_json_schema={"enum": list(COMMANDS)})
]
_Path = Annotated[str, Meta(description="Absolute path of a file, or of a directory to view.")]
_FileText = Annotated[str, Meta(description="For `create`: what the new file holds.")]
_OldStr = Annotated[
    str, Meta(description="For `str_replace`: the text to replace; it has to stand there exactly once.")
]
_NewStr = Annotated[str, Meta(description="For `str_replace`: what comes instead. For `insert`: the lines to put in.")]
_InsertLine = Annotated[int, Meta(description="For `insert`: the line after which they come; 0 for the beginning.")]
_ViewRange = Annotated[
    list[int], Meta(description="For `view` of a file: its first and last line, such as [11, 20]; -1 for the end.")
]


class EditorArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of all commands of the editor."""

    command: _Command
    path: _Path
    file_text: _FileText | UnsetType = UNSET
    old_str: _OldStr | UnsetType = UNSET
    new_str: _NewStr | UnsetType = UNSET
    insert_line: _InsertLine | UnsetType = UNSET
    view_range: _ViewRange | UnsetType = UNSET


def editor_tool(
    editor: Editor, *, name: str = "str_replace_editor", arguments: type[EditorArguments] = EditorArguments
) -> Tool:
    """The editor as one tool. ``arguments`` may add to those that it has."""

    async def run(given: EditorArguments, sandbox: Sandbox, limit_s: float) -> Observation:
        try:
            return await _run(editor, given, sandbox, limit_s)
        except EditRefused as exc:
            return refusal(clip(exc.text), exc.code)

    words = (
        "View, create and edit text files. `view` shows a file with line numbers, or a directory two levels deep; "
        "`create` makes a new file; `str_replace` replaces a text that stands in a file exactly once; `insert` puts "
        "lines after a line; `undo_edit` takes the last edit of a file back."
    )
    return sandbox_tool(name, words, arguments, run)


async def _run(editor: Editor, given: EditorArguments, sandbox: Sandbox, limit_s: float) -> Observation:
    path = given.path
    match given.command:
        case "view":
            concise = getattr(given, "concise", False) is True
            return await _view(editor, path, given.view_range, sandbox, limit_s, concise=concise)
        case "create":
            content = as_bytes(_wanted(given.file_text, "file_text", "create"), "file_text")
            await editor.create(sandbox, path, content)
            return Observation(text=f"File created successfully at: {path}")
        case "str_replace":
            old = _wanted(given.old_str, "old_str", "str_replace")
            new = "" if isinstance(given.new_str, UnsetType) else given.new_str
            return _edited(path, await replace(editor, sandbox, path, old, new))
        case "insert":
            if isinstance(given.insert_line, UnsetType):
                raise EditRefused("Nothing was inserted: `insert` needs `insert_line`.", "bad_arguments")
            new = _wanted(given.new_str, "new_str", "insert")
            return _edited(path, await insert(editor, sandbox, path, given.insert_line, new))
        case "undo_edit":
            undone = await editor.undo(sandbox, path)
            return _shown(f"The last edit of {path} was undone. {_intro('a snippet of ' + path)}", _snippet(undone))
        case other:
            raise EditRefused(f"There is no command {clip(other, 100)!r}; there are: {', '.join(COMMANDS)}.", "command")


async def replace(editor: Editor, sandbox: Sandbox, path: str, old: str, new: str) -> Edited:
    """Replace a text that stands in a file once. Raises ``EditRefused``."""
    if not old:
        raise EditRefused("No replacement was performed, old_str is empty.", "no_match")
    wanted, instead = as_bytes(old, "old_str"), as_bytes(new, "new_str")
    if old == new:
        raise EditRefused(f"No replacement was performed, old_str `{_echo(old)}` is the same as new_str.", "no_change")
    before = await editor.read(sandbox, path)
    try:
        change = replace_one(before, wanted, instead)
    except NotFoundOnce as exc:
        raise missing_text(path, old, exc) from None
    return await editor.edit(sandbox, path, before, change)


async def insert(editor: Editor, sandbox: Sandbox, path: str, line: int, text: str) -> Edited:
    """Put lines after a line. Raises ``EditRefused``."""
    content = as_bytes(text, "new_str")
    before = await editor.read(sandbox, path)
    try:
        change = insert_after(before, line, content)
    except IndexError:
        count = count_lines(before)
        raise EditRefused(f"Nothing was inserted: insert_line {line} is not within [0, {count}].", "no_line") from None
    return await editor.edit(sandbox, path, before, change)


def missing_text(path: str, old: str, exc: NotFoundOnce) -> EditRefused:
    """The answer where a text does not stand there once."""
    if not exc.lines:
        text = f"No replacement was performed, old_str `{_echo(old)}` did not appear verbatim in {path}."
        return EditRefused(text, "no_match")
    text = (
        f"No replacement was performed. Multiple occurrences of old_str `{_echo(old)}` in lines {exc.lines}. "
        "Please ensure it is unique"
    )
    return EditRefused(text, "ambiguous")


def view_text(content: bytes, path: str) -> None:
    """Refuse to show what is not text."""
    if b"\0" in content:
        raise EditRefused(f"The file {path} holds NUL bytes: it is binary and is not shown as text.", "binary")


async def _view(
    editor: Editor, path: str, view_range: list[int] | UnsetType, sandbox: Sandbox, limit_s: float, *, concise: bool
) -> Observation:
    try:
        content = await editor.read(sandbox, path)
    except EditRefused as exc:
        if exc.code != "directory":
            raise
        if not isinstance(view_range, UnsetType) and view_range:
            raise EditRefused(f"`view_range` is for files, and {path} is a directory.", "bad_arguments") from None
        return await _view_directory(path, sandbox, limit_s)
    view_text(content, path)
    first, last = 1, count_lines(content)
    if not isinstance(view_range, UnsetType) and view_range:
        first, last = _range(view_range, last)
    elif concise and posixpath.splitext(path)[1] == ".py":
        return _outline(path, content)
    lines = lines_from(content, first, min(last, first + LINES_MAX))
    return _shown(_intro(path), numbered(lines, first, RESPONSE_CHARS), len(content))


async def _view_directory(path: str, sandbox: Sandbox, limit_s: float) -> Observation:
    listing = await list_directory(sandbox, path, limit_s=limit_s)
    head = f"Files and directories up to two levels below {path}, hidden ones left out:\n"
    above = path.rstrip("/")
    text = "\n".join(f"{above}/{name}" for name in listing.names) or "(nothing)"
    cut = listing.more or len(text) > RESPONSE_CHARS
    body = text[:RESPONSE_CHARS] + (
        "\n<response clipped><NOTE>There are more than are shown here.</NOTE>" if cut else ""
    )
    note = f"\n{RESTARTED}" if listing.answer.facts.restarted else ""
    return Observation(text=head + body + note, facts=listing.answer.facts)


def _range(wanted: list[int], count: int) -> tuple[int, int]:
    if len(wanted) != 2:
        raise EditRefused("Invalid `view_range`: it is a list of two line numbers.", "bad_arguments")
    first, last = wanted
    if not 1 <= first <= max(1, count):
        raise EditRefused(f"Invalid `view_range`: {wanted}. The first line is not within [1, {count}].", "no_line")
    if last != -1 and last < first:
        raise EditRefused(f"Invalid `view_range`: {wanted}. The last line is before the first.", "no_line")
    return first, count if last == -1 else min(last, count)


def _outline(path: str, content: bytes) -> Observation:
    kept, whole = "", True
    number, counted = 1, 0
    for found in _OUTLINE.finditer(content):
        at = found.start()
        number, counted = number + content.count(b"\n", counted, at), at
        end = content.find(b"\n", at)
        shown, fits = numbered([content[at : None if end < 0 else end]], number, RESPONSE_CHARS - len(kept))
        kept += shown
        if not fits:
            whole = False
            break
    head = f"Imports and definitions alone, of {count_lines(content)} lines. {_intro(path)}"
    return _shown(head, (kept, whole))


def _edited(path: str, edited: Edited) -> Observation:
    head = f"The file {path} has been edited. {_intro('a snippet of ' + path)}"
    return _shown(head, _snippet(edited), review=True)


def _snippet(edited: Edited) -> tuple[str, bool]:
    """The lines that came in, and some around them."""
    start = line_of(edited.content, edited.start)
    end = line_of(edited.content, max(edited.start, edited.end - 1))
    first = max(1, start - SNIPPET_LINES)
    lines = lines_from(edited.content, first, min(end + SNIPPET_LINES, first + LINES_MAX))
    return numbered(lines, first, RESPONSE_CHARS)


def _intro(what: str) -> str:
    return f"Here's the result of running `cat -n` on {what}:"


def _shown(head: str, body: tuple[str, bool], size: int | None = None, *, review: bool = False) -> Observation:
    text, whole = body
    shown = len(text.encode("utf-8", "replace"))
    facts = ToolFacts(output_bytes=shown if size is None else size, omitted_bytes=0)
    if not whole:
        omitted = max(0, facts.output_bytes - shown)
        facts = msgspec.structs.replace(facts, omitted_bytes=omitted)
        text = f"{text}\n{_CLIPPED}\n"
    return Observation(text=f"{head}\n{text}{_REVIEW if review else ''}", facts=facts)


def _wanted(value: str | UnsetType, name: str, command: str) -> str:
    if isinstance(value, UnsetType):
        raise EditRefused(f"Parameter `{name}` is required for command: {command}", "bad_arguments")
    return value


def _echo(text: str) -> str:
    return clip(text, ECHO_BYTES)
