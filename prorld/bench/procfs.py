"""What the kernel says a process has used. Linux only, like sandboxes."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

__all__ = ["Usage", "usage"]


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """A process at one moment.

    ``cpu_s`` is of all its threads. ``queued_s`` is how long its main thread could have run while the machine gave its
    processors to somebody else: noise that no change of the program takes away.
    """

    cpu_s: float
    queued_s: float
    rss_bytes: int
    fds: int


def usage(pid: int, proc: Path = Path("/proc")) -> Usage:
    """Read it. Raises ``OSError`` when the process has gone."""
    place = proc / str(pid)
    # The name in brackets may hold blanks and brackets of its own.
    fields = (place / "stat").read_text().rpartition(")")[2].split()
    pages = int((place / "statm").read_text().split()[1])
    ticks = int(fields[11]) + int(fields[12])
    return Usage(
        cpu_s=ticks / os.sysconf("SC_CLK_TCK"),
        queued_s=_queued_s(place),
        rss_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
        fds=sum(1 for _ in (place / "fd").iterdir()),
    )


def _queued_s(place: Path) -> float:
    try:
        return int((place / "schedstat").read_text().split()[1]) / 1e9
    except FileNotFoundError:
        # Kernels built without scheduler statistics.
        return 0.0
