"""The system call filter of a sandbox: a deny-list, assembled by hand, that every process in a sandbox runs under.

It takes away what a hostile program wants of the kernel and an ordinary one never asks for. It is not the wall, the
namespaces are; it makes the wall thicker. Debuggers (``ptrace``) stay possible.
"""

from __future__ import annotations

import errno
import os
import struct

__all__ = ["ABSENT", "DENIED", "SHARED_SEGMENT_BYTES_MAX", "assemble", "refuse"]

# Numbers above 423 are the same on every architecture.
_NEW_NUMBERS = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_getfd": 438,
    "mount_setattr": 442,
}
_NUMBERS = {
    "x86_64": {
        "pivot_root": 155,
        "acct": 163,
        "mount": 165,
        "umount2": 166,
        "swapon": 167,
        "swapoff": 168,
        "reboot": 169,
        "iopl": 172,
        "ioperm": 173,
        "init_module": 175,
        "delete_module": 176,
        "quotactl": 179,
        "syslog": 103,
        "kexec_load": 246,
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
        "unshare": 272,
        "perf_event_open": 298,
        "open_by_handle_at": 304,
        "setns": 308,
        "process_vm_writev": 311,
        "kcmp": 312,
        "finit_module": 313,
        "kexec_file_load": 320,
        "bpf": 321,
        "userfaultfd": 323,
    },
    "aarch64": {
        "umount2": 39,
        "mount": 40,
        "pivot_root": 41,
        "acct": 89,
        "unshare": 97,
        "kexec_load": 104,
        "init_module": 105,
        "delete_module": 106,
        "syslog": 116,
        "reboot": 142,
        "add_key": 217,
        "request_key": 218,
        "keyctl": 219,
        "swapon": 224,
        "swapoff": 225,
        "perf_event_open": 241,
        "open_by_handle_at": 265,
        "setns": 268,
        "process_vm_writev": 271,
        "kcmp": 272,
        "finit_module": 273,
        "bpf": 280,
        "userfaultfd": 282,
        "kexec_file_load": 294,
    },
}
# Shared memory of the old kind outlives all mappings, and is then in no process; small pieces stay possible, they are
# used as locks.
_SHMGET = {"x86_64": 29, "aarch64": 194}
SHARED_SEGMENT_BYTES_MAX = 1 << 16
# A socket with this set makes whoever closes it last wait until its peer has taken everything. A program in a sandbox
# can send such a socket to the daemon, which then closes it; so it is told that all is well, and nothing is set.
_SETSOCKOPT = {"x86_64": 54, "aarch64": 208}
_SOL_SOCKET, _SO_LINGER = 1, 13
# A namespace of users could also come with a fork.
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE_NEWUSER = 0x10000000
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Answered as a kernel would that does not have them, since programs know what to do then. A C library falls back to
# clone only on ENOSYS; with EPERM no thread could be started. Files without a name are memory that no limit counts.
ABSENT = {
    "x86_64": {"memfd_create": 319, "clone3": 435, "memfd_secret": 447},
    "aarch64": {"memfd_create": 279, "clone3": 435, "memfd_secret": 447},
}
_X32_BIT = 0x40000000

_LOAD_WORD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_IF_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_FIRST, _OFFSET_SECOND, _OFFSET_THIRD = 0, 4, 16, 24, 32
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000

DENIED = {architecture: {**numbers, **_NEW_NUMBERS} for architecture, numbers in _NUMBERS.items()}


def assemble(architecture: str | None = None) -> bytes:
    """The filter as BPF instructions; empty where the architecture is not known, and the namespaces stand alone."""
    architecture = architecture or os.uname().machine
    denied = sorted(DENIED.get(architecture, {}).values())
    if not denied:
        return b""
    program = [
        _instruction(_LOAD_WORD, _OFFSET_ARCH),
        _instruction(_JUMP_EQUAL, _AUDIT_ARCH[architecture], 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD_WORD, _OFFSET_NUMBER),
        _instruction(_JUMP_AT_LEAST, _X32_BIT, 0, 1),
        _instruction(_RETURN, _KILL),
    ]
    for number in ABSENT[architecture].values():
        program += [_instruction(_JUMP_EQUAL, number, 0, 1), _instruction(_RETURN, _ERRNO | errno.ENOSYS)]
    program += [
        _instruction(_JUMP_EQUAL, _SHMGET[architecture], 0, 6),
        _instruction(_LOAD_WORD, _OFFSET_SECOND + 4),
        _instruction(_JUMP_EQUAL, 0, 0, 3),
        _instruction(_LOAD_WORD, _OFFSET_SECOND),
        _instruction(_JUMP_AT_LEAST, SHARED_SEGMENT_BYTES_MAX, 1, 0),
        _instruction(_RETURN, _ALLOW),
        _instruction(_RETURN, _ERRNO | errno.ENOMEM),
    ]
    program += [
        _instruction(_JUMP_EQUAL, _CLONE[architecture], 0, 4),
        _instruction(_LOAD_WORD, _OFFSET_FIRST),
        _instruction(_JUMP_IF_SET, _CLONE_NEWUSER, 0, 1),
        _instruction(_RETURN, _ERRNO | errno.EPERM),
        _instruction(_RETURN, _ALLOW),
    ]
    program += [
        _instruction(_JUMP_EQUAL, _SETSOCKOPT[architecture], 0, 6),
        _instruction(_LOAD_WORD, _OFFSET_SECOND),
        _instruction(_JUMP_EQUAL, _SOL_SOCKET, 0, 3),
        _instruction(_LOAD_WORD, _OFFSET_THIRD),
        _instruction(_JUMP_EQUAL, _SO_LINGER, 0, 1),
        _instruction(_RETURN, _ERRNO | 0),
        _instruction(_RETURN, _ALLOW),
    ]
    program += [_instruction(_JUMP_EQUAL, number, len(denied) - i, 0) for i, number in enumerate(denied)]
    program += [_instruction(_RETURN, _ALLOW), _instruction(_RETURN, _ERRNO | errno.EPERM)]
    return b"".join(program)


def refuse(number: int) -> bytes:
    """A filter that refuses one system call; for a process that has the other filter, which knows architectures."""
    return b"".join((
        _instruction(_LOAD_WORD, _OFFSET_NUMBER),
        _instruction(_JUMP_EQUAL, number, 0, 1),
        _instruction(_RETURN, _ERRNO | errno.EPERM),
        _instruction(_RETURN, _ALLOW),
    ))  # fmt: skip


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
