"""The wall: what a program in a sandbox can see, reach and become."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from prorld.errors import SandboxError
from prorld.sandbox.contract import Sandbox, SandboxLimits, SandboxSpec
from prorld.sandbox.runtime import Runtime
from prorld.testing.sandbox_contract import open_sandbox


async def test_user(sandbox: Sandbox) -> None:
    """Not root, no capability, none to be gained, filtered; the same for both sessions."""
    wanted = {"CapPrm": "0" * 16, "CapEff": "0" * 16, "CapBnd": "0" * 16, "NoNewPrivs": "1", "Seccomp": "2"}
    for result in (
        await sandbox.bash("id -u; cat /proc/self/status"),
        await sandbox.python("import os; print(os.getuid(), open('/proc/self/status').read(), sep='\\n')"),
    ):
        uid, *lines = result.text.splitlines()
        assert int(uid) == 1000
        status = dict(line.split(":", 1) for line in lines if ":" in line)
        assert {name: status[name].strip() for name in wanted} == wanted


async def test_the_first_process_has_the_limits_of_all(runtime: Runtime) -> None:
    """A debugger can take the first process over; it is held to what the sandbox is held to, and can't undo that."""
    spec = SandboxSpec(limits=SandboxLimits(processes=64, open_files=100, memory_bytes=64 << 20, file_bytes=1 << 20))
    async with open_sandbox(runtime, spec) as sandbox:
        said = (await sandbox.bash("cat /proc/1/limits; grep Seccomp: /proc/1/status")).text
        found = {line[:26].strip(): line[26:].split()[:2] for line in said.splitlines()}
        assert found["Max processes"] == ["64", "64"]
        assert found["Max open files"] == ["100", "100"]
        assert found["Max data size"] == [str(64 << 20)] * 2
        assert found["Max file size"] == [str(1 << 20)] * 2
        assert found["Max core file size"] == ["0", "0"]
        assert "Seccomp:\t2" in said


async def test_outside_it_is_an_ordinary_user(runtime: Runtime, sandbox: Sandbox) -> None:
    """Seen from the host, nothing of a sandbox runs as root."""
    (row,) = runtime.list()
    assert row.rss_bytes > 0
    owners = {path.stat().st_uid for path in _sandbox_processes()}
    assert owners
    assert 0 not in owners


def _sandbox_processes() -> list[Path]:
    """Processes of this machine whose pid namespace is not ours."""
    own = Path("/proc/self/ns/user").readlink()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "ns" / "user").readlink() != own:
                found.append(path)
        except OSError:
            continue
    return found


async def test_no_host_processes(sandbox: Sandbox) -> None:
    """Only the sandbox's own processes show, and a host pid means nothing inside."""
    result = await sandbox.bash("ls /proc | grep -c '^[0-9]'; cat /proc/1/cmdline | tr '\\0' ' '")
    count, first = result.text.split("\n", 1)
    assert int(count) < 8
    assert first.startswith("/bin/bash")
    assert (await sandbox.bash(f"ls -d /proc/{os.getpid()}")).exit_code != 0 or os.getpid() < 100


async def test_no_host_files(sandbox: Sandbox, tmp_path: Path) -> None:
    """The host's homes, temporary files and configuration are not there."""
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    result = await sandbox.bash(
        f"cat {secret} /etc/shadow /etc/ssh/ssh_host_rsa_key; ls -A /home /srv /opt /mnt /boot /sys; ls -A /etc | sort"
    )
    assert "s3cret" not in result.text
    assert result.text.count("No such file") >= 3
    listed = result.text.splitlines()
    assert not {"shadow", "ssh", "resolv.conf", "fstab"} & set(listed)
    assert "agent" in (await sandbox.bash("whoami")).text


async def test_no_host_environment(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the daemon's environment is inside, nor in any process of the sandbox."""
    monkeypatch.setenv("PRORLD_API_KEY", "k3y")
    result = await sandbox.bash("env; cat /proc/*/environ | tr '\\0' '\\n'")
    assert "k3y" not in result.text
    assert "HOME=/tmp/home" in result.text


async def test_no_network(sandbox: Sandbox) -> None:
    """No interface but loopback, and neither the host's ports nor its abstract sockets answer."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        name = f"\0prorld-test-{os.getpid()}"
        abstract.bind(name)
        abstract.listen()
        port = server.getsockname()[1]
        result = await sandbox.python(
            "import socket, os\n"
            "print(sorted(name for _, name in socket.if_nameindex()))\n"
            "def go(family, address):\n"
            "  try: socket.socket(family).connect(address); return 'through'\n"
            "  except OSError as exc: return type(exc).__name__\n"
            f"print(go(socket.AF_INET, ('127.0.0.1', {port})))\n"
            f"print(go(socket.AF_UNIX, {name!r}))\n"
            "print(go(socket.AF_INET, ('192.0.2.1', 80)))"
        )
    assert result.text.splitlines() == ["['lo']", "ConnectionRefusedError", "ConnectionRefusedError", "OSError"]


async def test_no_way_up(sandbox: Sandbox) -> None:
    """No user namespace within, no mount, none of the calls that hostile programs like; threads and clone work."""
    result = await sandbox.python(
        "import ctypes, errno, threading\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "def call(*a):\n"
        "  ctypes.set_errno(0); r = libc.syscall(*a)\n"
        "  return errno.errorcode.get(ctypes.get_errno(), 'ok') if r < 0 else 'ok'\n"
        "import os\n"
        "x86 = os.uname().machine == 'x86_64'\n"
        "print(libc.unshare(0x10000000), libc.mount(b'none', b'/tmp', b'tmpfs', 0, 0))\n"
        "print(call(425, 1, 0), call(435, 0, 0), call(321 if x86 else 280, 0, 0, 0))\n"
        "t = threading.Thread(target=print, args=('thread',)); t.start(); t.join()"
    )
    assert result.text.splitlines() == ["-1 -1", "EPERM ENOSYS EPERM", "thread"]
    assert (await sandbox.bash("unshare -Ur true")).exit_code != 0


async def test_no_memory_without_a_name(sandbox: Sandbox) -> None:
    """Memory that is in no process is refused as by a kernel that has none of it; small shared pieces can be had."""
    result = await sandbox.python(
        "import ctypes, errno, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "def name(r): return errno.errorcode[ctypes.get_errno()] if r < 0 else 'ok'\n"
        "try: os.memfd_create('x')\n"
        "except OSError as exc: print(errno.errorcode[exc.errno])\n"
        "print(name(libc.syscall(447, 0)))\n"
        "libc.shmget.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_int]\n"
        "for size in (4096, (1 << 16) - 1, 1 << 16, 1 << 30, 1 << 32): print(name(libc.shmget(0, size, 0o600)))"
    )
    assert result.text.split() == ["ENOSYS", "ENOSYS", "ok", "ok", "ENOMEM", "ENOMEM", "ENOMEM"]


async def test_nothing_to_write_but_scratch(sandbox: Sandbox) -> None:
    """Only the working directory and the temporary ones take writes, and they are bounded."""
    script = (
        "for d in / /usr /usr/lib /etc /dev /root /run /var /proc; do touch $d/x 2>/dev/null && echo $d; done; true"
    )
    assert (await sandbox.bash(script)).output == b""
    assert (await sandbox.bash("touch /work/x /tmp/x /dev/shm/x /var/tmp/y ~/x && echo ok")).output == b"ok\n"
    sizes = (await sandbox.bash("df -B1 --output=size /work /tmp /dev/shm | tail -n +2")).text.split()
    assert [int(size) for size in sizes] == [512 << 20, 512 << 20, 64 << 20]


async def test_init_can_not_be_killed(sandbox: Sandbox) -> None:
    """A policy that kills everything it can costs itself its sessions, and no more."""
    await sandbox.write_file("kept", b"1")
    await sandbox.bash("kill -9 -1; kill -9 1; kill -TERM 1; kill -INT 1; kill -STOP 1")
    await sandbox.bash("(kill -9 -1)", limit_s=5)
    assert await sandbox.read_file("kept") == b"1"
    assert (await sandbox.bash("echo up")).output == b"up\n"


async def test_orphans_are_reaped(sandbox: Sandbox) -> None:
    """What loses its parent leaves no zombie."""
    await sandbox.bash("for i in $(seq 20); do (setsid true &) ; done")
    wait = "while grep -q '^State:.Z' /proc/[0-9]*/status 2>/dev/null; do sleep 0.02; done"
    assert not (await sandbox.bash(wait, limit_s=10)).timed_out


async def test_sandboxes_do_not_see_each_other(runtime: Runtime) -> None:
    """Two sandboxes share neither files nor processes."""
    async with open_sandbox(runtime) as one, open_sandbox(runtime, sandbox_id="two") as two:
        await one.bash("echo mine > /work/a; echo mine > /tmp/a; echo mine > /dev/shm/a; sleep 987654 &")
        seen = await two.bash("cat /work/a /tmp/a /dev/shm/a 2>/dev/null; cat /proc/*/cmdline | grep -ac 987654")
        assert "mine" not in seen.text
        assert seen.text.strip() in {"0", "1"}  # the pattern of grep itself may show


@pytest.mark.parametrize("workdir", ["relative", "/", "/usr/x", "/proc", "/a/../b", "/a//b", "/a\0b", "/etc"])
async def test_bad_workdir(runtime: Runtime, workdir: str) -> None:
    """A working directory that would cover what a sandbox needs is refused before anything starts."""
    with pytest.raises(SandboxError, match="working directory"):
        await runtime.run(SandboxSpec(workdir=workdir), sandbox_id="x", job_id="j")


async def test_further_directories_to_write_to(runtime: Runtime) -> None:
    """They are there and empty, with a bound of their own; everything beside them stays closed."""
    spec = SandboxSpec(writable=("/logs/verifier", "/tests"), limits=SandboxLimits(scratch_bytes=1 << 20))
    async with open_sandbox(runtime, spec) as sandbox:
        result = await sandbox.bash(
            "ls -A /logs/verifier /tests && echo 1 >/logs/verifier/reward.txt && touch /tests/a"
        )
        assert result.exit_code == 0, result
        assert await sandbox.read_file("/logs/verifier/reward.txt") == b"1\n"
        assert (await sandbox.bash("head -c 2000000 /dev/zero >/tests/full")).exit_code != 0
        assert (await sandbox.bash("touch /logs/other || touch /other")).exit_code != 0


@pytest.mark.parametrize("path", ["/", "/etc", "/usr/share", "tests", "/a/../etc", "/proc/1"])
async def test_what_is_no_directory_to_write_to(path: str, runtime: Runtime) -> None:
    """Refused before anything is begun."""
    with pytest.raises(SandboxError, match="working directory"):
        await runtime.run(SandboxSpec(writable=(path,)), sandbox_id="x", job_id="j")
