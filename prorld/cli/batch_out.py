"""The file of ``prorld batch groups``: a line per group, on the disk before it is acknowledged; read on resume."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import msgspec

from prorld.cli.exits import UsageError
from prorld.cli.own_file import own_file
from prorld.wire.batches import BatchGroup, PackedBatchGroup
from prorld.wire.trajectory import unpacked

__all__ = ["GroupFile", "GroupLine", "StandardOut", "open_groups"]

# How a line begins; half a last one is cut off only where it began so.
_BEGINS = b'{"batch_id":'


class GroupLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line: a group, and the batch that accepted it."""

    batch_id: str
    group: BatchGroup


class _Seq(msgspec.Struct, frozen=True, kw_only=True):
    seq: int


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    batch_id: str
    group: _Seq


class StandardOut:
    """Lines on stdout; whoever reads them has to remember where it was."""

    last: int | None = None

    def append(self, batch_id: str, group: PackedBatchGroup) -> None:
        """Write one line."""
        sys.stdout.write(_encoded(batch_id, group).decode())
        sys.stdout.flush()


class GroupFile:
    """An open file of groups of one batch; ``last`` is the number of the last one in it."""

    def __init__(self, file: BinaryIO, name: str, batch_id: str) -> None:
        self._file = file
        self._name = name
        self.last = self._read(batch_id)

    def append(self, batch_id: str, group: PackedBatchGroup) -> None:
        """Write one line; it is on the disk when this returns."""
        left = memoryview(_encoded(batch_id, group))
        try:
            while left:
                left = left[os.write(self._file.fileno(), left) :]
            os.fsync(self._file.fileno())
        except OSError as exc:
            raise UsageError(f"{self._name} can't be written: {exc.strerror}; the same command goes on later") from exc

    def _read(self, batch_id: str) -> int | None:
        last: int | None = None
        good = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n") and (line.startswith(_BEGINS) or _BEGINS.startswith(line)):
                break
            try:
                found = msgspec.json.decode(line, type=_Line)
            except msgspec.MsgspecError as exc:
                raise UsageError(f"{self._name}, line {number}, is no group: {exc}; name another file") from exc
            if found.batch_id != batch_id:
                raise UsageError(f"{self._name} holds groups of batch {found.batch_id}; name another file")
            last = found.group.seq
            good += len(line)
        self._file.truncate(good)
        # Not by the file object, which may stay where it is and only remember.
        os.lseek(self._file.fileno(), good, os.SEEK_SET)
        return last


@contextmanager
def open_groups(name: str, batch_id: str) -> Iterator[GroupFile]:
    """Open or make the file, for this process alone."""
    with own_file(name) as file:
        yield GroupFile(file, name, batch_id)


def _encoded(batch_id: str, group: PackedBatchGroup) -> bytes:
    fields = {name: getattr(group, name) for name in group.__struct_fields__}
    if group.trajectories is not msgspec.UNSET:
        fields["trajectories"] = [None if one is None else unpacked(one) for one in group.trajectories]
    return msgspec.json.encode(GroupLine(batch_id=batch_id, group=BatchGroup(**fields))) + b"\n"
