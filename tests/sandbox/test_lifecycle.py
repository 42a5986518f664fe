"""Nothing outlives its scope: cancelled at any moment, with the daemon killed, with the warden killed, many at once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable
from pathlib import Path

import pytest
import trio

from prorld.errors import ConfigError, SandboxError
from prorld.sandbox.contract import SandboxLimits, SandboxSpec
from prorld.sandbox.reaper import Reaped, reap
from prorld.sandbox.runtime import Runtime
from prorld.sandbox.warden_client import Warden, run_warden
from prorld.testing.sandbox_contract import open_sandbox
from tests.sandbox.support import children, descendants, gone, lives, on_disk, open_descriptors


def _warden_pid() -> int:
    (pid,) = children()
    return pid


async def test_nothing_is_left(runtime: Runtime, runtime_dir: Path) -> None:
    """When a sandbox's scope has ended its processes, descriptors and directory are gone, hostile children included."""
    before = open_descriptors()
    async with open_sandbox(runtime) as sandbox:
        await sandbox.bash("setsid sleep 1000 & nohup sleep 1000 & trap '' HUP TERM; (trap '' HUP TERM; sleep 1000) &")
        await sandbox.python("import subprocess; subprocess.Popen(['setsid', 'sleep', '1000'])")
        inside = descendants(_warden_pid())
        assert len(inside) >= 8
        assert on_disk(runtime_dir) == ["contract-1"]
    assert not any(lives(pid) for pid in inside)
    assert children(_warden_pid()) == set()
    assert open_descriptors() == before
    assert on_disk(runtime_dir) == []
    assert runtime.list() == ()


@pytest.mark.slow
@pytest.mark.real
async def test_cancelled_at_any_moment(runtime: Runtime, runtime_dir: Path) -> None:
    """Wherever the cancellation hits, start, command, transfer, end, nothing is left of the sandbox."""
    chance = random.Random(7)
    before = open_descriptors()
    async with trio.open_nursery() as nursery:
        for number in range(60):
            nursery.start_soon(_life, runtime, f"s{number}", chance.uniform(0, 0.5))
            await trio.sleep(chance.uniform(0, 0.03))
    assert await gone(descendants(_warden_pid()))
    assert open_descriptors() == before
    assert on_disk(runtime_dir) == []
    assert runtime.list() == ()
    async with open_sandbox(runtime) as sandbox:
        assert (await sandbox.bash("echo on")).output == b"on\n"


async def _life(runtime: Runtime, sandbox_id: str, seconds: float) -> None:
    with trio.move_on_after(seconds):
        async with open_sandbox(runtime, sandbox_id=sandbox_id) as sandbox, trio.open_nursery() as nursery:
            nursery.start_soon(sandbox.write_file, "file", b"x" * 100_000)
            nursery.start_soon(sandbox.python, "print(1)")
            while True:
                await sandbox.bash("setsid sleep 100 & echo on")


@pytest.mark.slow
@pytest.mark.real
async def test_many_at_once(runtime: Runtime) -> None:
    """Fifty sandboxes start together, answer together, and leave nothing."""
    answers: list[bytes] = []

    async def live(number: int) -> None:
        async with open_sandbox(runtime, sandbox_id=f"s{number}") as sandbox:
            answers.append((await sandbox.bash(f"echo {number} > f; cat f")).output)
            await everyone.wait()

    everyone = trio.Event()
    async with trio.open_nursery() as nursery:
        for number in range(50):
            nursery.start_soon(live, number)
        with trio.fail_after(60):
            while len(answers) < 50:  # noqa: ASYNC110 - counts
                await trio.sleep(0.01)
        assert len(runtime.list()) == 50
        everyone.set()
    assert sorted(answers) == sorted(f"{number}\n".encode() for number in range(50))
    assert children(_warden_pid()) == set()


@pytest.mark.slow
@pytest.mark.real
async def test_idle_sandbox_stays(runtime: Runtime) -> None:
    """A sandbox outlives the worker threads of the daemon: its parent is a process, not a thread that idles out."""
    async with open_sandbox(runtime) as sandbox:
        await sandbox.bash("x=1")
        await trio.sleep(11)
        assert (await sandbox.bash("echo $x")).output == b"1\n"


@pytest.mark.slow
async def test_warden_dies(runtime: Runtime, warden: Warden) -> None:
    """A warden that dies takes all sandboxes along, everybody hears of it at once, and another one takes over."""
    failures: list[str] = []

    async def command() -> None:
        try:
            async with open_sandbox(runtime) as sandbox:
                up.set()
                await sandbox.bash("sleep 1000", limit_s=600)
        except* SandboxError as group:
            failures.extend(str(exc) for exc in group.exceptions)

    up = trio.Event()
    with trio.fail_after(15):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(command)
            await up.wait()
            await trio.sleep(0.05)
            pid = _warden_pid()
            inside = descendants(pid)
            os.kill(pid, signal.SIGKILL)
    assert failures
    assert await gone(inside)
    with trio.fail_after(15):
        while warden.restarts_total < 1 or not children():  # noqa: ASYNC110 - a process comes up
            await trio.sleep(0.01)
        await _answers_again(runtime)


async def _answers_again(runtime: Runtime) -> None:
    while True:
        try:
            async with open_sandbox(runtime, sandbox_id="after") as sandbox:
                assert (await sandbox.bash("echo on")).output == b"on\n"
        except* SandboxError:
            await trio.sleep(0.02)
        else:
            return


async def test_sandbox_dies(runtime: Runtime) -> None:
    """A sandbox that ends by itself is an error of its actor, and whoever uses it is told."""
    with trio.fail_after(15), pytest.RaisesGroup(SandboxError, flatten_subgroups=True):
        async with open_sandbox(runtime):
            holder = min(children(_warden_pid()))
            os.kill(holder, signal.SIGKILL)
            await trio.sleep_forever()


async def test_cancelled_requests_leave_no_descriptor(warden: Warden) -> None:
    """A child that arrives for a caller who has gone is closed and killed."""
    before = open_descriptors()
    for microseconds in (0, 100, 300, 1000, 2000, 4000):
        with trio.move_on_after(microseconds / 1e6):
            child = await warden.spawn(["/bin/sleep", "1000"], env={})
            child.close()
    assert await gone(descendants(_warden_pid()))
    with trio.fail_after(5):
        while open_descriptors() > before:  # noqa: ASYNC110 - answers are on their way
            await trio.sleep(0.01)


async def test_bad_program(warden: Warden) -> None:
    """What can't be executed is refused with a reason, and the warden goes on."""
    with pytest.raises(SandboxError, match="no/such"):
        await warden.spawn(["/no/such/program"], env={})
    with pytest.raises(SandboxError, match="too large"):
        await warden.spawn(["/bin/true", "x" * 200_000], env={})
    for env in ({"A": "\ud800"}, {"A": "\0"}, {"A=B": "c"}):
        with pytest.raises(SandboxError):
            await warden.spawn(["/bin/true"], env=env)
    child = await warden.spawn(["/bin/sh", "-c", "exit 7"], env={})
    assert await child.wait() == 7
    child.close()


async def test_enter_needs_a_sandbox(warden: Warden) -> None:
    """A child that is no sandbox can't be entered."""
    child = await warden.spawn(["/bin/sleep", "1000"], env={})
    with pytest.raises(SandboxError, match="no such sandbox"):
        await warden.spawn(["/bin/true"], env={}, enter=child)
    await child.end()
    assert child.exit_code is not None


async def test_never_as_root() -> None:
    """Sandboxes as root are refused, and so is another user where this process can't become one."""
    with pytest.raises(ConfigError):
        await run_warden(user=(0, 0))


@pytest.mark.parametrize(
    "spec",
    [
        SandboxSpec(image="/no/such/image"),
        SandboxSpec(env={"A": "x" * 200_000}),
        SandboxSpec(env={"A=B": "c"}),
        SandboxSpec(env={"A": "\0"}),
        SandboxSpec(env={"A": "\ud800"}),
        SandboxSpec(workdir="/proc/1"),
        SandboxSpec(kernel="iPython"),  # type: ignore[arg-type]
        SandboxSpec(limits=SandboxLimits(memory_bytes=1)),
        SandboxSpec(env={"A": 1}),  # type: ignore[dict-item]
    ],
    ids=["image", "large environment", "name", "value", "no text", "workdir", "kernel", "limit", "no string"],
)
async def test_impossible_spec(runtime: Runtime, spec: SandboxSpec) -> None:
    """What can't be made is an error that comes out bare, and nothing is left."""
    with pytest.raises(SandboxError):
        await runtime.run(spec, sandbox_id="s", job_id="j")
    assert runtime.list() == ()


DAEMON = textwrap.dedent("""
    import sys, trio
    from pathlib import Path
    from prorld.sandbox.bubblewrap import Bubblewrap
    from prorld.sandbox.runtime import Runtime
    from prorld.sandbox.contract import SandboxSpec
    from prorld.sandbox.warden_client import run_warden

    async def main():
        async with trio.open_nursery() as nursery:
            warden = await nursery.start(lambda task_status: run_warden(task_status=task_status))
            runtime = Runtime(Bubblewrap(), warden, runtime_dir=Path(sys.argv[1]), boot_id="killed")
            for number in range(3):
                async def run(task_status):
                    await runtime.run(SandboxSpec(), sandbox_id=f"s{number}", job_id="j", task_status=task_status)
                sandbox = await nursery.start(run)
                await sandbox.bash("setsid sleep 1000 & nohup sleep 1000 & trap '' HUP TERM INT")
                await sandbox.bash("(trap '' HUP TERM INT; sleep 1000) & (trap '' HUP; setsid sleep 1000) &")
                await sandbox.python("import subprocess; subprocess.Popen(['setsid', 'nohup', 'sleep', '1000'])")
            print("up", flush=True)
            await trio.sleep_forever()

    trio.run(main)
""")


@pytest.mark.slow
def test_daemon_is_killed(runtime_dir: Path) -> None:
    """Two seconds after the daemon was killed no process of any sandbox is left, whatever it ignores."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    argv = [sys.executable, "-c", DAEMON, str(runtime_dir)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=environment) as daemon:
        try:
            assert daemon.stdout is not None
            assert daemon.stdout.readline() == b"up\n"
            inside = descendants(daemon.pid)
            assert len(inside) > 20
        finally:
            daemon.kill()
    end = time.monotonic() + 2
    while any(lives(pid) for pid in inside) and time.monotonic() < end:
        time.sleep(0.01)
    assert not [pid for pid in inside if lives(pid)]
    _sweep_the_rest(runtime_dir)


def _sweep_the_rest(runtime_dir: Path) -> None:
    """What the kernel can't take back, the next boot does."""
    assert len(list(runtime_dir.glob("sandboxes/killed/@*"))) == 3
    assert reap(runtime_dir, boot_id="next") == Reaped(sandboxes=3, processes=0)
    assert reap(runtime_dir, boot_id="next") == Reaped()
    assert not list(runtime_dir.glob("sandboxes/*"))


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.skipif(os.getuid() != 0, reason="is an ordinary user already")
def test_as_an_ordinary_user() -> None:
    """Without root the room keeps the same promises: its tests pass as another user, in an interpreter it can reach."""
    here = Path(__file__).parent
    pytest_arguments = ["-q", "-p", "no:cacheprovider", "-m", "not slow"]
    names = ("contract", "hostile", "isolation", "lifecycle", "memory")
    pytest_arguments += [str(here / f"test_{name}.py") for name in names]
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(here.parents[1]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": "/nonexistent",
    }
    argv = [sys.executable, "-c", ANOTHER_USER, *pytest_arguments]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, cwd=here.parents[1], check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout


ANOTHER_USER = textwrap.dedent("""
    import os, sys
    from prorld.sandbox.host import interpreter_prefixes
    from prorld.sandbox.syscalls import Libc, drop_to, expose

    expose(Libc(), [*interpreter_prefixes()], 65534, 65534)
    drop_to(65534, 65534)
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *sys.argv[1:]])
""")


async def test_calls_under_way_hear_of_the_end(runtime: Runtime) -> None:
    """Whoever waits for a sandbox that ends meanwhile gets ``SandboxError``, at once and from every kind of call."""
    failures: list[Exception] = []

    async def call(what: Awaitable[object]) -> None:
        try:
            await what
        except SandboxError as exc:
            failures.append(exc)

    with trio.fail_after(15):
        async with trio.open_nursery() as callers, open_sandbox(runtime) as sandbox:
            await sandbox.python("1")
            calls: list[Awaitable[object]] = [
                sandbox.bash("sleep 1000", limit_s=600),
                sandbox.bash("echo waits in line", limit_s=600),
                sandbox.python("import time; time.sleep(1000)", limit_s=600),
                sandbox.write_file("big", b"x" * 30_000_000),
            ]
            for what in calls:
                callers.start_soon(call, what)
            await trio.sleep(0.02)
    assert len(failures) >= 3
