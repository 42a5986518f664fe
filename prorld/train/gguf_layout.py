"""How a GGUF file is laid out, as far as a trainer needs it to make another one of the same model.

The metadata is copied as bytes and never taken apart, so that tokenizer and template of the new file are those of the
old one to the bit. Every length is checked against the file before it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

__all__ = [
    "ALIGNMENT",
    "BadModelFile",
    "GgufFile",
    "GgufTensor",
    "packed_string",
    "packed_tensors",
    "padding",
    "read_gguf",
]

# What a file without a word of it means.
ALIGNMENT = 32

FILE_BYTES_MAX = 1 << 40
ENTRIES_MAX = 4096
TENSORS_MAX = 65_536
DIMENSIONS_MAX = 4

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip

# A short text or a number; what is an array, or longer, stays in the bytes.
_SHORT_TEXT = 256
Value = int | float | bool | str


class BadModelFile(Exception):
    """The file is no GGUF file, is cut short, or is of a model that can't be handled here."""


class GgufTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor as the file names it: the first dimension is the one that lies together. ``at`` counts from the data."""

    name: str
    shape: tuple[int, ...]
    kind: int
    at: int


class GgufFile(msgspec.Struct, frozen=True, kw_only=True):
    """What stands before the data. ``entries`` are the bytes of the metadata, ``places`` where a value lies in them."""

    version: int
    entry_count: int
    entries: bytes
    values: dict[str, Value]
    places: dict[str, int]
    tensors: tuple[GgufTensor, ...]
    data_at: int
    size: int

    @property
    def alignment(self) -> int:
        """Every tensor begins at a multiple of it."""
        said = self.values.get("general.alignment", ALIGNMENT)
        if not isinstance(said, int) or said < 1 or said > 1 << 20 or said % 8:
            raise BadModelFile(f"an alignment of {said!r}")
        return said

    def number(self, key: str) -> int:
        """A whole number of the metadata that has to be there."""
        value = self.values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BadModelFile(f"it does not say {key}")
        return value


def read_gguf(path: Path) -> GgufFile:
    """What stands before the data of a GGUF file. Raises ``BadModelFile``, ``OSError``."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size > FILE_BYTES_MAX:
            raise BadModelFile(f"{path} has {size} bytes, more than {FILE_BYTES_MAX}")
        file.seek(0)
        # The part before the data is a few megabytes; the rest is not read.
        cursor = _Cursor(file.read(min(size, 256 << 20)))
    try:
        return _read(cursor, size)
    except (struct.error, IndexError, UnicodeDecodeError) as exc:
        raise BadModelFile(f"{path} is cut short or no GGUF file: {exc}") from exc
    except BadModelFile as exc:
        raise BadModelFile(f"{path}: {exc}") from exc


class _Cursor:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, code: str, count: int = 1) -> tuple[int | float | bool, ...]:
        form = f"<{count}{code}"
        end = self.at + struct.calcsize(form)
        if end > len(self.data):
            raise IndexError(f"it ends at {len(self.data)}")
        found = struct.unpack_from(form, self.data, self.at)
        self.at = end
        return found

    def whole(self, code: str) -> int:
        return int(self.take(code)[0])

    def text(self) -> bytes:
        size = self.whole("Q")
        start, end = self.at, self.at + size
        if end > len(self.data):
            raise IndexError(f"a string of {size} bytes at {start}")
        self.at = end
        return self.data[start:end]

    def skip(self, size: int) -> None:
        if self.at + size > len(self.data):
            raise IndexError(f"{size} bytes are missing at {self.at}")
        self.at += size


def _read(cursor: _Cursor, size: int) -> GgufFile:
    if cursor.data[:4] != _MAGIC:
        raise BadModelFile("it does not start with GGUF")
    cursor.at = 4
    version = cursor.whole("I")
    if version not in _VERSIONS:
        raise BadModelFile(f"format version {version} is not known")
    tensor_count, entry_count = cursor.whole("Q"), cursor.whole("Q")
    if tensor_count > TENSORS_MAX or entry_count > ENTRIES_MAX:
        raise BadModelFile(f"{tensor_count} tensors and {entry_count} entries")
    start = cursor.at
    values: dict[str, Value] = {}
    places: dict[str, int] = {}
    for _ in range(entry_count):
        key = cursor.text().decode()
        kind = cursor.whole("I")
        places[key] = cursor.at - start
        value = _value(cursor, kind)
        if value is not None:
            values[key] = value
    entries = cursor.data[start : cursor.at]
    tensors = tuple(_tensor(cursor) for _ in range(tensor_count))
    about = GgufFile(
        version=version, entry_count=entry_count, entries=entries, values=values, places=places,
        tensors=tensors, data_at=0, size=size,
    )  # fmt: skip
    return msgspec.structs.replace(about, data_at=cursor.at + padding(cursor.at, about.alignment))


def _value(cursor: _Cursor, kind: int) -> Value | None:
    """A number or a short text; ``None`` for what is skipped."""
    if kind == _STRING:
        text = cursor.text()
        return text.decode("utf-8", "replace") if len(text) <= _SHORT_TEXT else None
    if kind == _ARRAY:
        of, count = cursor.whole("I"), cursor.whole("Q")
        if of == _STRING:
            for _ in range(count):
                cursor.skip(cursor.whole("Q"))
        else:
            cursor.skip(struct.calcsize(_code(of)) * count)
        return None
    return cursor.take(_code(kind))[0]


def _code(kind: int) -> str:
    code = _SCALARS.get(kind)
    if code is None:
        raise BadModelFile(f"a value of unknown type {kind}")
    return code


def _tensor(cursor: _Cursor) -> GgufTensor:
    name = cursor.text().decode()
    count = cursor.whole("I")
    if not 1 <= count <= DIMENSIONS_MAX:
        raise BadModelFile(f"tensor {name!r} has {count} dimensions")
    shape = tuple(int(size) for size in cursor.take("Q", count))
    return GgufTensor(name=name, shape=shape, kind=cursor.whole("I"), at=cursor.whole("Q"))


def padding(at: int, alignment: int) -> int:
    """How many bytes it is from there to the next multiple."""
    return -at % alignment


def packed_string(text: str) -> bytes:
    """A string as it stands in the file."""
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def packed_tensors(tensors: Sequence[GgufTensor]) -> bytes:
    """The list of tensors as it stands in the file."""
    parts: list[bytes] = []
    for tensor in tensors:
        parts += (
            packed_string(tensor.name),
            struct.pack("<I", len(tensor.shape)),
            struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape),
            struct.pack("<IQ", tensor.kind, tensor.at),
        )
    return b"".join(parts)
