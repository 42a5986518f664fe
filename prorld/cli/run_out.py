"""The file that a run writes: one line per rollout that ended, whole or not there at all, and read again on resume."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import msgspec

from prorld.cli.exits import UsageError
from prorld.cli.own_file import own_file
from prorld.domain.outcome import Outcome
from prorld.wire.jobs import JobRecord
from prorld.wire.trajectory import Trajectory

__all__ = ["Ended", "OutFile", "OutLine", "open_out"]


class OutLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line: the task's line in the file of tasks, its instance, the record, and the trajectory where asked for."""

    line: int
    instance: dict[str, Any]
    record: JobRecord
    trajectory: Trajectory | None = None


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """What a resumed run needs to know of a rollout."""

    job_id: str
    outcome: Outcome
    reward: float | None = None


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    record: Ended


_LINES = msgspec.json.Decoder(_Line)


class OutFile:
    """An open file. ``ended`` is what was in it; ``repaired`` says that a half-written line was cut off."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        self.repaired = False
        self.ended = self._read(name)

    def append(self, line: OutLine) -> None:
        """Write one line, to the system at once: what is in a buffer of ours would be lost with us."""
        left = memoryview(msgspec.json.encode(line) + b"\n")
        try:
            while left:
                left = left[os.write(self._file.fileno(), left) :]
        except OSError as exc:
            raise UsageError(f"{self._name} can't be written: {exc.strerror}; the same command goes on later") from exc

    def _read(self, name: str) -> list[Ended]:
        ended: list[Ended] = []
        good = 0
        for number, line in enumerate(self._file, 1):
            if line.strip():
                whole = line.endswith(b"\n")
                try:
                    ended.append(_LINES.decode(line).record)
                except msgspec.MsgspecError as exc:
                    if whole:
                        raise UsageError(f"{name}, line {number}, is no rollout: {exc}; name another file") from exc
                    self.repaired = True
                    break
                if not whole:
                    self._file.write(b"\n")
                    self._file.flush()
                    good += 1
            good += len(line)
        self._file.truncate(good)
        # Not by the file object, which may stay where it is and only remember.
        os.lseek(self._file.fileno(), good, os.SEEK_SET)
        return ended


@contextmanager
def open_out(name: str) -> Iterator[OutFile]:
    """Open or make the file, for this process alone."""
    with own_file(name) as file:
        yield OutFile(file, name)
