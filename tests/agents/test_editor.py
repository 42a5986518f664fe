"""The editor's laws: what it writes is what was meant, byte for byte, and what it takes back is what was there."""

from __future__ import annotations

import subprocess
import tracemalloc
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from prorld.agents import Observation, Tool
from prorld.agents.editor import HISTORY_EDITS, HISTORY_FILES, Editor
from prorld.agents.editor_text import (
    EDITABLE_BYTES,
    EditRefused,
    NotFoundOnce,
    as_bytes,
    count_lines,
    insert_after,
    lines_from,
    lines_of,
    numbered,
    replace_all,
    replace_one,
)
from prorld.agents.editor_tool import RESPONSE_CHARS, editor_tool
from prorld.agents.presets import preset
from prorld.testing.fake_sandbox import FakeSandbox
from tests.agents.support import pretended, use

PLACE = "/work/f.txt"
LONE_SURROGATE = chr(0xD800)

# Few letters, so that things are found and found twice; tabs, both line ends and bytes that are no text.
contents = st.lists(st.sampled_from([b"a", b"b", b"\t", b"\n", b"\r\n", b"\xff", "é".encode()]), max_size=30).map(
    b"".join
)
texts = st.text(alphabet="ab\té\n", max_size=6)


async def say(tool: Tool, sandbox: FakeSandbox, command: str, path: str = PLACE, **more: Any) -> str:
    return (await use(tool, sandbox, command=command, path=path, **more)).text


# --- laws -----------------------------------------------------------------------------------------------------------


@given(contents, texts.filter(bool), texts)
async def test_str_replace_and_undo_restore_the_bytes(content: bytes, old: str, new: str):
    """Whatever a file holds, an edit that was made can be taken back to the last byte."""
    async with pretended() as sandbox:
        sandbox.files[PLACE] = content
        tool = editor_tool(Editor())
        observation = await use(tool, sandbox, command="str_replace", path=PLACE, old_str=old, new_str=new)
        if observation.facts.refused:
            assert sandbox.files[PLACE] == content
            return
        await say(tool, sandbox, "undo_edit")
        assert sandbox.files[PLACE] == content


@given(contents, texts.filter(bool), texts)
def test_a_replacement_touches_nothing_else(content: bytes, old: str, new: str):
    """What stands before and after it stays as it is, tabs, odd bytes and line ends included."""
    if content.count(old.encode()) != 1 and b"\r\n" not in content:
        with pytest.raises(NotFoundOnce):
            replace_one(content, old.encode(), new.encode())
        return
    try:
        change = replace_one(content, old.encode(), new.encode())
    except NotFoundOnce:
        # A text that stands there once as it was written is found, but for one that begins within a line end.
        assert content.count(old.encode()) != 1 or ("\n" in old and b"\r\n" in content)
        return
    after = change.apply(content)
    assert after.startswith(content[: change.at])
    assert after.endswith(content[change.at + len(change.removed) :])
    assert change.removed.replace(b"\r\n", b"\n") == old.encode()
    assert change.added.replace(b"\r\n", b"\n") == new.encode()
    assert change.revert(after) == content


@given(contents, texts.filter(bool), texts)
def test_no_edit_mixes_the_line_ends_of_a_file(content: bytes, old: str, new: str):
    """A file whose lines all end alike still is one afterwards."""
    assume(b"\n" in content)
    content = content.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")
    for edit in (replace_one, replace_all):
        try:
            after = edit(content, old.encode(), new.encode()).apply(content)
        except NotFoundOnce:
            continue
        assert after.count(b"\n") == after.count(b"\r\n")


@given(contents, texts, st.data())
async def test_insert_and_undo_restore_the_bytes(content: bytes, text: str, data: st.DataObject):
    """And between the two, the lines stand where they were wanted."""
    count = len(lines_of(content))
    line = data.draw(st.integers(0, count))
    async with pretended() as sandbox:
        sandbox.files[PLACE] = content
        tool = editor_tool(Editor())
        said = await say(tool, sandbox, "insert", insert_line=line, new_str=text)
        assert said.startswith(f"The file {PLACE} has been edited."), said
        after = [each.removesuffix(b"\r") for each in lines_of(sandbox.files[PLACE])]
        before = [each.removesuffix(b"\r") for each in lines_of(content)]
        added = text.removesuffix("\n").encode().split(b"\n")
        wanted = before[:line] + added + before[line:]
        # An empty last line without an end of its own can't be told from none.
        assert after in (wanted, wanted[:-1] if not wanted[-1] else wanted)
        await say(tool, sandbox, "undo_edit")
        assert sandbox.files[PLACE] == content


@given(contents, st.lists(st.tuples(st.integers(0, 3), texts), min_size=1, max_size=HISTORY_EDITS))
async def test_edits_are_taken_back_in_the_order_they_were_made(content: bytes, inserts: list[tuple[int, str]]):
    """Each undo gives the state before the edit that it takes back."""
    async with pretended() as sandbox:
        sandbox.files[PLACE] = content
        tool = editor_tool(Editor())
        states: list[bytes] = []
        for line, text in inserts:
            before = sandbox.files[PLACE]
            observation = await use(tool, sandbox, command="insert", path=PLACE, insert_line=line, new_str=text)
            if not observation.facts.refused:
                states.append(before)
        for state in reversed(states):
            await say(tool, sandbox, "undo_edit")
            assert sandbox.files[PLACE] == state
        assert (await say(tool, sandbox, "undo_edit")).startswith("No edit of")
        assert sandbox.files[PLACE] == content


@given(st.lists(st.text(alphabet="ab\té ", max_size=5), max_size=20), st.booleans())
def test_a_view_is_numbered_as_cat_does(lines: list[str], ends: bool):
    """The real ``cat -n`` agrees, tabs and a missing last newline included."""
    content = ("\n".join(lines) + ("\n" if ends else "")).encode()
    cat = subprocess.run(["cat", "-n"], input=content, capture_output=True, check=True).stdout.decode()
    shown, whole = numbered(lines_of(content), 1, RESPONSE_CHARS)
    assert whole
    assert shown.removesuffix("\n") == cat.removesuffix("\n")


@given(st.binary(max_size=60), st.integers(0, 40))
def test_a_numbered_view_keeps_its_bound(content: bytes, limit: int):
    """Whatever the bytes are."""
    shown, whole = numbered(lines_of(content), 1, limit)
    assert len(shown) <= limit
    assert whole == (numbered(lines_of(content), 1, 10_000)[0] == shown)


@given(contents, st.text(alphabet="ab\n", min_size=1, max_size=3))
def test_replacing_everywhere_leaves_nothing_behind(content: bytes, old: str):
    """One change takes every place, and goes back as one."""
    try:
        change = replace_all(content, old.encode(), b"Z")
    except NotFoundOnce:
        assert old.encode() not in content or b"\r\n" in content
        return
    after = change.apply(content)
    assert change.revert(after) == content
    assert b"Z" in after
    if b"\r\n" not in content:
        assert after == content.replace(old.encode(), b"Z")


# --- texts ----------------------------------------------------------------------------------------------------------


async def test_the_texts_of_the_editor():
    """What policies have learnt to read, word for word."""
    async with pretended() as sandbox:
        tool = editor_tool(Editor())
        said = await say(tool, sandbox, "create", file_text="one\n\ttwo\nthree\n")
        assert said == f"File created successfully at: {PLACE}"
        assert await say(tool, sandbox, "view") == (
            f"Here's the result of running `cat -n` on {PLACE}:\n     1\tone\n     2\t\ttwo\n     3\tthree\n"
        )
        assert await say(tool, sandbox, "view", view_range=[2, -1]) == (
            f"Here's the result of running `cat -n` on {PLACE}:\n     2\t\ttwo\n     3\tthree\n"
        )
        assert await say(tool, sandbox, "str_replace", old_str="two", new_str="2") == (
            f"The file {PLACE} has been edited. Here's the result of running `cat -n` on a snippet of {PLACE}:\n"
            "     1\tone\n     2\t\t2\n     3\tthree\n"
            "Check that this is what you meant: indentation, and no line twice. Edit the file again where it is not."
        )
        assert await say(tool, sandbox, "create", file_text="") == (
            f"File already exists at: {PLACE}. Cannot overwrite files using command `create`."
        )
        assert await say(tool, sandbox, "str_replace", old_str="four", new_str="4") == (
            f"No replacement was performed, old_str `four` did not appear verbatim in {PLACE}."
        )
        assert await say(tool, sandbox, "str_replace", old_str="e", new_str="E") == (
            "No replacement was performed. Multiple occurrences of old_str `e` in lines [1, 3, 3]. "
            "Please ensure it is unique"
        )
        assert await say(tool, sandbox, "str_replace", old_str="one", new_str="one") == (
            "No replacement was performed, old_str `one` is the same as new_str."
        )
        assert await say(tool, sandbox, "undo_edit") == (
            f"The last edit of {PLACE} was undone. Here's the result of running `cat -n` on a snippet of {PLACE}:\n"
            "     1\tone\n     2\t\ttwo\n     3\tthree\n"
        )


async def test_a_snippet_shows_four_lines_around_what_came_in():
    """And no more than there are."""
    async with pretended() as sandbox:
        sandbox.files[PLACE] = b"".join(b"line %d\n" % number for number in range(1, 31))
        tool = editor_tool(Editor())
        said = await say(tool, sandbox, "insert", insert_line=15, new_str="x\ny")
        assert [int(line.split("\t")[0]) for line in said.splitlines()[1:-1]] == list(range(12, 22))
        said = await say(tool, sandbox, "str_replace", old_str="line 30\n", new_str="")
        assert [int(line.split("\t")[0]) for line in said.splitlines()[1:-1]] == [28, 29, 30, 31]


async def test_a_long_file_is_clipped_and_says_so():
    """At 16,000 characters, with the number of bytes that are not shown among the facts."""
    async with pretended() as sandbox:
        sandbox.files[PLACE] = b"0123456789\n" * 10_000
        observation = await use(editor_tool(Editor()), sandbox, command="view", path=PLACE)
        assert "<response clipped><NOTE>" in observation.text
        assert len(observation.text) < RESPONSE_CHARS + 500
        assert observation.facts.omitted_bytes > 80_000


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"command": "view"}, "not_found"),
        ({"command": "explode"}, "command"),
        ({"command": "create"}, "bad_arguments"),
        ({"command": "str_replace", "new_str": "x"}, "bad_arguments"),
        ({"command": "str_replace", "old_str": ""}, "no_match"),
        ({"command": "insert", "new_str": "x"}, "bad_arguments"),
        ({"command": "insert", "insert_line": 1}, "bad_arguments"),
        ({"command": "undo_edit"}, "no_history"),
        ({"command": "view", "path": "relative"}, "path"),
        ({"command": "view", "path": "/a" + chr(0) + "b"}, "path"),
        ({"command": "view", "path": "/" + LONE_SURROGATE}, "path"),
        ({"command": "view", "path": "/" + "x" * 5000}, "path"),
        ({"command": "create", "file_text": LONE_SURROGATE}, "not_text"),
        ({"command": "create", "file_text": "x" * (EDITABLE_BYTES + 1)}, "unfit"),
        ({"command": "view", "path": "/work/lines", "view_range": [1]}, "bad_arguments"),
        ({"command": "view", "path": "/work/lines", "view_range": [4, 5]}, "no_line"),
        ({"command": "view", "path": "/work/lines", "view_range": [3, 2]}, "no_line"),
        ({"command": "insert", "path": "/work/lines", "insert_line": 4, "new_str": "x"}, "no_line"),
        ({"command": "insert", "path": "/work/lines", "insert_line": -1, "new_str": "x"}, "no_line"),
        ({"command": "view", "path": "/work/binary"}, "binary"),
        ({"command": "view", "path": "/work/huge"}, "unfit"),
        ({"command": "str_replace", "path": "/work/full", "old_str": "end", "new_str": "enden"}, "unfit"),
    ],
)
async def test_what_can_not_be_done_is_said_and_changes_nothing(arguments: dict[str, Any], code: str):
    """Never an exception; the facts have a code for it."""
    async with pretended() as sandbox:
        sandbox.files |= {
            "/work/lines": b"1\n2\n3\n",
            "/work/binary": b"\x7fELF\0\1",
            "/work/huge": b"x" * (EDITABLE_BYTES + 1),
            "/work/full": b"x" * (EDITABLE_BYTES - 3) + b"end",
        }
        before = dict(sandbox.files)
        observation = await use(editor_tool(Editor()), sandbox, **{"path": PLACE, **arguments})
        assert observation.facts.refused == code, observation.text[:500]
        assert observation.text
        assert sandbox.files == before


@pytest.mark.parametrize("view_range", ["[2, 3]", [2, 3], ["2", "3"], [2.0, 3.0]])
async def test_a_range_may_be_written_as_policies_write_it(view_range: Any):
    """JSON in a text, and numbers in texts."""
    async with pretended() as sandbox:
        sandbox.files[PLACE] = b"1\n2\n3\n4\n"
        said = await say(editor_tool(Editor()), sandbox, "view", view_range=view_range, old_str=None, insert_line=None)
        assert said.splitlines()[1:] == ["     2\t2", "     3\t3"]


async def test_windows_line_ends_are_neither_seen_nor_lost():
    """A policy that knows nothing of them edits over two lines."""
    async with pretended() as sandbox:
        sandbox.files[PLACE] = b"one\r\ntwo\r\nthree\r\n"
        tool = editor_tool(Editor())
        assert "\r" not in await say(tool, sandbox, "view")
        await say(tool, sandbox, "str_replace", old_str="one\ntwo", new_str="1\n2")
        await say(tool, sandbox, "insert", insert_line=3, new_str="four\n")
        assert sandbox.files[PLACE] == b"1\r\n2\r\nthree\r\nfour\r\n"


async def test_carriage_returns_that_are_written_are_meant():
    """Line ends can be changed by somebody who knows of them."""
    async with pretended() as sandbox:
        sandbox.files[PLACE] = b"one\r\ntwo\r\n"
        await say(editor_tool(Editor()), sandbox, "str_replace", old_str="one\r\n", new_str="one\n")
        assert sandbox.files[PLACE] == b"one\ntwo\r\n"


# --- history --------------------------------------------------------------------------------------------------------


async def test_an_edit_that_something_else_came_after_is_not_taken_back():
    """What a command wrote since is not lost; and the edit can be undone when it is gone again."""
    async with pretended() as sandbox:
        sandbox.files[PLACE] = b"a\n"
        tool = editor_tool(Editor())
        await say(tool, sandbox, "str_replace", old_str="a", new_str="b")
        sandbox.files[PLACE] = b"b\nmore\n"
        observation = await use(tool, sandbox, command="undo_edit", path=PLACE)
        assert (observation.facts.refused, sandbox.files[PLACE]) == ("changed", b"b\nmore\n")
        sandbox.files[PLACE] = b"b\n"
        await say(tool, sandbox, "undo_edit")
        assert sandbox.files[PLACE] == b"a\n"


async def test_history_is_bounded_by_edits_and_by_files():
    """The oldest goes first."""
    async with pretended() as sandbox:
        sandbox.files[PLACE] = b""
        tool = editor_tool(Editor())
        for number in range(HISTORY_EDITS + 3):
            await say(tool, sandbox, "insert", insert_line=0, new_str=str(number))
        said: list[Observation] = [
            await use(tool, sandbox, command="undo_edit", path=PLACE) for _ in range(HISTORY_EDITS + 1)
        ]
        assert [each.facts.refused for each in said] == [""] * HISTORY_EDITS + ["no_history"]
        assert sandbox.files[PLACE] == b"2\n1\n0\n"
        for number in range(HISTORY_FILES + 1):
            sandbox.files[f"/work/{number}"] = b""
            await say(tool, sandbox, "insert", f"/work/{number}", insert_line=0, new_str="x")
        assert (await use(tool, sandbox, command="undo_edit", path="/work/0")).facts.refused == "no_history"
        assert not (await use(tool, sandbox, command="undo_edit", path="/work/1")).facts.refused


async def test_history_is_bounded_in_bytes():
    """Two deletions of three megabytes are more than is kept: only the last can be undone."""
    async with pretended() as sandbox:
        sandbox.files |= {"/work/a": b"a" * (3 << 20) + b"\n-", "/work/b": b"b" * (3 << 20) + b"\n-"}
        editor = Editor()
        for path in ("/work/a", "/work/b"):
            content = await editor.read(sandbox, path)
            await editor.edit(sandbox, path, content, replace_one(content, content[:-1], b""))
        with pytest.raises(EditRefused, match="No edit"):
            await editor.undo(sandbox, "/work/a")
        assert len((await editor.undo(sandbox, "/work/b")).content) == (3 << 20) + 2


async def test_nothing_is_undone_in_another_sandbox():
    """Tools that a handler kept by mistake carry nothing from one episode to the next."""
    tool = editor_tool(Editor())
    async with pretended() as one:
        one.files[PLACE] = b"a\n"
        await say(tool, one, "str_replace", old_str="a", new_str="b")
        other = FakeSandbox(one._runtime, one.spec, "another", "job")
        one._runtime.live["another"] = other
        other.files[PLACE] = b"b\n"
        assert (await use(tool, other, command="undo_edit", path=PLACE)).facts.refused == "no_history"
        assert other.files[PLACE] == b"b\n"
        del one._runtime.live["another"]


class Full(FakeSandbox):
    """A sandbox whose disk is full half-way through a write."""

    async def write_file(self, path: str, data: bytes) -> None:
        if b"boom" in data:
            self.files[path] = data[:3]
            raise OSError("No space left on device")
        await super().write_file(path, data)


async def test_a_write_that_fails_half_way_is_put_right():
    """The file is as it was, the policy is told, and there is nothing to undo."""
    async with pretended() as made:
        sandbox = Full(made._runtime, made.spec, made.sandbox_id, made.job_id)
        sandbox.files[PLACE] = b"one\ntwo\n"
        tool = editor_tool(Editor())
        said = await say(tool, sandbox, "str_replace", old_str="two", new_str="boom")
        assert said == f"The file {PLACE} can't be written: No space left on device. It is as it was."
        assert sandbox.files[PLACE] == b"one\ntwo\n"
        assert (await use(tool, sandbox, command="undo_edit", path=PLACE)).facts.refused == "no_history"


def test_a_search_in_hostile_text_takes_no_time_to_speak_of():
    """A text that almost stands everywhere is looked for in one pass: a slow search would not end here."""
    content = b"a\r\n" * 500_000
    with pytest.raises(NotFoundOnce):
        replace_one(content, b"a\n" * 50_000 + b"b", b"")
    change = insert_after(content, 500_000, as_bytes("end", "new_str"))
    assert change.apply(content).endswith(b"a\r\nend\r\n")


@given(contents, st.integers(1, 40), st.integers(0, 40))
def test_some_lines_are_a_part_of_all(content: bytes, first: int, last: int):
    """Counting lines and taking some of them agrees with taking the file apart."""
    assert count_lines(content) == len(lines_of(content))
    assert lines_from(content, first, last) == lines_of(content)[first - 1 : max(first - 1, last)]


def test_lines_are_found_in_a_long_file():
    """Also where it is halved many times to find one."""
    content = b"".join(b"%d\n" % number * (number % 3) for number in range(20_000)) + b"end"
    lines = lines_of(content)
    for first in (1, 2, 777, 5_000, len(lines) - 1, len(lines), len(lines) + 1):
        assert lines_from(content, first, first + 3) == lines[first - 1 : first + 3]


def test_all_places_are_replaced_however_many():
    """None is left over in silence; what would be too much work is refused."""
    content = b"a b\r\n" * 5000
    change = replace_all(content, b"a", b"x\ny")
    assert change.apply(content) == b"x\r\ny b\r\n" * 5000
    with pytest.raises(EditRefused, match="too many places"):
        replace_all(b"a" * 50_001, b"a", b"b")


def test_places_that_overlap_are_replaced_once():
    """A text with a line end of one kind can begin within one of the other kind."""
    content = b"a\na\r\na"
    assert replace_all(content, b"a\na", b"x").apply(content) == b"x\r\na"


def test_halves_of_line_ends_are_not_looked_at_for_ever():
    """A file of such line ends alone, and a text that begins with the second half of one."""
    with pytest.raises(EditRefused, match="too many places"):
        replace_one(b"\r\n" * 60_000, b"\n", b"x")


@pytest.mark.parametrize(
    "arguments",
    [
        {"command": "view"},
        {"command": "view", "concise": True},
        {"command": "view", "view_range": [900_000, -1]},
        {"command": "insert", "insert_line": 1_000_000, "new_str": "x"},
        {"command": "insert", "insert_line": 2_000_000, "new_str": "x"},
    ],
    ids=["view", "concise", "a range", "insert", "no such line"],
)
async def test_a_file_of_line_ends_is_not_taken_apart(arguments: dict[str, Any]):
    """A million lines cost the memory and time of a few copies of the file, and not of a million objects."""
    path = "/work/f.py"
    async with pretended() as sandbox:
        sandbox.files[path] = b"\n" * 1_000_000
        (tool,) = [tool for tool in preset("r2e").tools() if tool.schema.name == "file_editor"]
        await use(tool, sandbox, path=path, **arguments)
        sandbox.files[path] = b"\n" * 1_000_000
        tracemalloc.start()
        try:
            await use(tool, sandbox, path=path, **arguments)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 6_000_000


async def test_what_can_not_be_looked_at_is_not_said_to_exist(monkeypatch: pytest.MonkeyPatch):
    """An agent may remove the very program that files are read with."""

    async def broken(path: str, *, max_bytes: int) -> bytes:
        raise OSError(f"{path}: the sandbox refused (127)")

    async with pretended() as sandbox:
        monkeypatch.setattr(sandbox, "read_file", broken)
        observation = await use(editor_tool(Editor()), sandbox, command="create", path=PLACE, file_text="x")
        assert observation.text == f"The file {PLACE} can't be written: {PLACE}: the sandbox refused (127)."
        assert (observation.facts.refused, sandbox.files) == ("io", {})
