"""What the process of a grader does without: a network, other processes, other users' files, and every privilege.

For ``prorld.handlers.grader_child`` alone, which loads it by itself: standard library only. ``enter`` is called before
the grader is imported and cuts it off; ``Walls.step_down`` afterwards, when nothing has to be read as the daemon's user
any more. Where the kernel gives no namespaces a system call filter stands alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import pwd
import resource
import signal
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, NoReturn

from prorld.sandbox.seccomp import assemble, refuse
from prorld.sandbox.syscalls import Libc, drop_to, expose

__all__ = ["PROCESSES_MAX", "Walls", "enter"]

# Processes and threads of one grader; more than a plain function needs, and few enough to be killed.
PROCESSES_MAX = 16
# Where the limit counts everything that the user runs, and not the grader alone.
SPARE_PROCESSES = 64
SWEEP_S = 2.0

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000
_APART = _CLONE_NEWNS | _CLONE_NEWIPC | _CLONE_NEWPID | _CLONE_NEWNET
_PR_SET_PDEATHSIG = 1
_CAPABILITIES_VERSION = 0x20080522
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _READ_ONLY = 442, -100, 0x8000, 1
_SYSTEM_CALLS = {"x86_64": 41, "aarch64": 198}  # socket


class Walls(NamedTuple):
    """What stands around this process. ``alone``: it is the first one of a pid namespace."""

    alone: bool
    own_users: bool
    is_root: bool

    def step_down(self) -> int:
        """Give up every privilege, and sockets with them. Returns how many processes its user may have from here on."""
        libc, own_users = Libc(), self.own_users
        if self.is_root:
            drop_to(*_nobody())
            libc.stay_dumpable()
            # Only to be counted apart from whatever else runs as that user.
            own_users = self.alone and _unshare(_CLONE_NEWUSER, os.geteuid(), os.getegid())
        most = PROCESSES_MAX if own_users else _tasks_of(os.geteuid()) + SPARE_PROCESSES
        libc.give_up_privileges(assemble())
        _drop_capabilities()
        libc.give_up_privileges(_no_sockets())
        libc.stay_private()
        # The kernel forgets it when the user changes.
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        return most

    def sweep(self) -> bool:
        """Kill whatever a grade has left and reap it. Whether nothing is left."""
        if self.alone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            _reap(block=True)
            return True
        until = time.monotonic() + SWEEP_S
        while (left := _children()) and time.monotonic() < until:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _reap(block=False)
        return not left


def enter(paths: Iterable[str], *, namespaces: bool = True) -> Walls:
    """Cut this process off; returns in a child of it, the first process of its namespace, where there are namespaces.

    ``paths`` are the directories that modules are read from: they stay within reach for another user, too. With
    neither namespaces nor a filter that refuses sockets, ``OSError``.
    """
    libc, is_root = Libc(), os.geteuid() == 0
    if namespaces and _leave(is_root=is_root):
        if is_root:
            libc.mount("none", "/", "none", 16384 | 1 << 18)  # recursive, private
            uid, gid = _nobody()
            with contextlib.suppress(OSError):  # what is out of reach then shows as a module that can't be imported
                expose(libc, [path for path in paths if Path(path).is_dir()], uid, gid)
        _fork_off()
        with contextlib.suppress(OSError):  # refused where parts of /proc are covered; other users are out of reach
            libc.mount("proc", "/proc", "proc", 2 | 4 | 8)  # nosuid, nodev, noexec
        if not is_root:
            _read_only()
        return Walls(alone=True, own_users=not is_root, is_root=is_root)
    if not _no_sockets():
        raise OSError(errno.ENOSYS, "neither namespaces nor a system call filter can be had")
    libc.become_subreaper()
    return Walls(alone=False, own_users=False, is_root=is_root)


def _leave(*, is_root: bool) -> bool:
    uid, gid = os.geteuid(), os.getegid()
    return _unshare(_APART if is_root else _APART | _CLONE_NEWUSER, uid, gid)


def _unshare(flags: int, uid: int, gid: int) -> bool:
    if ctypes.CDLL(None, use_errno=True).unshare(flags) != 0:
        return False
    if flags & _CLONE_NEWUSER:
        # Unmapped it would be nobody to itself, and go on all the same.
        with contextlib.suppress(OSError):
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
            Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    return True


def _fork_off() -> None:
    """Go on as a child, which is the first process of the new pid namespace; this one waits for its end."""
    pid = os.fork()
    if pid:
        _wait_for(pid)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait_for(pid: int) -> NoReturn:
    """When the first process of a namespace ends, the kernel has ended all others before that is told."""

    def end(_signal: int, _frame: object) -> None:
        os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    os.waitpid(pid, 0)
    os._exit(0)


def _nobody() -> tuple[int, int]:
    try:
        found = pwd.getpwnam("nobody")
    except KeyError:
        return 65534, 65534
    return found.pw_uid, found.pw_gid


def _read_only() -> None:
    """No file can be changed or made, whatever the user may do; older kernels can't say that of all mounts at once."""
    wanted = struct.pack("@QQQQ", _READ_ONLY, 0, 0, 0)
    ctypes.CDLL(None).syscall(
        _MOUNT_SETATTR, _AT_FDCWD, b"/", ctypes.c_uint(_AT_RECURSIVE), wanted, ctypes.c_size_t(len(wanted))
    )


def _no_sockets() -> bytes:
    number = _SYSTEM_CALLS.get(os.uname().machine)
    return b"" if number is None else refuse(number)


def _drop_capabilities() -> None:
    header = struct.pack("@Ii", _CAPABILITIES_VERSION, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capset(header, bytes(24)) != 0:
        raise OSError(ctypes.get_errno(), "the capabilities can't be given up")


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def _tasks_of(uid: int) -> int:
    """Threads of a user, as the limit of processes counts them."""
    found = 0
    for place in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if place.name.isdecimal() and place.stat().st_uid == uid:
                found += sum(1 for _ in (place / "task").iterdir())
    return found


def _children() -> list[int]:
    """The children of this process, those that it was left included."""
    me, found = str(os.getpid()), []
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            with contextlib.suppress(OSError, IndexError):
                if (place / "stat").read_text().rpartition(")")[2].split()[1] == me:
                    found.append(int(place.name))
    return found


def _reap(*, block: bool) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0 if block else os.WNOHANG)[0]:
            pass
