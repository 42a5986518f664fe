"""Which processes belong together, read off /proc, and their end. Standard library only: the warden imports it, too.

A session holds what a runtime starts beside a sandbox: FUSE helpers leave their process group, but not their session.
Where there is no namespace, what leaves its session still carries the mark that its sandbox put into its environment,
unless it was made to lose that as well.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

__all__ = ["all_processes", "below", "end_left", "has_group", "kill_family", "own_children", "read_stat", "started"]

_ROUNDS_MAX = 20  # of looking again for what was started meanwhile
_WAIT_SECONDS = 0.02
_STAT_BYTES_MAX = 1 << 12  # several times its length
_TICKS = os.sysconf("SC_CLK_TCK")  # in a second


def kill_family(
    leader: int | None,
    marker: str = "",
    *,
    since: int = 0,
    until: int | None = None,
    among: Callable[[], Iterable[int]] | None = None,
) -> set[int]:
    """Kill the processes of a session, and those that carry the mark; gives pidfds of all that were found alive.

    Looks at those that ``among`` gives, or at all that there are; what began before ``since`` or after ``until`` is
    somebody else's.
    """
    assert leader is None or leader > 1, leader  # 0 and 1 are the sessions of the machine itself
    held: dict[int, int] = {}
    for _ in range(_ROUNDS_MAX):
        there = all_processes() if among is None else among()
        fresh = {pid for pid in there if pid not in held and _belongs(pid, leader, marker, since, until)}
        if not fresh:
            break
        for pid in fresh:
            with contextlib.suppress(OSError):
                held[pid] = os.pidfd_open(pid)
                signal.pidfd_send_signal(held[pid], signal.SIGKILL)
    return set(held.values())


def end_left(
    left: Iterable[tuple[int, int]], markers: Iterable[str], *, seconds: float, grown_in: float | None = None
) -> int:
    """End what somebody who died has left: the processes, by pid and start time, and their sessions. Blocks.

    Says how many were alive. A session keeps its leader's number from others for as long as it has members. When all
    are gone it is free, and a session of somebody else may have it and lose its leader as well: so where a record may
    be old, only what has begun within ``grown_in`` seconds of a leader that is gone is taken for its own.
    """
    found = 0
    due = time.monotonic() + seconds
    wanted, marks = [(pid, begun) for pid, begun in left if pid > 1], [mark for mark in markers if mark]
    while True:
        alive = 0
        for pid, begun in wanted:
            leads = started(pid)
            if leads not in (begun, None):
                continue  # the number is somebody else's by now
            old = leads is None and grown_in is not None
            until = begun + int((grown_in or 0) * _TICKS) if old else None
            members = _close(kill_family(pid, since=begun, until=until))
            if leads is not None:  # it need not lead a session
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            alive += members or int(leads is not None)
        alive += sum(_close(kill_family(None, mark)) for mark in marks)
        found = max(found, alive)
        if not alive or time.monotonic() >= due:
            return found
        time.sleep(_WAIT_SECONDS)


def _close(descriptors: set[int]) -> int:
    for descriptor in descriptors:
        os.close(descriptor)
    return len(descriptors)


def started(pid: int) -> int | None:
    """When a process was started, in clock ticks since the boot of the machine; ``None`` where there is none."""
    try:
        fields = read_stat(pid)
        return None if _has_ended(fields) else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def has_group(session: int, group: int) -> bool:
    """Whether a session has such a process group now; another one may have got its number when all of it were gone."""
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(group) == session
    # Its leader is gone. The others of it hold the number.
    wanted = [str(group), str(session)]
    for pid in all_processes():
        with contextlib.suppress(OSError, IndexError):
            if read_stat(pid)[2:4] == wanted:
                return True
    return False


def read_stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on: state, parent, group, session."""
    descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _STAT_BYTES_MAX).rpartition(b")")[2].decode("ascii").split()
    finally:
        os.close(descriptor)


def _has_ended(fields: list[str]) -> bool:
    """Whether all of a process has; one whose first thread has ended is shown as a zombie while others of it run."""
    return fields[0] == "X" or (fields[0] == "Z" and int(fields[17]) <= 1)


def all_processes() -> Iterator[int]:
    """Every process but this one."""
    own = os.getpid()
    for name in os.listdir("/proc"):  # noqa: PTH208 - the names are what is wanted
        if name.isdigit() and int(name) != own:
            yield int(name)


def own_children() -> list[int]:
    """The children of this process, which has one thread: with a subreaper, also all that lost their parent below."""
    own = os.getpid()
    return _children(own, str(own))


def below(roots: Iterable[int]) -> list[int]:
    """Processes, and all below them."""
    found = list(roots)
    for pid in found:  # grows while it is walked
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - as above
                found += _children(pid, task)
    return found


def _children(pid: int, task: str) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    return []


def _belongs(pid: int, leader: int | None, marker: str, since: int, until: int | None) -> bool:
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = read_stat(pid)
        begun = int(fields[19])
        if _has_ended(fields) or begun < since or (until is not None and begun > until):
            return False
        if int(fields[3]) == leader:
            return True
        return bool(marker) and marker.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False
