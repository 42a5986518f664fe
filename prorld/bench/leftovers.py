"""What sandboxes can leave behind on a host: processes, FUSE helpers, mounts and directories."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from prorld.sandbox.memory import process_tree

__all__ = ["FUSE_HELPERS", "Leftovers", "below_process", "found_left", "mounts_of"]

FUSE_HELPERS = frozenset({"fuse-overlayfs", "fuse2fs", "gocryptfs", "squashfuse", "squashfuse_ll"})


class Leftovers(msgspec.Struct, frozen=True, kw_only=True):
    """What there is at one moment. ``directories`` has records of processes, too."""

    processes: frozenset[int]
    fuse: frozenset[int]
    mounts: frozenset[str]
    directories: frozenset[str]


class _World(Protocol):
    @property
    def warden_pid(self) -> int: ...
    @property
    def runtime_dir(self) -> Path: ...
    @property
    def sessions(self) -> frozenset[int]: ...


def found_left(world: _World, proc: Path = Path("/proc")) -> Leftovers:
    """All that is below the warden, or in a session that it started: a FUSE helper leaves its parent, not its session.

    Mounts are those that name the runtime's directory, of this process and of the warden.
    """
    below = below_process(world.warden_pid)
    named = dict(_processes(proc, world.sessions))
    processes = {*below, *named}
    fuse = {pid for pid in processes if (named.get(pid) or _name(proc, pid)) in FUSE_HELPERS}
    mounts = {
        line
        for place in ("self", str(world.warden_pid))
        for line in mounts_of((proc / place / "mountinfo").read_text(), str(world.runtime_dir))
    }
    directories = {str(path) for path in world.runtime_dir.glob("sandboxes/*/*") if path.name != "owner"}
    return Leftovers(
        processes=frozenset(processes - fuse),
        fuse=frozenset(fuse),
        mounts=frozenset(mounts),
        directories=frozenset(directories),
    )


def below_process(pid: int) -> set[int]:
    """All processes below one."""
    return set(process_tree([pid]) or ()) - {pid}


def mounts_of(mountinfo: str, directory: str) -> list[str]:
    """The mounts that lie in this directory, or are made of something in it."""
    return [line for line in mountinfo.splitlines() if directory in line]


def _processes(proc: Path, sessions: frozenset[int]) -> Iterable[tuple[int, str]]:
    """Pids and names of the living processes of these sessions."""
    for place in proc.glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            head, _, tail = (place / "stat").read_text().rpartition(")")
            state, session = tail.split()[0], int(tail.split()[3])
            if session in sessions and state != "Z":
                yield int(place.name), head.partition("(")[2]


def _name(proc: Path, pid: int) -> str:
    try:
        return (proc / str(pid) / "comm").read_text().strip()
    except OSError:
        return ""
