"""The system calls of the warden: namespaces, mounts, privileges, limits. Standard library only, for it alone."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = [
    "LIMITS",
    "Libc",
    "be_the_first_to_go",
    "drop_to",
    "expose",
    "lower_limits",
    "raise_descriptors",
    "restore_signals",
]

LIMITS = {
    "processes": resource.RLIMIT_NPROC,
    "open_files": resource.RLIMIT_NOFILE,
    "file_bytes": resource.RLIMIT_FSIZE,
    "memory_bytes": resource.RLIMIT_DATA,
}

_OWN_FDS = 1 << 16
_SHARE_OF_FDS = 4

_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_SECCOMP = 22
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_SECCOMP_MODE_FILTER = 2
# Landlock; the numbers are the same on every architecture.
_LANDLOCK_CREATE, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_VERSION = 1
_LANDLOCK_BELOW_A_PATH = 1
_LANDLOCK_REFER = 1 << 13
_LANDLOCK_WITH_REFER = 2
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT = 1, 2, 4, 32
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_CLONE_NEWNS = 0x00020000
_CLONE_NEWNET = 0x40000000
_NAMESPACES = 0x10000000 | _CLONE_NEWNS | 0x20000000 | 0x08000000 | 0x04000000 | _CLONE_NEWNET  # 1: user 3: pid ipc uts


class Libc:
    """The system calls that ``os`` does not have in every Python that prorld runs on."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

    def become_subreaper(self) -> None:
        """Inherit the orphans of this process's descendants."""
        self._prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))

    def stay_dumpable(self) -> None:
        """Keep its own files in /proc its own: a change of user gives them to root, and ``oom_score_adj`` is one."""
        self._prctl(_PR_SET_DUMPABLE, ctypes.c_ulong(1))

    def stay_private(self) -> None:
        """Keep its files in /proc, its memory with them, from other processes of the same user; ``exec`` undoes it."""
        self._prctl(_PR_SET_DUMPABLE, ctypes.c_ulong(0))

    def join_namespaces(self, pidfd: int, *, network: bool) -> None:
        """Enter all namespaces of a process, but for the network's where it has none of its own.

        Its pid namespace is that of the children from here on.
        """
        self._call(self._libc.setns, pidfd, _NAMESPACES if network else _NAMESPACES & ~_CLONE_NEWNET)

    def mount_tmpfs(self, where: str, options: str) -> None:
        """A file system in memory, of a size, without devices and programs of other users' rights."""
        self.mount("tmpfs", where, "tmpfs", _MS_NOSUID | _MS_NODEV, options)

    def remount_read_only(self, where: str) -> None:
        """Make one mount read-only; what is mounted below it stays as it is."""
        self.mount("none", where, "none", _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID)

    def unshare_mounts(self) -> None:
        """Go on with a private copy of the mounts."""
        self._call(self._libc.unshare, _CLONE_NEWNS)
        self.mount("none", "/", "none", _MS_REC | _MS_PRIVATE)

    def bind(self, descriptor: int, target: str) -> None:
        """Mount what an O_PATH descriptor stands for."""
        self.mount(f"/proc/self/fd/{descriptor}", target, "none", _MS_BIND | _MS_REC)

    def give_up_privileges(self, program: bytes, *, apart: bool = False) -> None:
        """No capability, none to be gained by executing, and a seccomp filter, for this process and all it starts.

        ``apart``: nor can they debug, or read the memory of, what they have not started.
        """
        with contextlib.suppress(OSError):  # the end of the list of capabilities shows as EINVAL
            for capability in range(64):
                self._prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability))
        self._prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1))
        if apart:
            self._stay_apart()
        if program:
            code = ctypes.create_string_buffer(program, len(program))
            header = struct.pack("@HxxxxxxP", len(program) // 8, ctypes.addressof(code))
            self._prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.c_char_p(header))

    def _stay_apart(self) -> None:
        """Enter a domain of Landlock that forbids nothing but what is beyond it; kernels before 5.19 have none such.

        A domain has to handle something. What this one handles, links and renames between directories, which any other
        would refuse, is allowed everywhere.
        """
        ask = [ctypes.c_void_p(None), ctypes.c_size_t(0), ctypes.c_uint32(_LANDLOCK_VERSION)]
        if self._libc.syscall(_LANDLOCK_CREATE, *ask) < _LANDLOCK_WITH_REFER:
            return
        handled = struct.pack("@Q", _LANDLOCK_REFER)
        domain = self._libc.syscall(_LANDLOCK_CREATE, handled, ctypes.c_size_t(len(handled)), ctypes.c_uint32(0))
        if domain < 0:
            raise OSError(ctypes.get_errno(), "no domain of Landlock could be made")
        root = os.open("/", os.O_PATH | os.O_CLOEXEC)
        try:
            rule = struct.pack("=Qi", _LANDLOCK_REFER, root)
            self._call(self._libc.syscall, _LANDLOCK_ADD_RULE, domain, _LANDLOCK_BELOW_A_PATH, rule, ctypes.c_uint32(0))
            self._call(self._libc.syscall, _LANDLOCK_RESTRICT, domain, ctypes.c_uint32(0))
        finally:
            os.close(root)
            os.close(domain)

    def _prctl(self, option: int, *arguments: Any) -> None:
        self._call(self._libc.prctl, option, *arguments, *[ctypes.c_ulong(0)] * (4 - len(arguments)))

    def mount(self, source: str, target: str, kind: str, flags: int, options: str = "") -> None:
        """Put a file system in place; the arguments are those of the system call."""
        arguments = (source.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), options.encode())
        self._call(self._libc.mount, *arguments)

    @staticmethod
    def _call(function: Callable[..., int], *arguments: Any) -> None:
        if function(*arguments) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{function.__name__}: {os.strerror(number)}")


def be_the_first_to_go() -> None:
    """When memory is short the kernel takes what runs in a sandbox before it takes a service."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def restore_signals() -> None:
    """Undo what Python and the warden ignore: it would outlive ``exec``."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def raise_descriptors() -> None:
    """Give this process a multiple of the descriptors that a sandbox may ask for.

    Descriptors on their way in sockets are counted for the user, over all sandboxes, and held against the limit of
    whoever sends. A sandbox must hit its own limit while there is room in this one's.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_OWN_FDS if hard < 0 else min(_OWN_FDS, hard), hard))


def lower_limits(limits: dict[str, int], *, pid: int = 0) -> None:
    """Set the limits of a process, by default of this one, and its children for good; no core files.

    Inside a user namespace the limit of processes counts that namespace alone.
    """
    own_fds, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    for name, value in limits.items():
        _, hard = resource.prlimit(pid, LIMITS[name])
        lowered = value if hard == resource.RLIM_INFINITY else min(value, hard)
        if name == "open_files":
            lowered = min(lowered, own_fds // _SHARE_OF_FDS)
        resource.prlimit(pid, LIMITS[name], (lowered, lowered))
    resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))


def drop_to(uid: int, gid: int) -> None:
    """Be another user from here on."""
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def expose(libc: Libc, paths: list[str], uid: int, gid: int) -> None:
    """Let the user ``uid`` reach ``paths`` although a directory above them is closed to it.

    In a mount namespace of the warden's own, the first closed directory above a path is covered by an empty one that
    holds nothing but that path. What else lies there stays out of reach. Does nothing for paths that can be reached.
    """
    named = {str(place) for path in paths for place in (Path(path), Path(path).resolve())}
    closed = {path: above for path in sorted(named) if (above := _closed_above(path, uid, gid)) is not None}
    if not closed:
        return
    libc.unshare_mounts()
    held = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in closed}
    for above in sorted(set(closed.values())):
        libc.mount("none", above, "tmpfs", 0, "mode=0755,size=64k")
    for path, descriptor in held.items():
        Path(path).mkdir(mode=0o755, parents=True, exist_ok=True)
        libc.bind(descriptor, path)
        os.close(descriptor)


def _closed_above(path: str, uid: int, gid: int) -> str | None:
    """The highest directory above ``path`` that the user can't pass through."""
    for above in reversed(Path(path).parents):
        status = above.stat()
        bits = 0o100 if status.st_uid == uid else 0o010 if status.st_gid == gid else 0o001
        if not status.st_mode & bits:
            return str(above)
    return None
