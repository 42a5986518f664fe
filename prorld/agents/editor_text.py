"""What an edit does to the bytes of a file. Pure: no file is touched here.

Files stay bytes: what is not text, tabs and line endings are never written anew. A policy that writes no carriage
returns does not have to know of them: its line ends stand for those that the file has.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import msgspec

__all__ = [
    "EDITABLE_BYTES",
    "Change",
    "EditRefused",
    "as_bytes",
    "count_lines",
    "insert_after",
    "line_of",
    "lines_from",
    "lines_of",
    "numbered",
    "replace_all",
    "replace_one",
]

EDITABLE_BYTES = 4 << 20
# So many places are looked for where a text is not unique, and so many lines are named.
MATCHES_MAX = 1000
LINES_NAMED_MAX = 50
# All of this runs on the event loop, and a file may be nothing but line ends: what is done for each place is bounded.
REPLACED_MAX = 50_000
_COUNTED_BYTES = 1 << 12


class EditRefused(Exception):
    """Why nothing was edited, in words for the policy and as a code for everybody else."""

    def __init__(self, text: str, code: str) -> None:
        super().__init__(text)
        self.text = text
        self.code = code


class NotFoundOnce(Exception):
    """A text is nowhere (no ``lines``) or in several places."""

    def __init__(self, lines: list[int]) -> None:
        super().__init__(f"at lines {lines}")
        self.lines = lines


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """At an offset some bytes go and others come."""

    at: int
    removed: bytes
    added: bytes

    def apply(self, content: bytes) -> bytes:
        """The content with the change."""
        return content[: self.at] + self.added + content[self.at + len(self.removed) :]

    def revert(self, content: bytes) -> bytes:
        """The content as it was before the change."""
        return content[: self.at] + self.removed + content[self.at + len(self.added) :]


def as_bytes(text: str, name: str) -> bytes:
    """What the policy wrote, as it will stand in the file."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise EditRefused(f"{name} contains a lone surrogate, which is not text.", "not_text") from None


def replace_one(content: bytes, old: bytes, new: bytes) -> Change:
    """Replace the one place where ``old`` stands. Raises ``NotFoundOnce``."""
    places = _all_places(content, old, MATCHES_MAX)
    if len(places) != 1:
        raise NotFoundOnce([line_of(content, at) for at, _ in places[:LINES_NAMED_MAX]])
    ((at, found),) = places
    return Change(at=at, removed=found, added=_with_endings(new, _ending(content, old, found)))


def replace_all(content: bytes, old: bytes, new: bytes) -> Change:
    """Replace ``old`` wherever it stands, as one change.

    Raises ``NotFoundOnce`` where it stands nowhere, and ``EditRefused`` where it stands in too many places.
    """
    places = _all_places(content, old, REPLACED_MAX + 1)
    if not places:
        raise NotFoundOnce([])
    if len(places) > REPLACED_MAX:
        raise _too_many()
    pieces: list[bytes] = []
    instead: dict[bytes, bytes] = {}
    end = start = places[0][0]
    for at, found in places:
        if at < end:  # written in the other way it begins within the last one
            continue
        if found not in instead:
            instead[found] = _with_endings(new, _ending(content, old, found))
        pieces += [content[end:at], instead[found]]
        end = at + len(found)
    return Change(at=start, removed=content[start:end], added=b"".join(pieces))


def insert_after(content: bytes, line: int, text: bytes) -> Change:
    """Insert whole lines after a line, 0 for the beginning. Raises ``IndexError`` where there is no such line."""
    count = count_lines(content)
    if not 0 <= line <= count:
        raise IndexError(line)
    ending = _dominant(content)
    added = _with_endings(text.removesuffix(b"\r\n" if text.endswith(b"\r\n") else b"\n"), ending)
    if line == count and content and not content.endswith(b"\n"):
        return Change(at=len(content), removed=b"", added=ending + added)
    return Change(at=_start_of(content, line + 1), removed=b"", added=added + ending)


def lines_of(content: bytes) -> list[bytes]:
    """The lines without their ends; a file that ends with a newline has no empty line after it."""
    lines = content.split(b"\n")
    return lines[:-1] if not lines[-1] else lines


def count_lines(content: bytes) -> int:
    """How many lines ``lines_of`` would give."""
    return content.count(b"\n") + bool(content and not content.endswith(b"\n"))


def lines_from(content: bytes, first: int, last: int) -> list[bytes]:
    """The lines from one to another, counted from 1, as ``lines_of`` would give them."""
    count = max(0, min(last, count_lines(content)) - first + 1)
    return content[_start_of(content, first) :].split(b"\n", count)[:count] if count else []


def line_of(content: bytes, at: int) -> int:
    """The number of the line that an offset is in."""
    return content.count(b"\n", 0, at) + 1


def numbered(lines: list[bytes], first: int, max_chars: int) -> tuple[str, bool]:
    """Lines as ``cat -n`` shows them, and whether all of them fitted. What is not UTF-8 is shown as such."""
    shown: list[str] = []
    room = max_chars
    for number, line in enumerate(lines, first):
        # A line that is longer than what will be shown is not decoded to its end.
        text = f"{number:6d}\t{line[: 4 * room + 4].decode('utf-8', 'replace').removesuffix(chr(13))}\n"
        shown.append(text[:room])
        room -= len(text)
        if room < 0:
            return "".join(shown), False
    return "".join(shown), True


def _ways_to_write(content: bytes, old: bytes) -> list[bytes]:
    if b"\n" not in old or b"\r" in old or b"\r\n" not in content:
        return [old]
    return [old, old.replace(b"\n", b"\r\n")]


def _all_places(content: bytes, old: bytes, places_max: int) -> list[tuple[int, bytes]]:
    """Where it stands, and as what, in order; of each way to write it at most so many."""
    ways = _ways_to_write(content, old)
    return sorted(place for written in ways for place in islice(_places(content, written), places_max))


def _places(content: bytes, written: bytes) -> Iterator[tuple[int, bytes]]:
    at, halves = content.find(written), 0
    while at >= 0:
        # A newline at its beginning must not be the second half of a line end.
        halved = written.startswith(b"\n") and content[at - 1 : at] == b"\r"
        if not halved:
            yield at, written
        elif (halves := halves + 1) > REPLACED_MAX:
            raise _too_many()
        at = content.find(written, at + (1 if halved else len(written)))


def _too_many() -> EditRefused:
    return EditRefused("Nothing was replaced: there are too many places that look like it.", "ambiguous")


def _start_of(content: bytes, line: int) -> int:
    """Where a line begins, counted from 1. Halves what is looked at: a list of millions of lines takes too long."""
    start, end, left = 0, len(content), line - 1
    while end - start > _COUNTED_BYTES:
        middle = (start + end) // 2
        ends = content.count(b"\n", start, middle)
        if ends >= left:
            end = middle
        else:
            start, left = middle, left - ends
    for _ in range(left):
        start = content.index(b"\n", start) + 1
    return start


def _ending(content: bytes, old: bytes, found: bytes) -> bytes:
    """The line end that new lines get at this place."""
    if b"\r" in old:
        return b"\n"
    if b"\n" in found:
        return b"\r\n" if b"\r\n" in found else b"\n"
    return _dominant(content)


def _dominant(content: bytes) -> bytes:
    returns = content.count(b"\r\n")
    return b"\r\n" if 2 * returns > content.count(b"\n") else b"\n"


def _with_endings(text: bytes, ending: bytes) -> bytes:
    return text if ending == b"\n" or b"\r" in text else text.replace(b"\n", ending)
