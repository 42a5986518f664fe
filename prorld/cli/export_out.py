"""Where an export goes: a file that appears when it is whole, or a stream; and how far it is, for who waits."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal, Protocol, TextIO

import msgspec

from prorld.cli.exits import UsageError
from prorld.cli.output import count
from prorld.export.formats import export
from prorld.export.names import FORMATS, Format
from prorld.store.archive import Found

__all__ = ["Kind", "Progress", "Rows", "Sink", "Withheld", "open_sink"]

Kind = Literal["jsonl", "parquet"] | Format

SHOW_EVERY_S = 0.2


class Withheld(Exception):
    """Raised in the block of a sink: there is nothing that a file should appear for."""


class Sink(Protocol):
    """Something that jobs are written to, one after the other."""

    @property
    def bytes_written(self) -> int:
        """So far, about."""
        ...

    def write(self, found: Found) -> None:
        """One job."""
        ...


class Lines:
    """One document a line."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._encoder = msgspec.json.Encoder()
        self.bytes_written = 0

    def write(self, found: Found) -> None:
        """The trajectory, or the record where none was asked for."""
        line = self._encoder.encode(found.record if found.trajectory is None else found.trajectory) + b"\n"
        self._out.write(line)
        self.bytes_written += len(line)


class Rows:
    """The rows of a trainer's format, one a line. ``rows`` are how many so far, ``empty`` the jobs that gave none."""

    def __init__(self, out: BinaryIO, form: Format) -> None:
        self._out = out
        self._form: Format = form
        self._encoder = msgspec.json.Encoder()
        self.bytes_written = self.rows = self.empty = 0

    def write(self, found: Found) -> None:
        """The rows of a job; ``NotExportable`` where the format has no place for it, and nothing is written then."""
        assert found.trajectory is not None, "rows are made of trajectories"
        made = export(found.trajectory, self._form)
        written = b"".join(self._encoder.encode(row) + b"\n" for row in made)
        self._out.write(written)
        self.bytes_written += len(written)
        self.rows += len(made)
        self.empty += not made


@contextmanager
def open_sink(kind: Kind, output: str, *, trajectories: bool) -> Iterator[Sink]:
    """A sink of this format into this file, ``-`` for stdout. What fails in the block leaves no file behind."""
    with _stream(output) as out:
        if kind == "jsonl":
            yield Lines(out)
            return
        if kind in FORMATS:
            yield Rows(out, kind)
            return
        if output == "-" and sys.stdout.isatty():
            raise UsageError("Parquet is not for a terminal; name a file with -o")
        from prorld.cli.export_parquet import columns

        with columns(out, trajectories=trajectories) as sink:
            yield sink


@contextmanager
def _stream(output: str) -> Iterator[BinaryIO]:
    if output == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    target = Path(output)
    half = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        out = half.open("xb")
    except OSError as exc:
        raise UsageError(f"{output} can't be written: {exc.strerror or exc}") from exc
    try:
        with out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        half.replace(target)
    except OSError as exc:
        if isinstance(exc, BrokenPipeError):
            raise
        raise UsageError(f"{output} can't be written: {exc.strerror or exc}") from exc
    finally:
        half.unlink(missing_ok=True)


class Progress:
    """A line on a terminal that says how far it is."""

    def __init__(self, stream: TextIO, *, on: bool) -> None:
        self._stream = stream
        self._on = on
        self._shown = 0.0

    def show(self, jobs: int, size: int) -> None:
        """Now and then."""
        now = time.monotonic()
        if self._on and now - self._shown >= SHOW_EVERY_S:
            self._shown = now
            self._stream.write(f"\r\x1b[K{count(jobs, 'job')}, {size / (1 << 20):.1f} MiB")
            self._stream.flush()

    def clear(self) -> None:
        """Leave the line empty for what comes next."""
        if self._on and self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
