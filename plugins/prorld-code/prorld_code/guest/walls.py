"""The walls around a solution's process: a system call filter and limits that it puts on before the first foreign line.

Behind them a process computes, reads files and writes to the pipes it was given. It starts no process, signals none but
itself, looks into none, changes no file and opens no socket; so it ends when it is killed, and leaves nothing behind.
Threads stay possible.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct

__all__ = ["Limits", "confine", "die_with_parent", "hide_memory"]

OPEN_FILES = 64
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SIGKILL = 9
_FILTER_MODE = 2
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_X32_BIT = 0x40000000
# In the order of the numbers below.
_ARCHITECTURES = (("x86_64", 0xC000003E), ("aarch64", 0xC00000B7))
_CLONE_THREAD = 0x10000
_OPEN_TO_CHANGE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

# By name: the number on x86_64, the number on aarch64; -1 where there is none.
_DENIED = {
    "fork": (57, -1), "vfork": (58, -1), "execve": (59, 221), "execveat": (322, 281), "setsid": (112, 157),
    "setpgid": (109, 154), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "tkill": (200, 130),
    "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "process_madvise": (440, 440),
    "process_mrelease": (448, 448), "kcmp": (312, 272), "setpriority": (141, 140), "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "ioprio_set": (251, 30), "migrate_pages": (256, 238), "move_pages": (279, 239), "socket": (41, 198),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "msgget": (68, 186), "semget": (64, 190),
    "mq_open": (240, 180), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "bpf": (321, 280), "userfaultfd": (323, 282), "perf_event_open": (298, 241),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "unshare": (272, 97),
    "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "chroot": (161, 51), "pivot_root": (155, 41),
    "inotify_init": (253, -1), "inotify_init1": (294, 26), "fanotify_init": (300, 262), "personality": (135, 92),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "vmsplice": (278, 75),
}  # fmt: skip
_DENIED_CHANGES = {
    "creat": (85, -1), "mkdir": (83, -1), "mkdirat": (258, 34), "rmdir": (84, -1), "rename": (82, -1),
    "renameat": (264, 38), "renameat2": (316, 276), "unlink": (87, -1), "unlinkat": (263, 35), "symlink": (88, -1),
    "symlinkat": (266, 36), "link": (86, -1), "linkat": (265, 37), "mknod": (133, -1), "mknodat": (259, 33),
    "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, -1),
    "fchown": (93, 55), "lchown": (94, -1), "fchownat": (260, 54), "truncate": (76, 45), "ftruncate": (77, 46),
    "fallocate": (285, 47), "utime": (132, -1), "utimes": (235, -1), "futimesat": (261, -1), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16), "setxattrat": (463, 463), "removexattrat": (466, 466),
}  # fmt: skip
# Told as missing: a C library then takes the older call, which is looked at.
_ABSENT = {"clone3": (435, 435), "openat2": (437, 437)}
# Only for itself: by the argument that names the process, where 0 is itself, too, or nothing that can be harmed.
_OWN = {"kill": (62, 129), "tgkill": (234, 131), "prlimit64": (302, 261)}
# By the argument and the values that are refused: owners of descriptors are sent signals, leases hold others up.
_WORDS = {
    "fcntl": ((72, 25), 1, (8, 10, 15, 1024, 1026, 1031)),
    "ioctl": ((16, 29), 1, (0x5412, 0x5452, 0x8901, 0x8902)),
    "prctl": ((157, 167), 0, (_PR_SET_PDEATHSIG,)),
}


class Limits:
    """What one process may use."""

    def __init__(self, *, cpu_s: float, memory_bytes: int) -> None:
        self.cpu_s = cpu_s
        self.memory_bytes = memory_bytes

    def put_on(self) -> None:
        """Limit this process for good. CPU time is cut at whole seconds; what is between is judged afterwards."""
        whole_s = int(self.cpu_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (whole_s, whole_s))
        for what, value in (
            (resource.RLIMIT_AS, self.memory_bytes),
            (resource.RLIMIT_FSIZE, 0),
            (resource.RLIMIT_NOFILE, OPEN_FILES),
            (resource.RLIMIT_CORE, 0),
        ):
            _, hard = resource.getrlimit(what)
            lowered = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(what, (lowered, lowered))


def confine() -> None:
    """Put the filter on this process and what it becomes. Raises ``OSError`` where that can't be done."""
    libc = ctypes.CDLL(None, use_errno=True)
    program = _filter(os.uname().machine, os.getpid())
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    _prctl(libc, _PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1))
    _prctl(libc, _PR_SET_SECCOMP, ctypes.c_ulong(_FILTER_MODE), ctypes.c_char_p(header))


def die_with_parent() -> None:
    """Be killed when the process that forked this one ends."""
    _prctl(ctypes.CDLL(None, use_errno=True), _PR_SET_PDEATHSIG, ctypes.c_ulong(_SIGKILL))


def hide_memory() -> None:
    """Keep this process's memory, and that of what it forks, from others of the same user."""
    _prctl(ctypes.CDLL(None, use_errno=True), _PR_SET_DUMPABLE, ctypes.c_ulong(0))


def _prctl(libc: ctypes.CDLL, option: int, *arguments: object) -> None:
    if libc.prctl(option, *arguments, *[ctypes.c_ulong(0)] * (4 - len(arguments))) != 0:
        number = ctypes.get_errno()
        raise OSError(number, "prctl " + str(option) + ": " + os.strerror(number))


def _filter(architecture: str, pid: int) -> bytes:
    known = [name for name, _ in _ARCHITECTURES]
    if architecture not in known:
        raise OSError(errno.ENOSYS, "no filter is known for " + architecture)
    at = known.index(architecture)
    program = [
        _step(_LOAD, _ARCH),
        _step(_EQUAL, _ARCHITECTURES[at][1], 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
        _step(_AT_LEAST, _X32_BIT, 0, 1),
        _step(_RETURN, _KILL),
    ]
    for numbers, error in ((_ABSENT, errno.ENOSYS), (_DENIED_CHANGES, errno.EROFS), (_DENIED, errno.EPERM)):
        for pair in numbers.values():
            if pair[at] >= 0:
                program += [_step(_EQUAL, pair[at], 0, 1), _step(_RETURN, _ERRNO | error)]
    program += _only_threads((56, 220)[at])
    program += _only_reading((2, -1)[at], 1) + _only_reading((257, 56)[at], 2)
    for pair in _OWN.values():
        program += _only_own(pair[at], pid)
    for pair, argument, words in _WORDS.values():
        program += _no_words(pair[at], argument, words)
    return b"".join([*program, _step(_RETURN, _ALLOW)])


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _argument(index: int) -> int:
    # The low half comes first: both architectures are little-endian.
    return _ARGUMENTS + 8 * index


def _only_threads(number: int) -> list[bytes]:
    return [
        _step(_EQUAL, number, 0, 4),
        _step(_LOAD, _argument(0)),
        _step(_ANY_BIT, _CLONE_THREAD, 0, 1),
        _step(_RETURN, _ALLOW),
        _step(_RETURN, _ERRNO | errno.EPERM),
    ]


def _only_reading(number: int, flags_at: int) -> list[bytes]:
    if number < 0:
        return []
    return [
        _step(_EQUAL, number, 0, 4),
        _step(_LOAD, _argument(flags_at)),
        _step(_ANY_BIT, _OPEN_TO_CHANGE, 1, 0),
        _step(_RETURN, _ALLOW),
        _step(_RETURN, _ERRNO | errno.EROFS),
    ]


def _only_own(number: int, pid: int) -> list[bytes]:
    return [
        _step(_EQUAL, number, 0, 5),
        _step(_LOAD, _argument(0)),
        _step(_EQUAL, pid, 1, 0),
        _step(_EQUAL, 0, 0, 1),
        _step(_RETURN, _ALLOW),
        _step(_RETURN, _ERRNO | errno.EPERM),
    ]


def _no_words(number: int, argument: int, words: tuple[int, ...]) -> list[bytes]:
    tests = [_step(_EQUAL, word, len(words) - index, 0) for index, word in enumerate(words)]
    return [
        _step(_EQUAL, number, 0, len(words) + 3),
        _step(_LOAD, _argument(argument)),
        *tests,
        _step(_RETURN, _ALLOW),
        _step(_RETURN, _ERRNO | errno.EPERM),
    ]
