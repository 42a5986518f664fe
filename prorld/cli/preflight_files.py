"""The files of a preflight: the report, which is the memory of the command, and the good instances, made from it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from prorld.cli.exits import UsageError
from prorld.cli.own_file import own_file
from prorld.cli.preflight_judge import Report, Verdict
from prorld.cli.preflight_plan import Task

__all__ = ["ReportFile", "check_good", "open_report", "report_beside", "write_good"]

_REPORTS = msgspec.json.Decoder(Report)


class ReportFile:
    """An open report. ``reports`` is what was in it, unsure ones left out: they are tried again."""

    def __init__(self, file: BinaryIO | None, name: str) -> None:
        """Without a file nothing is kept."""
        self._file = file
        self._name = name
        self.reports: list[Report] = [] if file is None else self._read(file)

    def append(self, report: Report) -> None:
        """Write one line, to the system at once: what is in a buffer of ours would be lost with us."""
        if self._file is None:
            return
        left = memoryview(msgspec.json.encode(report) + b"\n")
        try:
            while left:
                left = left[os.write(self._file.fileno(), left) :]
        except OSError as exc:
            raise UsageError(f"{self._name} can't be written: {exc.strerror}; the same command goes on later") from exc

    def _read(self, file: BinaryIO) -> list[Report]:
        found, good = _whole(file, self._name)
        file.truncate(good)
        # Not by the file object, which may stay where it is and only remember.
        os.lseek(file.fileno(), good, os.SEEK_SET)
        return found


def _whole(file: BinaryIO, name: str) -> tuple[list[Report], int]:
    """Every whole line, and where the last of them ends."""
    found: list[Report] = []
    good = 0
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            break
        try:
            found.append(_REPORTS.decode(line))
        except msgspec.MsgspecError as exc:
            raise UsageError(f"{name}, line {number}, is no line of a report: {exc}; name another file") from exc
        good += len(line)
    return found, good


@contextmanager
def open_report(name: str | None) -> Iterator[ReportFile]:
    """Open or make the report, for this process alone."""
    if name is None:
        yield ReportFile(None, "")
        return
    with own_file(name) as file:
        found, _ = _whole(file, name)
        unsure = any(report.verdict is Verdict.UNSURE for report in found)
    if unsure:
        kept = [msgspec.json.encode(report) for report in found if report.verdict is not Verdict.UNSURE]
        _replace(name, kept)
    with own_file(name) as file:
        yield ReportFile(file, name)


def report_beside(good: str) -> str:
    """Where the report goes that nobody named."""
    path = Path(good)
    return str(path.with_name(f"{path.name.removesuffix('.jsonl')}.report.jsonl"))


def check_good(good: str, tasks: str, report: str, *, begun: bool) -> None:
    """Raise ``UsageError`` where the good instances would be written over what is not theirs."""
    path = Path(good)
    if tasks != "-" and path.resolve() == Path(tasks).resolve():
        raise UsageError(f"{good} holds the instances that are read; name another file for the good ones")
    if path.resolve() == Path(report).resolve():
        raise UsageError(f"{good} can't be both the report and the good instances")
    if not begun and path.exists() and path.stat().st_size:
        raise UsageError(f"{good} is there already, and {report} has nothing of it; name another file, or remove it")


def write_good(name: str, tasks: Sequence[Task], good: frozenset[str]) -> None:
    """The instances with these digests, each as it was read and in the order of the tasks; all or nothing."""
    _replace(name, [task.text.encode("utf-8", "surrogatepass") for task in tasks if task.digest in good])


def _replace(name: str, lines: Sequence[bytes]) -> None:
    path = Path(name)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            file.writelines(line + b"\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as exc:
        beside.unlink(missing_ok=True)
        raise UsageError(f"{name} can't be written: {exc.strerror or exc}") from exc
