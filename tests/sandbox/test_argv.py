"""The wall as data: what the command line of a sandbox says, and what its system call filter refuses."""

from __future__ import annotations

import errno
import struct
from pathlib import Path

import pytest

from prorld.sandbox.bubblewrap import Overlay, bubblewrap_argv, etc_files
from prorld.sandbox.contract import SandboxLimits, SandboxSpec
from prorld.sandbox.host import HostView, host_view, interpreter_prefixes, needed_paths
from prorld.sandbox.seccomp import ABSENT, DENIED, SHARED_SEGMENT_BYTES_MAX, assemble

VIEW = HostView(
    links=(("/bin", "usr/bin"), ("/lib", "usr/lib")),
    paths=("/usr", "/etc/ld.so.cache"),
    prefixes=("/home/u/venv",),
    hidden=("/home/u/venv/lib/prorld",),
)
SPEC = SandboxSpec(limits=SandboxLimits(scratch_bytes=1 << 20))


def _argv(**changes: object) -> str:
    arguments: dict = {"root": VIEW, "filtered": True, "etc": ("/etc/passwd", "/etc/group"), **changes}
    return " ".join(bubblewrap_argv("/b/bwrap", SPEC, **arguments))


def test_every_namespace() -> None:
    """All namespaces are new, none can be made within, and the sandbox dies with its parent."""
    argv = _argv()
    for flag in (
        "--unshare-all",
        "--unshare-user",
        "--disable-userns",
        "--die-with-parent",
        "--clearenv",
        "--as-pid-1",
    ):
        assert f" {flag} " in argv
    assert "--share-net" not in argv
    assert "--uid 1000 --gid 1000" in argv


def test_nothing_is_bound_writable() -> None:
    """What comes from the host is read-only, all of it is named in the view, and the root is closed at the end."""
    words = bubblewrap_argv("/b/bwrap", SPEC, root=VIEW, filtered=True)
    assert "--bind" not in words
    assert "--dev-bind" not in words
    bound = {words[i + 1] for i, word in enumerate(words) if word == "--ro-bind"}
    assert bound == {"/usr", "/etc/ld.so.cache", "/home/u/venv"}
    assert " ".join(words).index("--remount-ro / ") > " ".join(words).index("--tmpfs /work")


def test_temporary_files_are_bounded() -> None:
    """Every tmpfs that can be written to has a size."""
    words = bubblewrap_argv("/b/bwrap", SPEC, root=VIEW, filtered=False)
    for i, word in enumerate(words):
        if word == "--tmpfs" and words[i + 1] not in VIEW.hidden:
            assert words[i - 2] == "--size", words[i : i + 2]
    assert _argv().count(f"--size {1 << 20} ") == 2


def test_descriptors_are_in_order() -> None:
    """The filter is the first of the data, the files of /etc follow it; without a filter they move up."""
    assert "--seccomp 10 " in _argv()
    assert "--file 11 /etc/passwd" in _argv()
    assert "--file 12 /etc/group" in _argv()
    assert "--seccomp" not in _argv(filtered=False)
    assert "--file 10 /etc/passwd" in _argv(filtered=False)


def test_interpreter_comes_after_what_could_cover_it() -> None:
    """An environment may lie in /tmp or in the working directory."""
    argv = _argv()
    assert argv.index("--ro-bind /home/u/venv") > max(argv.index("--tmpfs /tmp"), argv.index("--tmpfs /work"))
    assert argv.index("--tmpfs /home/u/venv/lib/prorld") > argv.index("--ro-bind /home/u/venv")


def test_image() -> None:
    """An image shows nothing of the host, and changes go to the overlay alone."""
    argv = _argv(root=Overlay(image="/i", upper="/s/upper", work="/s/work"), etc=())
    assert "--overlay-src /i --overlay /s/upper /s/work /" in argv
    assert "--ro-bind " not in argv
    assert "--dir /work" in argv


def test_etc_names_the_user() -> None:
    """The synthetic /etc knows the sandbox's user and no other person."""
    files = dict(etc_files())
    assert b"agent:x:1000:1000" in files["/etc/passwd"]
    assert files["/etc/passwd"].count(b"\n") == 3


def test_this_host() -> None:
    """The view of the host running this names its own interpreter and never a home as a whole."""
    view = host_view()
    assert "/usr" in view.paths
    assert view.prefixes == interpreter_prefixes()
    assert set(view.prefixes) <= set(needed_paths())
    assert all(Path(path).is_dir() for path in needed_paths())
    assert not {"/", "/home", "/root", "/tmp", "/etc"} & {*view.paths, *view.prefixes}


@pytest.mark.parametrize("architecture", sorted(DENIED))
def test_filter(architecture: str) -> None:
    """Interpreted as the kernel does, the filter refuses what is listed, hides what is absent, passes the rest."""
    program = assemble(architecture)
    arch = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[architecture]
    for number in range(600):
        if number in ABSENT[architecture].values():
            expected = 0x50000 | errno.ENOSYS
        else:
            expected = 0x50000 | errno.EPERM if number in DENIED[architecture].values() else 0x7FFF0000
        assert _run_filter(program, number, arch) == expected, number
    assert _run_filter(program, 1, 0x40000003) == 0x80000000
    assert _run_filter(program, 0x40000001, arch) == 0x80000000


@pytest.mark.parametrize(("architecture", "shmget"), [("aarch64", 194), ("x86_64", 29)])
def test_filter_of_shared_segments(architecture: str, shmget: int) -> None:
    """A segment of the old shared memory is refused from a size on, whichever half of the word says so."""
    program = assemble(architecture)
    arch = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[architecture]
    allowed, refused = 0x7FFF0000, 0x50000 | errno.ENOMEM
    most = SHARED_SEGMENT_BYTES_MAX
    for size, expected in ((0, allowed), (most - 1, allowed), (most, refused), (1 << 32, refused), (1 << 63, refused)):
        assert _run_filter(program, shmget, arch, size) == expected, size


def test_unknown_architecture() -> None:
    """No filter is better than one with the numbers of another machine."""
    assert assemble("riscv64") == b""


@pytest.mark.parametrize(("architecture", "clone"), [("aarch64", 220), ("x86_64", 56)])
def test_filter_of_forks(architecture: str, clone: int) -> None:
    """A fork passes, and one that asks for a user namespace of its own is refused."""
    program = assemble(architecture)
    arch = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[architecture]
    new_user, signal_of_death = 0x10000000, 17
    assert _run_filter(program, clone, arch, first=signal_of_death) == 0x7FFF0000
    assert _run_filter(program, clone, arch, first=new_user | signal_of_death) == 0x50000 | errno.EPERM


@pytest.mark.parametrize(("architecture", "setsockopt"), [("aarch64", 208), ("x86_64", 54)])
def test_filter_of_sockets_that_linger(architecture: str, setsockopt: int) -> None:
    """The one option is not set although it is said to be; all others pass."""
    program = assemble(architecture)
    arch = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[architecture]
    socket_level, tcp_level, linger, reuse = 1, 6, 13, 2
    assert _run_filter(program, setsockopt, arch, socket_level, third=linger) == 0x50000
    assert _run_filter(program, setsockopt, arch, 1 << 32 | socket_level, third=1 << 32 | linger) == 0x50000
    assert _run_filter(program, setsockopt, arch, socket_level, third=reuse) == 0x7FFF0000
    assert _run_filter(program, setsockopt, arch, tcp_level, third=linger) == 0x7FFF0000


def _run_filter(program: bytes, number: int, arch: int, second: int = 0, first: int = 0, third: int = 0) -> int:
    instructions = list(struct.iter_unpack("=HBBI", program))
    at, accumulator = 0, 0
    while True:
        code, if_true, if_false, value = instructions[at]
        at += 1
        if code == 0x06:
            return value
        if code == 0x20:
            words = {0: number, 4: arch, 16: first, 24: second, 28: second >> 32, 32: third}
            accumulator = words[value] & 0xFFFFFFFF
        else:
            met = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
            at += if_true if met else if_false
