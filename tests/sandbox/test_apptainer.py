"""Apptainer: its command line as data, and what is only true of a real one."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

import pytest
import trio

from prorld.errors import SandboxError
from prorld.sandbox.apptainer import Apptainer, apptainer_argv
from prorld.sandbox.contract import SandboxLimits, SandboxSpec
from prorld.sandbox.images.apptainer import find_apptainer
from prorld.sandbox.images.contract import Image
from prorld.sandbox.runtime import Runtime
from prorld.sandbox.wall import Request
from prorld.sandbox.warden_client import Warden
from prorld.testing.sandbox_contract import open_sandbox
from tests.sandbox.support import BOOT_ID, children, descendants, gone, of_process, real_apptainer, real_image


def _program(tmp_path: Path) -> str:
    program = tmp_path / "apptainer"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return str(program)


def test_command_line() -> None:
    """A container of our own: no instance, nothing of the host bound, no network."""
    argv = apptainer_argv("/a", SandboxSpec(), image="/i", overlay="/o")
    assert argv[:3] == ["/a", "-s", "exec"]
    assert {"--userns", "--containall", "--no-home", "--no-init", "--no-eval"} <= set(argv)
    assert argv[argv.index("--network") + 1] == "none"
    assert "--bind" not in argv
    assert argv[argv.index("--overlay") + 1] == "/o"
    assert argv[argv.index("/i") + 1] == "/bin/bash"


def test_networks() -> None:
    """The daemon's socket is bound read-only beside no network; the host's is what Apptainer has by itself."""
    daemon = apptainer_argv("/a", SandboxSpec(network="daemon"), image="/i", overlay="/o", socket_dir="/s")
    assert daemon[daemon.index("--bind") + 1] == "/s:/run/prorld:ro"
    assert "--net" in daemon
    assert "--net" not in apptainer_argv("/a", SandboxSpec(network="host"), image="/i", overlay="/o")


def test_its_environment_is_not_the_daemons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of Apptainer's own would bind the host's directories, so none of the daemon's is passed on."""
    monkeypatch.setenv("APPTAINER_BIND", "/root:/root")
    spec = SandboxSpec(image="/i", env={"OF": "the task"}, limits=SandboxLimits(scratch_bytes=1 << 20))
    request = Request(
        spec=spec,
        sandbox_id="s",
        place=tmp_path,
        image=Image(name="/i", path="/i", kind="sif", env={"PATH": "/opt/bin"}),
        uid=os.getuid(),
        gid=os.getgid(),
    )
    build = Apptainer(_program(tmp_path)).build(request)
    assert sorted(build.env) == ["HOME", "PATH", "TMPDIR"]
    assert build.env["HOME"].startswith(str(tmp_path))
    assert build.session_env["PATH"] == "/opt/bin"
    assert build.session_env["OF"] == "the task"
    assert build.furnish["tmpfs"] == [("/tmp", f"size={1 << 20},mode=1777"), ("/dev/shm", f"size={64 << 20},mode=1777")]


def test_what_it_can_not_do(tmp_path: Path) -> None:
    """No image and no Apptainer are said by name."""
    with pytest.raises(SandboxError, match="of images only"):
        Apptainer(_program(tmp_path)).check(SandboxSpec())
    with pytest.raises(SandboxError, match="/no/such, can't be run"):
        find_apptainer("/no/such")


@pytest.fixture
def apptainer(warden: Warden, runtime_dir: Path) -> Runtime:
    """Real containers on the test image."""
    image = str(real_image("directory"))
    wall = Apptainer(real_apptainer())
    return Runtime(wall, warden, runtime_dir=runtime_dir, boot_id=BOOT_ID, default_image=image)


_OVERLAY = """
rm -rf /usr/share/doc && echo removed
mv /usr/share/man /usr/share/man2 && [ -d /usr/share/man2 ] && echo moved
mkdir /usr/share/doc && [ -z "$(ls -A /usr/share/doc)" ] && echo opaque
echo x >>/etc/debian_version && echo copied
"""


@pytest.mark.real
async def test_directories_of_the_image_can_go(apptainer: Runtime) -> None:
    """Removing, moving and making again what the image brought works, and the image keeps it."""
    image = real_image("directory")
    async with open_sandbox(apptainer) as sandbox:
        assert (await sandbox.bash(_OVERLAY)).output == b"removed\nmoved\nopaque\ncopied\n"
    assert (image / "usr/share/doc").is_dir()
    assert any((image / "usr/share/doc").iterdir())


@pytest.mark.real
async def test_bounds_that_apptainer_does_not_have(apptainer: Runtime) -> None:
    """What lies in memory has a size, /dev is closed, and no namespace is made within."""
    spec = SandboxSpec(limits=SandboxLimits(scratch_bytes=4 << 20, processes=64))
    async with open_sandbox(apptainer, spec) as sandbox:
        assert (await sandbox.bash("head -c 8M /dev/zero >/tmp/big")).exit_code != 0
        assert (await sandbox.bash("stat -c %s /tmp/big")).output == b"%d\n" % (4 << 20)
        assert (await sandbox.bash("touch /dev/x")).exit_code != 0
        assert (await sandbox.bash("unshare -Ur true")).exit_code != 0
        assert (await sandbox.bash("ulimit -u")).output == b"64\n"
        assert (await sandbox.bash("grep -E '^(CapEff|NoNewPrivs|Seccomp):' /proc/self/status")).output.split() == [
            b"CapEff:", b"0000000000000000", b"NoNewPrivs:", b"1", b"Seccomp:", b"2",
        ]  # fmt: skip
        assert b"APPTAINER" not in (await sandbox.bash("env")).output


TAKE_OVER = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.ptrace(16, 1, None, None))
for name in ("mem", "environ"):
    try:
        open(f"/proc/1/{name}", "rb").read(1)
        print("opened")
    except PermissionError:
        print("refused")
child = os.fork()
if child == 0:
    os.abort() if libc.ptrace(0, 0, None, None) else os._exit(7)
print(os.waitpid(child, 0)[1] >> 8)
"""


@pytest.mark.real
async def test_the_first_process_is_not_taken_over(apptainer: Runtime) -> None:
    """It runs without a filter, so nobody debugs it; one's own children are debugged, and files go anywhere."""
    if not _has_landlock():
        pytest.skip("this kernel has no Landlock that lets files be moved")
    async with open_sandbox(apptainer) as sandbox:
        await sandbox.write_file("take.py", TAKE_OVER.encode())
        result = await sandbox.bash("python3 take.py")
        assert result.text.splitlines() == ["-1", "refused", "refused", "7"], result.text
        assert (await sandbox.bash("sleep 100 & disown; cat /proc/$!/environ | wc -c; kill $!")).exit_code == 0
        moves = "mkdir -p a/b && echo x >a/b/f && mv a/b/f . && ln f a/f && mv a /opt && cat /opt/a/f"
        assert (await sandbox.bash(moves)).output == b"x\n"


def _has_landlock() -> bool:
    return ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) >= 2


@pytest.mark.real
@pytest.mark.parametrize("victim", ["warden", "starter", "first", "helper"])
async def test_killed_from_outside(victim: str, apptainer: Runtime, warden: Warden) -> None:
    """Whatever of it is killed, nothing of the sandbox and of what Apptainer started beside it is left."""
    everything: set[int] = set()
    with trio.fail_after(30), pytest.RaisesGroup(SandboxError, flatten_subgroups=True):
        async with open_sandbox(apptainer) as sandbox:
            strays = "setsid sleep 1000 & nohup sleep 1000 & trap '' HUP TERM; (trap '' HUP TERM; sleep 1000) &"
            await sandbox.bash(strays)
            (keeper,) = children()
            everything = descendants(keeper)
            os.kill(_victim(victim, keeper, everything), signal.SIGKILL)
            await trio.sleep_forever()
    assert everything
    assert await gone(everything)
    assert "fuse-overlayfs" not in of_process(os.getpid(), "mounts")


def _victim(name: str, keeper: int, everything: set[int]) -> int:
    if name == "warden":
        return keeper
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0] for pid in everything}
    if name == "helper":
        return next(pid for pid, command in commands.items() if b"fuse" in command)
    first = next(pid for pid in everything if _is_first(pid))
    if name == "first":
        return first
    return int(Path(f"/proc/{first}/stat").read_text().rsplit(")", 1)[1].split()[1])


def _is_first(pid: int) -> bool:
    numbers = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("NSpid"))
    return numbers.split()[2:] == ["1"]
