"""What code may leave behind: child processes, open descriptors, tasks. Counted from /proc and by trio."""

from __future__ import annotations

from pathlib import Path

import trio

__all__ = ["children", "descriptors", "tasks"]


def children() -> set[int]:
    """Live children of this process."""
    found: set[int] = set()
    for entry in Path("/proc/self/task").glob("*/children"):
        found |= {int(pid) for pid in entry.read_text().split() if _is_alive(pid)}
    return found


def _is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descriptors() -> int:
    """Open file descriptors of this process."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def tasks() -> int:
    """Living tasks of this run."""
    return trio.lowlevel.current_statistics().tasks_living
