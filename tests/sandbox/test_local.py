"""No walls: refused for what a policy wrote, and left without a trace all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from prorld.errors import SandboxError
from prorld.sandbox.contract import SandboxSpec
from prorld.sandbox.local import Local
from prorld.sandbox.runtime import Runtime
from prorld.sandbox.warden_client import Warden
from prorld.testing.sandbox_contract import open_sandbox
from tests.sandbox.support import BOOT_ID, children, descendants, gone, lives


def _runtime(warden: Warden, runtime_dir: Path, *, forced: bool = False) -> Runtime:
    return Runtime(Local(forced=forced), warden, runtime_dir=runtime_dir, boot_id=BOOT_ID)


async def test_only_what_is_trusted(warden: Warden, runtime_dir: Path) -> None:
    """A policy's work is refused unless the operator forces it; the task's own is not."""
    with pytest.RaisesGroup(pytest.RaisesExc(SandboxError, match="allow_unisolated")):
        async with open_sandbox(_runtime(warden, runtime_dir)):
            pytest.fail("it was made")
    async with open_sandbox(_runtime(warden, runtime_dir), SandboxSpec(trusted=True)) as sandbox:
        assert (await sandbox.bash("echo in")).output == b"in\n"
    async with open_sandbox(_runtime(warden, runtime_dir, forced=True)) as sandbox:
        assert (await sandbox.bash("echo in")).output == b"in\n"


async def test_no_images(warden: Warden, runtime_dir: Path) -> None:
    """There is nothing that could stand in for an image."""
    with pytest.RaisesGroup(pytest.RaisesExc(SandboxError, match="no images")):
        async with open_sandbox(_runtime(warden, runtime_dir, forced=True), SandboxSpec(image="/i")):
            pytest.fail("it was made")


async def test_nothing_of_the_daemons_environment(
    warden: Warden, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the daemon was started with, keys among it, is in no program's environment; nobody runs as root."""
    monkeypatch.setenv("API_KEY", "secret")
    async with open_sandbox(_runtime(warden, runtime_dir, forced=True)) as sandbox:
        assert b"API_KEY" not in (await sandbox.bash("env")).output
        assert (await sandbox.bash("id -u")).output != b"0\n"


async def test_strays_end_with_it_and_neighbours_stay(warden: Warden, runtime_dir: Path) -> None:
    """What left its session is known by its mark; that of another sandbox goes on."""
    runtime = _runtime(warden, runtime_dir, forced=True)
    async with open_sandbox(runtime, sandbox_id="one") as one:
        assert (await one.bash("x=1; sleep 1000 & disown")).exit_code == 0
        # With its interpreter up, too, nothing of it comes later and is taken for the other's.
        await one.python("1")
        (keeper,) = children()
        before = descendants(keeper)
        async with open_sandbox(runtime, sandbox_id="two") as two:
            await two.bash(
                "(setsid sleep 1000 &); nohup sleep 1000 & trap '' HUP TERM; (trap '' HUP TERM; sleep 1000) &"
            )
            await two.python("import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)")
            its = descendants(keeper) - before
            assert len(its) >= 6
        assert await gone(its)
        assert (await one.bash("echo $x; kill -0 $! && echo alive")).output == b"1\nalive\n"
        assert all(lives(pid) for pid in before)
