"""How things become bytes in the journal: MessagePack, and for what is large zstd around it.

What is read back may be damaged: a disk lies, a file is copied badly. That costs the one thing that can't be read, and
nothing else: it is told as ``Damaged``, and no size that a damaged head claims is believed.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec
import zstandard

__all__ = ["BODY_BYTES_MAX", "Damaged", "pack", "pack_body", "unpack", "unpack_body"]

T = TypeVar("T")

ZSTD_LEVEL: Final = 3
# A frame says how large it becomes. More than this no job has: ten million tokens take a tenth of it.
BODY_BYTES_MAX: Final = 1 << 30

pack = msgspec.msgpack.encode


class Damaged(Exception):
    """Bytes that are not what was written."""


def pack_body(value: object) -> bytes:
    """What is large and seldom read."""
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True).compress(pack(value))


def unpack(packed: object, kind: type[T]) -> T:
    """What ``pack`` made, or ``Damaged``."""
    if not isinstance(packed, bytes):
        raise Damaged(f"{type(packed).__name__} where bytes should be")
    try:
        return msgspec.msgpack.decode(packed, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise Damaged(str(exc)) from exc


def unpack_body(body: object, kind: type[T]) -> T:
    """What ``pack_body`` made, or ``Damaged``."""
    if not isinstance(body, bytes):
        raise Damaged(f"{type(body).__name__} where bytes should be")
    try:
        size = zstandard.frame_content_size(body)
        # Ours say it always, and what does not could be of any size.
        if not 0 <= size <= BODY_BYTES_MAX:
            raise Damaged(f"a body that claims {size} bytes")
        packed = zstandard.ZstdDecompressor().decompress(body, max_output_size=BODY_BYTES_MAX)
    except (zstandard.ZstdError, MemoryError) as exc:
        raise Damaged(str(exc)) from exc
    return unpack(packed, kind)
