"""What was found out, line by line on disk, so that the same command goes on where it was ended, however it was.

A line is whole or it is not there: what a kill left of the last one is cut off. One process at a time holds it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec

from prorld.errors import Conflict
from prorld_swe.factory.baseline import Baseline
from prorld_swe.factory.trial import Verdict

__all__ = ["Entry", "Journal", "Measured", "Tried", "open_journal"]

JOURNAL_BYTES_MAX = 4 << 30


class Measured(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="baseline"):
    """A package's baseline, or why there is none. ``package`` names the sdist by hash, and how it was asked."""

    package: str
    name: str
    version: str
    baseline: Baseline | None = None
    refused: str = ""
    seconds: float = 0.0


class Tried(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="trial"):
    """A bug that was tried, with its task where it was kept."""

    package: str
    digest: str
    verdict: Verdict
    operators: tuple[str, ...]
    functions: tuple[str, ...]
    seconds: float
    f2p: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    detail: str = ""
    row: dict[str, Any] | None = None


Entry = Measured | Tried
_DECODER = msgspec.json.Decoder(Entry)


class Journal:
    """The entries so far, and a file that more are added to."""

    def __init__(self, file: IO[bytes], entries: list[Entry]) -> None:
        self._file = file
        self._measured = {each.package: each for each in entries if isinstance(each, Measured)}
        self._tried: dict[str, dict[str, Tried]] = {}
        for each in entries:
            if isinstance(each, Tried):
                self._tried.setdefault(each.package, {})[each.digest] = each

    def add(self, entry: Entry) -> None:
        """Write it down; it is on disk when this returns."""
        self._file.write(msgspec.json.encode(entry) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        if isinstance(entry, Measured):
            self._measured[entry.package] = entry
        else:
            self._tried.setdefault(entry.package, {})[entry.digest] = entry

    def measured(self, package: str) -> Measured | None:
        """The baseline of a package."""
        return self._measured.get(package)

    def tried(self, package: str) -> dict[str, Tried]:
        """The bugs of a package that were tried, by digest, in their order."""
        return self._tried.get(package, {})

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every task, each once: a package that was asked in two ways can lead to the same bug."""
        seen: set[str] = set()
        for trials in self._tried.values():
            for each in trials.values():
                if each.row is not None and each.row["instance_id"] not in seen:
                    seen.add(each.row["instance_id"])
                    yield each.row


@contextmanager
def open_journal(directory: Path) -> Iterator[Journal]:
    """The journal of a work directory. Raises ``Conflict`` where another process has it. Blocks."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "journal.jsonl"
    with path.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(f"another process is at work in {directory}") from None
        entries, whole = _read(path, file)
        file.truncate(whole)
        file.seek(0, os.SEEK_END)
        yield Journal(file, entries)


def _read(path: Path, file: IO[bytes]) -> tuple[list[Entry], int]:
    if os.fstat(file.fileno()).st_size > JOURNAL_BYTES_MAX:
        raise Conflict(f"{path} is over {JOURNAL_BYTES_MAX >> 30} GiB")
    entries: list[Entry] = []
    whole = 0
    file.seek(0)
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            break
        try:
            entries.append(_DECODER.decode(line))
        except msgspec.DecodeError as exc:
            raise Conflict(f"{path}, line {number} is no entry of this factory: {exc}") from exc
        whole += len(line)
    return entries, whole
