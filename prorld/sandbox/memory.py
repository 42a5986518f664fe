"""How much memory the processes and the scratch of a sandbox hold, and what they keep on disk, read off /proc.

No limit of a process counts this: there is none for memory that is shared without a file, and none for a sum.
``Gauge`` is quick and never waits for a process. Everything else is for a lane.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["Gauge", "children", "held_bytes", "process_tree", "resident_bytes", "unlinked_bytes"]

TREE_MAX = 1 << 22  # as many as a kernel has
FEW = 32
SURE_LOOKS = 15  # after which it is walked in any case
_READ_BYTES = 1 << 16
_SHORT_BYTES = 2048
_BLOCK_BYTES = 512
_DELETED = " (deleted)"
_NEVER_ON_DISK = ("/memfd:", "/SYSV", "/dev/zero")
_LINKS_OF_ONE = 3
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Gauge:
    """The most that a sandbox can hold, asked about once a second for as long as it lives.

    Mostly a sandbox waits for its policy. What has not run has taken nothing, written nothing and started nobody: so
    its processes and its ``scratch`` are looked at again only when the kernel has counted time for one of them. And now
    and then: the kernel itself puts huge pages where small ones were, and not every clock counts the shortest times.
    """

    def __init__(self, scratch: Sequence[str]) -> None:
        self._scratch = scratch
        self._roots: list[int] = []
        self._ran: dict[str, bytes] = {}  # by the file of a thread's time
        self._held = 0
        self._is_sure = False
        self._rested = 0  # looks since the last walk

    def forget(self) -> None:
        """Walk next time: somebody from outside has been in there, or is."""
        self._is_sure = False

    def look(self, roots: Sequence[int]) -> int | None:
        """So many bytes; ``None`` where it has too many threads to be asked on the way.

        ``roots`` are the processes that all others of it are below, its first process first.
        """
        if self._is_sure and self._rested < SURE_LOOKS and roots == self._roots and self._is_at_rest():
            self._rested += 1
            return self._held
        self._rested = 0
        if not self._walk(roots):
            self._ran, self._is_sure = {}, False
            return None
        return self._held

    def _is_at_rest(self) -> bool:
        return all(_run_time(path) == ran for path, ran in self._ran.items())

    def _walk(self, roots: Sequence[int]) -> bool:
        """Whether there were few enough of them.

        The time of a thread is read before what it has started, so what it starts later shows in its time. One walk can
        miss a process that loses its parent meanwhile, since its new one has not run for that: it takes two that found
        the same.
        """
        pids, ran, resident, threads, steady = list(roots), dict[str, bytes](), 0, 0, True
        for pid in pids:  # grows while it is walked
            ran |= _run_times(pid, [str(pid)])
            tasks = _tasks(pid)
            threads += len(tasks)
            if threads > FEW:
                return False
            if len(tasks) > 1:
                ran |= _run_times(pid, tasks)
                steady = steady and tasks == _tasks(pid)
            pids += children(pid, tasks)
            resident += resident_bytes([pid])
        self._is_sure = steady and ran == self._ran and all(ran.values())
        self._roots, self._ran, self._held = list(roots), ran, resident + _scratch_bytes(roots, self._scratch)
        return True


def held_bytes(roots: Sequence[int], scratch: Sequence[str]) -> int:
    """What a sandbox holds, what is shared counted once. Pages of files on disk are left out: they can be taken back.

    ``scratch`` are its directories in memory.
    """
    files = _scratch_bytes(roots, scratch)
    private = shared = 0
    for pid in process_tree(roots, at_most=TREE_MAX) or []:
        own, common = _portions(pid)
        private += own
        shared += common
    # A mapped file of the scratch is in both; the larger one is there for certain.
    return private + max(shared, files)


def process_tree(roots: Iterable[int], *, at_most: int = TREE_MAX) -> list[int] | None:
    """The processes and all below them; ``None`` where they have more threads than ``at_most``.

    What loses its parent in a sandbox goes to its first process.
    """
    pids = list(roots)
    threads = 0
    for pid in pids:  # grows while it is walked
        tasks = _tasks(pid)
        threads += len(tasks)
        if threads > at_most:
            return None
        pids += children(pid, tasks)
    return pids


def unlinked_bytes(roots: Iterable[int], scratch: Sequence[str], *, stop_at: int) -> int:
    """What files hold on disk that have no name any more and that a process below ``roots`` has open.

    Each is counted once; those of ``scratch``, as the first of ``roots`` sees it, are in memory. Stops counting once
    it is over ``stop_at``.
    """
    total = 0
    seen: set[tuple[int, int]] = set()
    pids = process_tree(roots) or []
    elsewhere = _devices(pids, scratch)
    for pid in pids:
        for found in _unlinked(pid):
            itself = (found.st_dev, found.st_ino)
            if found.st_dev not in elsewhere and itself not in seen:
                seen.add(itself)
                total += found.st_blocks * _BLOCK_BYTES
        if total > stop_at:
            break
    return total


def _unlinked(pid: int) -> Iterator[os.stat_result]:
    """The files that a process has open and that have no name; those that were never on a disk are left out."""
    for task in _speakers(pid):
        names: list[str] = []
        with suppress(OSError):
            names = os.listdir(f"/proc/{task}/fd")  # noqa: PTH208 - the names are what is wanted
        for name in names:
            with suppress(OSError):
                link = Path(f"/proc/{task}/fd/{name}")
                shown = str(link.readlink())
                if shown.endswith(_DELETED) and not shown.startswith(_NEVER_ON_DISK):
                    found = link.stat()
                    if stat.S_ISREG(found.st_mode):
                        yield found
        if names:
            return


def _devices(pids: Iterable[int], paths: Sequence[str]) -> set[int]:
    for pid in pids:
        with suppress(OSError):
            return {Path(f"/proc/{pid}/root{path}").stat().st_dev for path in paths}
    return set()


def resident_bytes(pids: Iterable[int]) -> int:
    """Their resident pages, those they share counted for each."""
    return sum(_statm(pid)[0] for pid in pids) * _PAGE_BYTES


def _portions(pid: int) -> tuple[int, int]:
    """Its portion of anonymous and of shared memory, where the kernel lets this user see it; else what is its alone."""
    for task in _speakers(pid):
        with suppress(OSError, ValueError, IndexError):
            lines = dict(line.split(b":", 1) for line in _read(f"/proc/{task}/smaps_rollup").splitlines()[1:])
            anonymous, shared = (int(lines[name].split()[0]) for name in (b"Pss_Anon", b"Pss_Shmem"))
            return anonymous << 10, shared << 10
    resident, common = _statm(pid)
    return (resident - common) * _PAGE_BYTES, 0


def _statm(pid: int) -> tuple[int, int]:
    """Its resident pages, and those of them that others may have, too."""
    for task in _speakers(pid):
        with suppress(OSError, ValueError, IndexError):
            resident, common = (int(word) for word in _read(f"/proc/{task}/statm").split()[1:3])
            if resident:
                return resident, common
    return 0, 0


def _speakers(pid: int) -> Iterator[int]:
    """Whom to ask about a process: it says nothing of what it holds once its first thread has ended. The others do."""
    yield pid
    for task in _tasks(pid):
        if int(task) != pid:
            yield int(task)


def _scratch_bytes(roots: Iterable[int], scratch: Sequence[str]) -> int:
    for root in roots:
        with suppress(OSError):
            found = [os.statvfs(f"/proc/{root}/root{path}") for path in scratch]
            return sum((status.f_blocks - status.f_bfree) * status.f_frsize for status in found)
    return 0


def children(pid: int, tasks: Sequence[str] | None = None) -> list[int]:
    """The children of a process, whichever of its threads has made them."""
    found: list[int] = []
    for task in _tasks(pid) if tasks is None else tasks:
        with suppress(OSError):
            found += [int(word) for word in _read(f"/proc/{pid}/task/{task}/children").split()]
    return found


def _run_times(pid: int, tasks: Iterable[str]) -> dict[str, bytes]:
    return {path: _run_time(path) for path in [f"/proc/{pid}/task/{task}/schedstat" for task in tasks]}


def _run_time(path: str) -> bytes:
    """How long a thread has run, in nanoseconds; nothing where it is gone, or where the kernel does not count it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            ran = os.read(descriptor, _SHORT_BYTES).split(maxsplit=1)[0]
        finally:
            os.close(descriptor)
    except (OSError, IndexError):
        return b""
    return b"" if ran == b"0" else ran


def _tasks(pid: int) -> list[str]:
    try:
        # The links of the directory are its own two and one for each thread. Most processes have one, and no list is
        # needed to name it.
        if os.stat(f"/proc/{pid}/task").st_nlink == _LINKS_OF_ONE:  # noqa: PTH116 - a path would cost more than the call
            return [str(pid)]
        return os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 - the names are what is wanted
    except OSError:
        return []


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = piece = os.read(descriptor, _READ_BYTES)
        while len(piece) > _SHORT_BYTES and len(data) < _READ_BYTES:  # the kernel gives a page at a time
            piece = os.read(descriptor, _READ_BYTES)
            data += piece
        return data
    finally:
        os.close(descriptor)
