"""Search in the files of a sandbox, by name and by content, bounded, with what it has itself: bash, grep, find.

Hidden files are left out, as are binary ones where content is looked for. Links to directories are not followed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from prorld.agents.helper import RESTARTED, Answer, run_helper
from prorld.agents.listing import visible
from prorld.agents.observation import Observation, clip, refusal
from prorld.agents.tools import Tool, sandbox_tool
from prorld.sandbox.contract import Sandbox

__all__ = [
    "RESULTS_MAX",
    "find_file_tool",
    "glob_tool",
    "grep_tool",
    "search_dir_tool",
    "search_file_tool",
    "search_tool",
]

RESULTS_MAX = 100
LINE_CHARS = 300

# $1 is the place, $2 the pattern. The answer begins with how it went: D, names are relative to the place; F, the place
# is a file; else nothing was searched.
_PLACE = """
[[ -e $1 ]] || { printf 'M\\0'; exit; }
k=F; [[ ! -d $1 ]] || k=D
if [[ $k = D ]]; then cd -- "$1" || { printf 'X\\0'; exit; }; elif [[ ! -f $1 ]]; then printf 'S\\0'; exit; fi
"""
_IN_DIRECTORY = """
[[ $k = D ]] || { printf 'N\\0'; exit; }
"""
_GREP = """
type -P grep >/dev/null || { printf 'T\\0'; exit; }
grep HOW -e "$2" /dev/null; (( $? < 2 )) || { printf 'P\\0'; exit; }
printf '%s\\0' $k
if [[ $k = F ]]; then grep -nIHZ HOW -e "$2" -- "$1"; exit; fi
o=; [[ -z $3 ]] || o=--include=$3
grep -rnIHZ HOW --exclude-dir='.?*' --exclude='.*' ${o:+"$o"} -e "$2" .
"""
_FIND = (
    _IN_DIRECTORY
    + """
type -P find >/dev/null || { printf 'T\\0'; exit; }
printf 'D\\0'; find . -name '.?*' -prune -o -name "$2" -print0
"""
)
_GLOB = (
    _IN_DIRECTORY
    + """
shopt -s nullglob globstar; i=0; printf 'D\\0'
for f in $2; do [[ -e $f || -L $f ]] && printf '%s\\0' "$f"; (( ++i > 1000 )) && break; done
"""
)
_NOT_SEARCHED = {
    b"M": "{} does not exist",
    b"X": "{} can't be entered",
    b"S": "{} is neither a file nor a directory",
    b"N": "{} is not a directory",
    b"P": "that is no regular expression",
    b"T": "the program for it is not in this sandbox",
}
_HIT = re.compile(rb"([^\0]*)\0([0-9]+):(.*)")


class Hit(msgspec.Struct, frozen=True):
    """One line of one file."""

    path: str
    line: int
    text: str


class _Grep(msgspec.Struct, frozen=True, kw_only=True):
    pattern: Annotated[str, Meta(description="An extended regular expression.")]
    path: Annotated[str, Meta(description="The directory or file to look in; where you are by default.")] = "."
    include: Annotated[str, Meta(description="Only files whose names match this, such as *.py.")] = ""


class _Glob(msgspec.Struct, frozen=True, kw_only=True):
    pattern: Annotated[str, Meta(description="Such as *.py or src/**/test_*.py; ** stands for any directories.")]
    path: Annotated[str, Meta(description="The directory to look in; where you are by default.")] = "."


class _FindFile(msgspec.Struct, frozen=True, kw_only=True):
    file_name: Annotated[str, Meta(description="The file's name; * and ? stand for anything.")]
    dir: Annotated[str, Meta(description="The directory to look in; where you are by default.")] = "."


class _SearchDir(msgspec.Struct, frozen=True, kw_only=True):
    search_term: Annotated[str, Meta(description="The text to look for, as it stands.")]
    dir: Annotated[str, Meta(description="The directory to look in; where you are by default.")] = "."


class _SearchFile(msgspec.Struct, frozen=True, kw_only=True):
    search_term: Annotated[str, Meta(description="The text to look for, as it stands.")]
    file: Annotated[str, Meta(description="The file to look in; the open one by default.")] = ""


class _Search(msgspec.Struct, frozen=True, kw_only=True):
    search_term: Annotated[str, Meta(description="The text to look for, as it stands.")]
    path: Annotated[str, Meta(description="The directory or file to look in; where you are by default.")] = "."


def grep_tool() -> Tool:
    """Lines that match a regular expression."""

    async def run(given: _Grep, sandbox: Sandbox, limit_s: float) -> Observation:
        answer = await _grep(sandbox, given.path, given.pattern, limit_s, include=given.include)
        return answer if isinstance(answer, Observation) else _lines(answer, given.pattern, given.path)

    return sandbox_tool("grep", "Find lines in files by a regular expression.", _Grep, run)


def glob_tool() -> Tool:
    """Files whose paths match a pattern."""

    async def run(given: _Glob, sandbox: Sandbox, limit_s: float) -> Observation:
        answer = await _ask(sandbox, _GLOB, given.path, [given.pattern], limit_s)
        return answer if isinstance(answer, Observation) else _names(answer, given.pattern, given.path)

    return sandbox_tool("glob", "Find files by a pattern of their paths.", _Glob, run)


def find_file_tool() -> Tool:
    """Files by their name, anywhere below a directory."""

    async def run(given: _FindFile, sandbox: Sandbox, limit_s: float) -> Observation:
        answer = await _ask(sandbox, _FIND, given.dir, [given.file_name], limit_s)
        return answer if isinstance(answer, Observation) else _names(answer, given.file_name, given.dir)

    return sandbox_tool("find_file", "Find files by their name, in a directory and all below it.", _FindFile, run)


def search_dir_tool() -> Tool:
    """Files that hold a text, with the number of lines in each."""

    async def run(given: _SearchDir, sandbox: Sandbox, limit_s: float) -> Observation:
        answer = await _grep(sandbox, given.dir, given.search_term, limit_s, fixed=True)
        return answer if isinstance(answer, Observation) else _counts(answer, given.search_term, given.dir)

    return sandbox_tool("search_dir", "Find the files below a directory that hold a text.", _SearchDir, run)


def search_file_tool(open_file: Callable[[], str] = lambda: "") -> Tool:
    """Lines of one file that hold a text. ``open_file`` is what is searched where none is named."""

    async def run(given: _SearchFile, sandbox: Sandbox, limit_s: float) -> Observation:
        place = given.file or open_file()
        if not place:
            return refusal("No file is open: name the one to look in.", "bad_arguments")
        answer = await _grep(sandbox, place, given.search_term, limit_s, fixed=True)
        return answer if isinstance(answer, Observation) else _lines(answer, given.search_term, place)

    return sandbox_tool("search_file", "Find the lines of a file that hold a text.", _SearchFile, run)


def search_tool() -> Tool:
    """Lines that hold a text, in a file or below a directory."""

    async def run(given: _Search, sandbox: Sandbox, limit_s: float) -> Observation:
        answer = await _grep(sandbox, given.path, given.search_term, limit_s, fixed=True)
        return answer if isinstance(answer, Observation) else _lines(answer, given.search_term, given.path)

    return sandbox_tool("search", "Find lines that hold a text, in a file or below a directory.", _Search, run)


async def _grep(
    sandbox: Sandbox, place: str, pattern: str, limit_s: float, *, include: str = "", fixed: bool = False
) -> Answer | Observation:
    if not pattern:
        return refusal("Nothing was searched: there is nothing to look for.", "bad_arguments")
    if fixed and "\n" in pattern:
        return refusal("Nothing was searched: a text of more than one line can't be looked for.", "bad_arguments")
    script = _GREP.replace("HOW", "-F" if fixed else "-E")
    return await _ask(sandbox, script, place, [pattern, include], limit_s)


async def _ask(sandbox: Sandbox, script: str, place: str, more: list[str], limit_s: float) -> Answer | Observation:
    """What the script found, or the observation that says why it could not look."""
    # A place that begins with a dash is a place and no option.
    where = place if place.startswith("/") else f"./{place}"
    try:
        answer = await run_helper(sandbox, _PLACE + script, [where, *more], limit_s=limit_s)
    except ValueError as exc:
        return refusal(f"Nothing was searched: {exc}.", "unusable")
    kind, _, rest = answer.output.partition(b"\0")
    if (why := _NOT_SEARCHED.get(kind)) is not None:
        return refusal(f"Nothing was searched: {why.format(clip(place, 500))}.", "not_searched")
    if kind not in (b"D", b"F") and not answer.facts.timed_out:
        return refusal("Nothing was searched: the shell gives no answer now.", "not_searched")
    return msgspec.structs.replace(answer, output=rest)


def _hits(answer: Answer, where: str) -> list[Hit]:
    found: list[Hit] = []
    # What follows the last newline was cut off, or is nothing.
    for piece in answer.output.split(b"\n")[:-1]:
        if (match := _HIT.fullmatch(piece)) is not None:
            text = match[3][: 4 * LINE_CHARS].decode("utf-8", "replace").rstrip("\r")[:LINE_CHARS]
            found.append(Hit(_path(match[1], where), int(match[2]), text))
    return found


def _path(name: bytes, where: str) -> str:
    """A name as it is found from where the search was asked for."""
    shown = visible(name).removeprefix("./")
    # A file that was named itself comes back by its name.
    if where in (".", "./") or shown.startswith("/") or shown == where.removeprefix("./"):
        return shown
    return f"{where.rstrip('/')}/{shown}"


def _lines(answer: Answer, what: str, where: str) -> Observation:
    hits = _hits(answer, where)
    shown = [f"{hit.path}:{hit.line}:{hit.text}" for hit in hits[:RESULTS_MAX]]
    return _found(answer, shown, len(hits), "lines", what, where)


def _counts(answer: Answer, what: str, where: str) -> Observation:
    counts = Counter(hit.path for hit in _hits(answer, where))
    shown = [f"{path} ({count} lines)" for path, count in sorted(counts.items())[:RESULTS_MAX]]
    return _found(answer, shown, len(counts), "files", what, where)


def _names(answer: Answer, what: str, where: str) -> Observation:
    names = sorted(_path(field, where) for field in answer.fields)
    return _found(answer, names[:RESULTS_MAX], len(names), "files", what, where)


def _found(answer: Answer, shown: list[str], count: int, of_what: str, what: str, where: str) -> Observation:
    """The results under a line that says how many there are, and truly says what is not known."""
    about = f"for {clip(what, 200)!r} in {clip(where, 500)}"
    more = answer.cut or not answer.ended
    notes = [RESTARTED] if answer.facts.restarted else []
    if not count and not more:
        return Observation(text="\n".join([f"Found no {of_what} {about}.", *notes]), facts=answer.facts)
    head = f"Found {'at least ' if more else ''}{count} {of_what} {about}{':' if count else '.'}"
    if count > len(shown):
        notes.append(f"[the first {len(shown)} of them are shown]")
    if answer.facts.timed_out:
        notes.append("[the search took too long and was stopped: look in fewer places]")
    return Observation(text="\n".join([head, *shown, *notes]), facts=answer.facts)
