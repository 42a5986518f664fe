"""Limits of a whole sandbox, held by the kernel, where a subtree of cgroup v2 is delegated to the daemon.

Below the daemon's own cgroup there is one for this boot, ``prorld-BOOT``, with a leaf for each sandbox and a leaf that
the daemon, and so its warden, moves to: a cgroup that shares controllers out holds no processes itself. A child of the
warden moves itself into its sandbox's leaf before it executes. A boot whose own leaf is empty is that of a dead daemon.

Plain and blocking; callers put it into a lane. Where nothing is delegated all else holds as it does without.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

__all__ = [
    "CONTROLLERS",
    "Delegation",
    "Subtree",
    "end_cgroup",
    "find_delegation",
    "held_in",
    "ran_out",
    "reap_cgroups",
]

CONTROLLERS = ("memory", "pids")
END_SECONDS = 2.0
_PAUSE_SECONDS = 0.01
_DAEMON = ".daemon"  # no sandbox has such an id
_PREFIX = "prorld-"
_PROCESSES = "cgroup.procs"


class Delegation(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon's own cgroup. ``lacking`` is why it can't be used."""

    place: Path | None = None
    controllers: tuple[str, ...] = ()
    lacking: str | None = None


def find_delegation(proc: Path = Path("/proc/self")) -> Delegation:
    """Look for a cgroup of version 2 that is this process's, that it may write, and that has what limits take."""
    mount = _mount_point((proc / "mountinfo").read_text("utf-8", "replace"))
    own = next((line[3:] for line in (proc / "cgroup").read_text().splitlines() if line.startswith("0::")), None)
    if mount is None or own is None:
        return Delegation(lacking="no cgroup v2 is mounted")
    place = mount / own.lstrip("/")
    found = [name for name in CONTROLLERS if name in _words(place / "cgroup.controllers")]
    missing = [name for name in CONTROLLERS if name not in found]
    lacking = None
    if own == "/":
        lacking = "the daemon is in the root cgroup"
    elif not all(os.access(path, os.W_OK) for path in (place, place / _PROCESSES, place / "cgroup.subtree_control")):
        lacking = f"{place} is not delegated to this user"
    elif missing:
        lacking = f"{place} has no controller for {' and '.join(missing)}"
    return Delegation(place=place, controllers=tuple(found), lacking=lacking)


class Subtree:
    """The cgroups of one boot."""

    def __init__(self, place: Path, boot_id: str, *, user: tuple[int, int], controllers: tuple[str, ...]) -> None:
        self._parent = place
        self._place = place / f"{_PREFIX}{boot_id}"
        self._user = user
        self._controllers = controllers

    def open(self) -> None:
        """Make it, move this process into its leaf, and share the controllers out. Raises ``OSError``, undone."""
        leaf = self._place / _DAEMON
        leaf.mkdir(parents=True)
        try:
            _move_to(leaf)
            for above in (self._parent, self._place):
                (above / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in self._controllers))
            # Who moves needs the right to write here, too, since it is above both ends.
            self._give(self._place)
        except OSError:
            with suppress(OSError):
                _move_to(self._parent)
            for below in (leaf, self._place):
                with suppress(OSError):
                    below.rmdir()
            raise

    def make(self, sandbox_id: str, limits: Mapping[str, int]) -> Path:
        """The cgroup of a new sandbox; ``limits`` are contents of its files, by name. Raises ``OSError``."""
        place = self._place / sandbox_id
        place.mkdir()
        try:
            for name, value in limits.items():
                if name.split(".", 1)[0] in self._controllers:
                    (place / name).write_text(str(value))
            self._give(place)
        except OSError:
            place.rmdir()
            raise
        return place

    def _give(self, place: Path) -> None:
        """Let the warden's user move processes to a cgroup, and do nothing else there, whatever the umask."""
        place.chmod(0o755)
        if os.geteuid() == 0:
            os.chown(place / _PROCESSES, *self._user)


def end_cgroup(place: Path) -> bool:
    """Kill whatever is in a cgroup and remove it; false where that takes too long. It need not be there."""
    due = time.monotonic() + END_SECONDS
    while place.is_dir():
        with suppress(OSError):
            (place / "cgroup.kill").write_text("1")
        with suppress(OSError):
            place.rmdir()
            return True
        if time.monotonic() >= due:
            return False
        time.sleep(_PAUSE_SECONDS)
    return True


def held_in(place: Path) -> int | None:
    """The memory that a cgroup holds, caches of its files included; ``None`` where that is not counted."""
    try:
        return int((place / "memory.current").read_text())
    except (OSError, ValueError):
        return None


def ran_out(place: Path) -> bool:
    """Whether the kernel ended something in a cgroup because it held as much memory as it may."""
    events = _words(place / "memory.events")
    return any(int(count) > 0 for name, count in zip(events[::2], events[1::2], strict=False) if name == "oom_kill")


def reap_cgroups(place: Path) -> int:
    """Remove the cgroups of daemons that are gone; says how many sandboxes they had."""
    found = 0
    for boot in place.glob(f"{_PREFIX}*/"):
        with suppress(OSError):
            if (boot / _DAEMON / _PROCESSES).read_text().strip():
                continue
            sandboxes = list(boot.glob("[!.]*/"))
            found += sum(end_cgroup(below) for below in sandboxes)
            (boot / _DAEMON).rmdir()
            boot.rmdir()
    return found


def _move_to(place: Path) -> None:
    (place / _PROCESSES).write_text(str(os.getpid()))


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _mount_point(mountinfo: str) -> Path | None:
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        if after.startswith("cgroup2 "):
            return Path(before.split()[4].encode().decode("unicode_escape"))
    return None
