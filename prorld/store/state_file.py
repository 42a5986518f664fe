"""How a small file of the state directory is read: whole and of the schema that is known, or not at all."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import TypeVar

import msgspec

from prorld.errors import ConfigError

__all__ = ["read_state"]

_T = TypeVar("_T")


class _Head(msgspec.Struct, frozen=True):
    schema: int


def read_state(path: Path, kind: type[_T], *, schema: int, bytes_max: int, cure: str) -> _T | None:
    """What is in it; ``None`` where there is none. Raises ``ConfigError``, with the ``cure``. Blocks."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{path} is no file; {cure}")
        if found.st_size > bytes_max:
            raise ConfigError(f"{path} is larger than {bytes_max} bytes; it is none of ours")
        data = path.read_bytes()
        written = msgspec.json.decode(data, type=_Head).schema
        if written != schema:
            raise ConfigError(f"{path} is of schema {written}, and this prorld reads {schema}; {cure}")
        return msgspec.json.decode(data, type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise ConfigError(f"{path} can't be read: {exc}; {cure}") from exc
