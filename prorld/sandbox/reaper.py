"""What a daemon leaves behind when it is killed, and how the next one clears it away.

What a sandbox keeps on disk is in ``RUNTIME/sandboxes/BOOT/SANDBOX``, which is there, where it is needed at all, from
before its first process until after its last one. ``BOOT/owner`` names the daemon and ``BOOT/@SANDBOX`` the sandbox's
outermost process, each by pid and start time, since a pid alone may have been given to somebody else. The latter is a
symbolic link that leads nowhere: one call makes it, whole or not at all, and it takes no block on disk.

Everything here is plain, blocking and can be repeated; callers put it into a thread lane, but for ``name_process`` and
``forget_process``, which are one call each.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import msgspec
import structlog
from structlog.typing import FilteringBoundLogger

from prorld.sandbox.families import end_left, started
from prorld.sandbox.leftovers import remove_tree

__all__ = [
    "Reaped",
    "forget_process",
    "make_base",
    "make_boot",
    "make_place",
    "name_process",
    "place_of",
    "reap",
    "remove_boot",
    "remove_place",
]

log: FilteringBoundLogger = structlog.get_logger()

_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
END_SECONDS = 2.0
GROWN_SECONDS = 60.0  # more than a runtime takes to start what serves a sandbox
_BASE = "sandboxes"
_PASSABLE = 0o711  # whatever the umask
_OWNER = "owner"
_RECORD = "@"  # before a sandbox's name, none of which begins with it


class Reaped(msgspec.Struct, frozen=True, kw_only=True):
    """What a sweep found and ended."""

    sandboxes: int = 0
    processes: int = 0


def make_base(runtime_dir: Path) -> Path:
    """The directory that all sandboxes' directories are in: others than its owner pass through it and see nothing."""
    base = runtime_dir / _BASE
    if not base.is_dir():
        base.mkdir(mode=_PASSABLE, parents=True, exist_ok=True)
        base.chmod(_PASSABLE)
    return base


def place_of(runtime_dir: Path, boot_id: str, sandbox_id: str) -> Path:
    """The directory of a sandbox, whether it is there or not. Raises ``ValueError`` for ids that lead elsewhere."""
    for name in (boot_id, sandbox_id):
        if _SAFE.fullmatch(name) is None:
            raise ValueError(f"not usable as a directory name: {name!r}")
    return runtime_dir / _BASE / boot_id / sandbox_id


def make_boot(place: Path) -> None:
    """Make the directory that a sandbox's one is in, unless it is there, with its owner on record before it exists."""
    boot = place.parent
    if boot.is_dir():
        return
    # Made elsewhere and moved: a sweep of another daemon must never see it without its owner.
    fresh = Path(tempfile.mkdtemp(prefix=".", dir=make_base(boot.parents[1])))
    fresh.chmod(_PASSABLE)
    (fresh / _OWNER).write_text(f"{os.getpid()} {started(os.getpid())}")
    try:
        fresh.rename(boot)
    except OSError:  # another thread was faster
        shutil.rmtree(fresh, ignore_errors=True)


def make_place(runtime_dir: Path, boot_id: str, sandbox_id: str) -> Path:
    """Make the directory of a new sandbox."""
    place = place_of(runtime_dir, boot_id, sandbox_id)
    make_boot(place)
    place.mkdir(mode=_PASSABLE)
    place.chmod(_PASSABLE)
    return place


def name_process(place: Path, pid: int, begun: int | None, marker: str = "") -> None:
    """Put a sandbox's outermost process on record, and the mark that all of its processes carry, where they do.

    One that has ended already has no ``begun``, and is not worth a record.
    """
    if begun is not None:
        _record_of(place).symlink_to(f"{pid} {begun} {_machine_boot()} {marker}")


def forget_process(place: Path) -> None:
    """Take a sandbox's outermost process off the record, after all of its processes are gone."""
    record = _record_of(place)
    try:
        record.unlink()
    except FileNotFoundError:
        return
    except OSError as exc:
        log.warning("sandbox.left", place=str(record), why=str(exc))


def remove_place(place: Path) -> None:
    """Remove a sandbox's directory, whatever the modes in it: an overlay leaves one that is closed to all."""
    if not place.exists():
        return
    try:
        remove_tree(place)
    except OSError as exc:
        log.warning("sandbox.left", place=str(place), why=str(exc))


def remove_boot(runtime_dir: Path, boot_id: str) -> None:
    """Remove what one boot has left; a daemon that ends well does this last."""
    boot = runtime_dir / _BASE / boot_id
    for place in sorted(boot.glob("*")):
        if place.is_dir():
            remove_place(place)
    remove_place(boot)


def reap(runtime_dir: Path, *, boot_id: str) -> Reaped:
    """Clear away what boots other than this one left, unless their daemon still lives."""
    sandboxes = processes = 0
    base = runtime_dir / _BASE
    # What is written there is removed and ended, by root where the daemon is root: so nobody else may write there.
    for boot in sorted(base.glob("[!.]*")) if _is_ours(base) else ():
        if boot.name == boot_id or not _is_ours(boot) or _alive(boot / _OWNER) is not None:
            continue
        records = [*boot.glob(f"{_RECORD}*")]
        places = {place.name for place in boot.iterdir() if _is_ours(place)}
        sandboxes += len(places | {record.name.removeprefix(_RECORD) for record in records})
        processes += _end_processes(records)
        remove_boot(runtime_dir, boot.name)
    return Reaped(sandboxes=sandboxes, processes=processes)


def _is_ours(place: Path) -> bool:
    """Whether this is a directory, itself and not by a link, that only this user can write."""
    try:
        found = place.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o022


def _record_of(place: Path) -> Path:
    return place.with_name(f"{_RECORD}{place.name}")


def _end_processes(records: Sequence[Path]) -> int:
    """End what still runs of these sandboxes: the recorded processes, their sessions, and what carries their mark."""
    left: list[tuple[int, int]] = []
    markers: list[str] = []
    for record in records:
        with suppress(OSError, ValueError):
            pid, begun, boot, marker = str(record.readlink()).split(" ", 3)
            # After a restart of the machine the numbers are other people's, and nothing is left.
            if boot == _machine_boot():
                left.append((int(pid), int(begun)))
                markers.append(marker)
    return end_left(left, markers, seconds=END_SECONDS, grown_in=GROWN_SECONDS) if left else 0


@cache
def _machine_boot() -> str:
    """What the kernel calls the time since the machine was started."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _alive(record: Path) -> int | None:
    """The recorded process, if it is the one that runs under this pid now."""
    try:
        pid, begun = (int(word) for word in record.read_text().split())
    except (OSError, ValueError):
        return None
    return pid if started(pid) == begun else None
