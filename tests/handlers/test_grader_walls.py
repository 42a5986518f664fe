"""A grader has no network and no more rights than it needs, and whatever it does it leaves nothing behind."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from prorld.errors import GraderError
from prorld.handlers import grader as grader_module
from prorld.handlers.grader import open_grader, run_grader
from prorld.sandbox import isolation

MODULE = """
import ctypes, os, signal, socket, sys, time

def warm_up():
    global opened
    opened = open("/dev/zero", "rb")

def name(_: str) -> str:
    return "ok"

def connect(where: list) -> str:
    kind, address = where
    family = {"tcp": socket.AF_INET, "udp": socket.AF_INET, "unix": socket.AF_UNIX}[kind]
    with socket.socket(family, socket.SOCK_DGRAM if kind == "udp" else socket.SOCK_STREAM) as it:
        it.settimeout(3)
        it.connect(tuple(address) if isinstance(address, list) else address)
        it.send(b"hello")
    return "connected"

def interfaces(_: str) -> list:
    return [line.split(":")[0].strip() for line in open("/proc/self/net/dev").read().splitlines()[2:]]

def who(_: str) -> dict:
    status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines() if ":" in line)
    return {"uid": os.geteuid(), "groups": os.getgroups() if os.geteuid() else ["root"],
            "caps": [int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")],
            "no_new_privs": int(status["NoNewPrivs"]), "seccomp": int(status["Seccomp"])}

def descriptors(_: str) -> list:
    return sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                  if os.path.lexists(f"/proc/self/fd/{fd}"))

def read(path: str) -> str:
    return open(path).read()

def make(path: str) -> str:
    os.mkdir(path)
    return "made"

def regain(_: str) -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    return "regained" if libc.unshare(0x10000000) == 0 or libc.ptrace(16, 1, 0, 0) == 0 else "no"

def pids(_: str) -> list:
    return sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())

def bomb(mark: str) -> str:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        try:
            if os.fork() == 0:
                os.setsid()
                for number in range(1, 32):
                    try:
                        signal.signal(number, signal.SIG_IGN)
                    except OSError:
                        pass
        except BaseException:
            pass

def escape(mark: str) -> str:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in range(1, 32):
                try:
                    signal.signal(number, signal.SIG_IGN)
                except OSError:
                    pass
            while True:
                time.sleep(60)
        os._exit(0)
    return "escaped"

def count(_: str) -> int:
    made = 0
    try:
        while made < 5000:
            if os.fork() == 0:
                time.sleep(60)
            made += 1
    except OSError:
        pass
    return made

def memory(_: str) -> int:
    kept = []
    while True:
        kept.append(bytearray(b"x" * (1 << 20)))

def kill_all(_: str) -> str:
    for pid in [-1, 1, os.getppid()]:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
    return "still here"
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of hostile graders that only the children import."""
    (tmp_path / "hostile_graders.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "hostile_graders"
    assert "hostile_graders" not in sys.modules


@pytest.fixture(params=["namespaces", "filter"])
def walls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Namespaces, and what is left where the kernel has none to give."""
    monkeypatch.setattr(grader_module, "NAMESPACES", request.param == "namespaces")
    return str(request.param)


def stat_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


@pytest.fixture
def adopting() -> Iterator[None]:
    """Orphans become children of this process, so that ``descendants`` finds everything that was left behind."""
    libc = ctypes.CDLL(None)
    assert libc.prctl(36, ctypes.c_ulong(1), 0, 0, 0) == 0
    yield
    assert libc.prctl(36, ctypes.c_ulong(0), 0, 0, 0) == 0


def descendants() -> set[int]:
    """Everything below this process that lives."""
    parents: dict[int, int] = {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, parent = stat_of(int(place.name))[:2]
            if state != "Z":
                parents[int(place.name)] = int(parent)
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


async def refused(function: str, payload: object, code: str, **options: Any) -> GraderError:
    with pytest.raises(GraderError) as caught:
        await run_grader(function, payload, object, **options)
    assert caught.value.stable_code == code
    return caught.value


async def test_no_listener_can_be_reached(module: str, walls: str, tmp_path: Path) -> None:
    """TCP and UDP on the loopback, and a socket in the file system: all are there, and none hears a grader."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    address = list(listeners[0].socket.getsockname())
    here = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as local, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        local.bind(str(here))
        local.listen()
        here.chmod(0o666)
        datagrams.bind(("127.0.0.1", 0))
        # That they can be reached at all is shown by a grader without walls.
        reached = [("tcp", address), ("udp", list(datagrams.getsockname())), ("unix", str(here))]
        for where in reached:
            assert await run_grader(f"{module}:connect", where, str, isolated=False) == "connected"
            error = await refused(f"{module}:connect", where, "grader_failed")
            assert "PermissionError" in error.message
    for listener in listeners:
        await listener.aclose()


async def test_the_network_is_empty(module: str) -> None:
    """Beside the filter, whoever got by it would find a loopback that nobody is on."""
    assert await run_grader(f"{module}:interfaces", "", list) == ["lo"]
    assert await run_grader(f"{module}:pids", "", list) != []


async def test_no_privilege_is_left(module: str, walls: str) -> None:
    """Neither root nor its groups nor a capability, and no way back."""
    found = await run_grader(f"{module}:who", "", dict)
    assert found["uid"] != 0
    assert (found["caps"], found["no_new_privs"], found["seccomp"]) == ([0] * 4, 1, 2)
    assert set(found["groups"]) <= set(os.getgroups()) - {0}
    assert await run_grader(f"{module}:regain", "", str) == "no"


async def test_descriptors_are_its_own(module: str, walls: str) -> None:
    """Three streams, the pipe of its answer, and what its module has opened; nothing of the daemon or its parent."""
    with socket.socket() as ours:
        ours.set_inheritable(True)
        found = await run_grader(f"{module}:descriptors", "", list)
    assert [name for name in found if not name.startswith("pipe:")] == ["/dev/null", "/dev/zero"]
    assert len([name for name in found if name.startswith("pipe:")]) == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a daemon that is root")
async def test_a_token_of_root_is_not_for_graders(module: str, walls: str, tmp_path: Path) -> None:
    """What only root may read, as a state directory's token, only root reads."""
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o600)
    assert await run_grader(f"{module}:read", str(token), str, isolated=False) == "secret"
    error = await refused(f"{module}:read", str(token), "grader_failed")
    assert "PermissionError" in error.message


async def test_nothing_is_made(module: str) -> None:
    """Neither by another user, nor by the daemon's own where all is read-only."""
    with pytest.raises(GraderError, match=r"Errno (13|30)"):
        await run_grader(f"{module}:make", str(Path.home() / "made-by-a-grader"), str)


@pytest.mark.slow
async def test_a_bomb_of_forks_ends_in_its_limit(module: str, adopting: None) -> None:
    """Each in a session of its own and deaf to every signal that can be ignored: all are gone with the grade."""
    before = descendants()
    async with open_grader(f"{module}:bomb", object, children=1, limit_s=1.0) as grader:
        await grader.warm()
        serving = descendants() - before
        with pytest.raises(GraderError) as caught:
            await grader.grade("x")
        assert caught.value.stable_code == "grader_timeout"
        assert descendants() - before == serving
    assert descendants() - before == set()


async def test_what_escapes_is_killed(module: str, walls: str, adopting: None) -> None:
    """A grandchild in a session of its own lives no longer than the grade, and the next grade has the same child."""
    before = descendants()
    async with open_grader(f"{module}:escape", str, children=1) as grader:
        await grader.warm()
        serving = descendants() - before
        assert await grader.grade("x") == "escaped"
        assert descendants() - before == serving
        assert await grader.grade("x") == "escaped"
    assert descendants() - before == set()


async def test_processes_are_few(module: str) -> None:
    """The limit is the grader's own, whatever else the same user runs."""
    made = await run_grader(f"{module}:count", "", int)
    assert 0 < made < isolation.PROCESSES_MAX


async def test_memory_is_bounded(module: str, walls: str) -> None:
    """It is told so, as an error of the grade."""
    error = await refused(f"{module}:memory", "", "grader_failed", memory_bytes=300 << 20)
    assert "out of memory" in error.message


async def test_a_grade_that_kills_everybody_is_alone(module: str) -> None:
    """It reaches nobody outside of its namespace, and the first process in there can't be killed from within."""
    async with open_grader(f"{module}:kill_all", str, children=1) as grader:
        for _ in range(2):
            assert await grader.grade("x") == "still here"


async def test_without_walls_nothing_is_graded(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that can't build them says so; whoever must may do without."""
    # The children find this package in the place of the real one, and no walls in it.
    (tmp_path / "prorld").mkdir()
    (tmp_path / "prorld" / "__init__.py").write_text("")
    error = await refused(f"{module}:name", "", "grader_not_isolated")
    assert not error.may_retry
    assert await run_grader(f"{module}:name", "", str, isolated=False) == "ok"


def test_neither_namespaces_nor_a_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an architecture whose system calls have no numbers here, without namespaces, there are no walls."""
    monkeypatch.setattr(isolation, "_SYSTEM_CALLS", {})
    with pytest.raises(OSError, match="neither namespaces nor"):
        isolation.enter([], namespaces=False)
