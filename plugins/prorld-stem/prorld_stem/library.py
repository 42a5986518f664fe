"""Full-text search in texts of the operator's own: an index of SQLite's FTS5 in one file, built once."""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, BinaryIO, Final
from urllib.parse import quote

import msgspec
import trio
from msgspec import Meta

from prorld.agents import SearchHit
from prorld.handlers import HandlerError

__all__ = ["Library", "Page", "build_library", "pages_of"]

FORMAT: Final = 1
FILE_BYTES: Final = 64 << 20
LINE_BYTES: Final = 4 << 20
PAGE_CHARS: Final = 4_000
PAGES_MAX: Final = 20_000_000
WORDS_MAX: Final = 24
WORD_CHARS: Final = 64
QUERY_S: Final = 5.0
EXCERPT_WORDS: Final = 48
READERS: Final = 4
STEPS: Final = 20_000
TEXT_NAMES: Final = (".txt", ".md", ".rst", ".tex")

_WORD = re.compile(r"[^\W_]+(?:['\u2019][^\W_]+)?")
_MADE = """
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
CREATE VIRTUAL TABLE pages USING fts5(
    title, body, address UNINDEXED, tokenize = "porter unicode61 remove_diacritics 2"
);
"""


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """One text that can be found; a line of JSONL has these fields."""

    text: Annotated[str, Meta(min_length=1)]
    title: str = ""
    address: str = ""


class Library:
    """A search provider over one index. Every search opens it anew, read-only, in a thread, and is bounded in time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._readers = trio.CapacityLimiter(READERS)

    def check(self) -> None:
        """Raise ``HandlerError`` where there is no index that can be searched. Blocks."""
        self._find('"a"', 1)

    async def search(self, query: str, *, limit: int) -> Sequence[SearchHit]:
        """The best pages for the words of a query: whatever it holds beside words has no meaning here."""
        words = [word[:WORD_CHARS] for word in _WORD.findall(query)[:WORDS_MAX]]
        if not words:
            raise ValueError("the query holds no word")
        wanted = " OR ".join(f'"{word}"' for word in words)
        return await trio.to_thread.run_sync(self._find, wanted, limit, limiter=self._readers)

    def _find(self, wanted: str, limit: int) -> list[SearchHit]:
        until = time.monotonic() + QUERY_S
        try:
            with closing(sqlite3.connect(_address(self._path), uri=True)) as index:
                index.set_progress_handler(lambda: time.monotonic() > until, STEPS)
                if index.execute("PRAGMA user_version").fetchone() != (FORMAT,):
                    raise HandlerError(f"{self._path} is no index of texts, or of another version", code="no_library")
                rows = index.execute(
                    "SELECT title, address, snippet(pages, 1, '', '', ' ... ', ?) FROM pages"
                    " WHERE pages MATCH ? ORDER BY bm25(pages, 4.0, 1.0), rowid LIMIT ?",
                    (EXCERPT_WORDS, wanted, limit),
                ).fetchall()
        except sqlite3.Error as exc:
            if time.monotonic() > until:
                raise ValueError("the query takes too long: use fewer and rarer words") from exc
            raise HandlerError(f"the index {self._path} can't be searched: {exc}", code="no_library") from exc
        return [SearchHit(title=title, address=address, excerpt=excerpt) for title, address, excerpt in rows]


def build_library(sources: Sequence[Path], target: Path) -> int:
    """Make an index of the files and directories; how many pages it has. It is complete from when it is there. Blocks.

    Raises ``HandlerError`` naming the file, and the line, that can't be used.
    """
    draft = target.with_name(f".{target.name}.{os.getpid()}.part")
    draft.unlink(missing_ok=True)
    count = 0
    try:
        with closing(sqlite3.connect(draft)) as index:
            index.executescript(_MADE)
            with index:
                for source in sources:
                    for page in pages_of(source):
                        count += 1
                        if count > PAGES_MAX:
                            raise HandlerError(f"there are more than {PAGES_MAX} pages", code="library_too_large")
                        index.execute("INSERT INTO pages VALUES (?, ?, ?)", (page.title, page.text, page.address))
            with index:
                index.execute("INSERT INTO pages(pages) VALUES ('optimize')")
            index.execute(f"PRAGMA user_version = {FORMAT}")
        if not count:
            raise HandlerError("there is no page in what was named", code="library_empty")
        draft.replace(target)
    except (OSError, sqlite3.Error) as exc:
        raise HandlerError(f"the index {target} can't be made: {exc}", code="library_failed") from exc
    finally:
        draft.unlink(missing_ok=True)
    return count


def pages_of(source: Path) -> Iterator[Page]:
    """The pages of a JSONL file, a text file, or all such files below a directory, in order of their names. Blocks."""
    if source.is_dir():
        for path in sorted(source.rglob("*")):
            if path.is_file() and path.suffix in {".jsonl", *TEXT_NAMES}:
                yield from pages_of(path)
        return
    try:
        with source.open("rb") as file:
            if source.suffix == ".jsonl":
                yield from _of_lines(file, source)
                return
            data = file.read(FILE_BYTES + 1)
    except OSError as exc:
        raise HandlerError(f"{source} can't be read: {exc.strerror}", code="library_failed") from exc
    if len(data) > FILE_BYTES:
        raise HandlerError(f"{source} is longer than {FILE_BYTES} bytes", code="library_failed")
    yield from _pieces(Page(text=data.decode("utf-8", "replace") or " ", title=source.stem, address=source.name))


def _of_lines(file: BinaryIO, source: Path) -> Iterator[Page]:
    decoder = msgspec.json.Decoder(Page)
    number = 0
    while line := file.readline(LINE_BYTES + 1):
        number += 1
        if len(line) > LINE_BYTES:
            raise HandlerError(f"{source}, line {number} is longer than {LINE_BYTES} bytes", code="library_failed")
        if not line.strip():
            continue
        try:
            page = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeError) as exc:
            raise HandlerError(f"{source}, line {number}: {exc}", code="library_failed") from exc
        yield from _pieces(page)


def _pieces(page: Page) -> Iterator[Page]:
    """A long text as several pages, cut between paragraphs where there are any."""
    rest = page.text.replace("\0", "").strip()
    while rest:
        cut = len(rest)
        if cut > PAGE_CHARS:
            cut = max(rest.rfind("\n\n", 0, PAGE_CHARS), rest.rfind("\n", PAGE_CHARS // 2, PAGE_CHARS))
            cut = cut if cut > PAGE_CHARS // 4 else PAGE_CHARS
        yield Page(text=rest[:cut], title=page.title[:300], address=page.address[:1000])
        rest = rest[cut:].strip()


def _address(path: Path) -> str:
    return f"file:{quote(str(path.absolute()))}?mode=ro"
