"""Rows of a file: JSON by line, one JSON value, CSV with a head, Parquet, or the whole content. Bounded, and numbered.

A row that can't be read is handed on with what is wrong with it, where the next one can be read all the same.
"""

from __future__ import annotations

import csv
import io
import tempfile
from collections.abc import Iterator
from typing import IO, Any, cast

import msgspec

from prorld.cli.data_archive import ArchiveError, Member, opened, plain_name
from prorld.cli.exits import UsageError
from prorld.cli.extras import cure
from prorld.handlers.datasets import Rows

__all__ = ["LINE_BYTES_MAX", "Row", "rows_of", "shape_of"]

LINE_BYTES_MAX = 64 << 20
VALUE_BYTES_MAX = 1 << 30
PARQUET_BYTES_MAX = 4 << 30
ROWS_PER_BATCH = 64

_COPY_BYTES = 1 << 20
_BY_SUFFIX: dict[str, Rows] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".parquet": "parquet",
}  # fmt: skip


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A row and the line, or the place, that it is at; ``error`` says why there is no value."""

    at: str
    value: dict[str, Any] | bytes | None = None
    error: str | None = None


def shape_of(name: str, usual: Rows) -> Rows:
    """How a local file is read: by its name, else as the set's rows usually are."""
    if usual == "bytes":
        return usual
    plain = plain_name(name).lower()
    found: list[Rows] = [shape for suffix, shape in _BY_SUFFIX.items() if plain.endswith(suffix)]
    return found[0] if found else usual


def rows_of(member: Member, shape: Rows) -> Iterator[Row]:
    """The rows in order. ``ArchiveError`` where the file itself can't be read on."""
    with opened(member) as stream:
        if shape == "jsonl":
            yield from _lines(stream, member)
        elif shape == "json":
            yield from _json(stream, member)
        elif shape == "csv":
            yield from _csv(stream, member)
        elif shape == "parquet":
            yield from _parquet(stream, member)
        else:
            yield Row(at="", value=_all(stream, member))


def _lines(stream: io.BufferedReader, member: Member) -> Iterator[Row]:
    decoder = msgspec.json.Decoder()
    number = 0
    while line := stream.readline(LINE_BYTES_MAX + 1):
        number += 1
        if len(line) > LINE_BYTES_MAX:
            raise ArchiveError(f"{member.where}, line {number} is longer than {LINE_BYTES_MAX} bytes")
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")  # that some editors write
        if line.strip():
            yield _row(decoder, line, f"line {number}")


def _row(decoder: msgspec.json.Decoder[Any], line: bytes, at: str) -> Row:
    try:
        return _object(decoder.decode(line), at)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        return Row(at=at, error=f"no JSON: {exc}")


def _object(value: object, at: str) -> Row:
    if isinstance(value, dict):
        return Row(at=at, value=value)
    return Row(at=at, error=f"a {type(value).__name__}, and not an object")


def _json(stream: io.BufferedReader, member: Member) -> Iterator[Row]:
    data = _all(stream, member)
    try:
        found: object = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        # Not a few publish a value for each line under this name.
        if b"\n" not in data.strip() or not data.lstrip().startswith(b"{"):
            raise ArchiveError(f"{member.where} is no JSON: {exc}") from exc
        yield from _lines(io.BufferedReader(cast("Any", io.BytesIO(data))), member)
        return
    if isinstance(found, list):
        for number, value in enumerate(cast("list[object]", found), 1):
            yield _object(value, f"row {number}")
    else:
        yield _object(found, "")


def _csv(stream: io.BufferedReader, member: Member) -> Iterator[Row]:
    csv.field_size_limit(LINE_BYTES_MAX)
    text = io.TextIOWrapper(cast("IO[bytes]", stream), encoding="utf-8-sig", newline="")
    reader = csv.reader(text, strict=True)
    try:
        head = next(reader, [])
        if len(set(head)) != len(head):
            raise ArchiveError(f"{member.where}: two columns have one name")
        for cells in reader:
            at = f"line {reader.line_num}"
            if len(cells) == len(head):
                yield Row(at=at, value=dict(zip(head, cells, strict=True)))
            elif cells:
                yield Row(at=at, error=f"{len(cells)} fields, and the head has {len(head)}")
    except (csv.Error, UnicodeDecodeError) as exc:
        raise ArchiveError(f"{member.where}, line {reader.line_num}: no CSV: {exc}") from exc
    finally:
        text.detach()


def _parquet(stream: io.BufferedReader, member: Member) -> Iterator[Row]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as exc:
        raise UsageError(f"Parquet needs pyarrow, which is not installed: {cure('parquet')}") from exc
    # Its table of contents is at its end: it has to be where one can go back and forth.
    with tempfile.TemporaryFile() as spool:
        left = PARQUET_BYTES_MAX
        while piece := stream.read(_COPY_BYTES):
            left -= len(piece)
            if left < 0:
                raise ArchiveError(f"{member.where} is over {PARQUET_BYTES_MAX} bytes", code="archive_too_large")
            spool.write(piece)
        spool.seek(0)
        number = 0
        try:
            for batch in parquet.ParquetFile(spool).iter_batches(batch_size=ROWS_PER_BATCH):
                for value in batch.to_pylist():
                    number += 1
                    yield _object(value, f"row {number}")
        except (pa.ArrowException, OSError, ValueError) as exc:
            raise ArchiveError(f"{member.where}, after row {number}: no Parquet: {exc}") from exc


def _all(stream: io.BufferedReader, member: Member) -> bytes:
    parts: list[bytes] = []
    left = VALUE_BYTES_MAX
    while piece := stream.read(_COPY_BYTES):
        left -= len(piece)
        if left < 0:
            raise ArchiveError(f"{member.where} is over {VALUE_BYTES_MAX} bytes", code="archive_too_large")
        parts.append(piece)
    return b"".join(parts)
