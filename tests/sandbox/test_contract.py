"""Every runtime keeps the promises of the contract: the fake under a virtual clock, the real ones in real time."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio.testing

from prorld.sandbox.apptainer import Apptainer
from prorld.sandbox.docker import Docker
from prorld.sandbox.local import Local
from prorld.sandbox.runtime import Runtime
from prorld.sandbox.warden_client import Warden
from prorld.testing.fake_sandbox import FakeRuntime
from prorld.testing.sandbox_contract import SandboxCheck, sandbox_checks
from tests.sandbox.support import BOOT_ID, real_apptainer, real_docker, real_image


@pytest.mark.parametrize("check", sandbox_checks(shell=False), ids=lambda check: check.name)
async def test_fake(check: SandboxCheck, autojump_clock: trio.testing.MockClock) -> None:
    """The fake answers as the contract says, so what is tested against it holds against the real ones."""
    runtime = FakeRuntime()
    await check.run(runtime)
    assert runtime.live == {}


@pytest.mark.parametrize("check", sandbox_checks(), ids=lambda check: check.name)
async def test_bubblewrap(check: SandboxCheck, runtime: Runtime) -> None:
    """Bubblewrap answers as the contract says."""
    await check.run(runtime)


@pytest.mark.parametrize("check", sandbox_checks(walls=False), ids=lambda check: check.name)
async def test_local(check: SandboxCheck, warden: Warden, runtime_dir: Path) -> None:
    """What has no walls answers as the contract says, too."""
    await check.run(Runtime(Local(forced=True), warden, runtime_dir=runtime_dir, boot_id=BOOT_ID))


# Looked for in fixtures that are no coroutines: of a skip within an event loop the reason is lost.
@pytest.fixture(params=["directory", "sif"])
def apptainer(request: pytest.FixtureRequest) -> tuple[Apptainer, str]:
    """Apptainer, and an image for it."""
    image = str(real_image(request.param))
    return Apptainer(real_apptainer()), image


@pytest.fixture
def docker() -> tuple[Docker, str]:
    """Docker, and its image."""
    return real_docker()


@pytest.mark.real
@pytest.mark.parametrize("check", sandbox_checks(), ids=lambda check: check.name)
async def test_apptainer(
    check: SandboxCheck, apptainer: tuple[Apptainer, str], warden: Warden, runtime_dir: Path
) -> None:
    """Apptainer answers as the contract says, on an image that is a directory and on one that is a file."""
    wall, image = apptainer
    await check.run(Runtime(wall, warden, runtime_dir=runtime_dir, boot_id=BOOT_ID, default_image=image))


@pytest.mark.real
@pytest.mark.parametrize("check", sandbox_checks(), ids=lambda check: check.name)
async def test_docker(check: SandboxCheck, docker: tuple[Docker, str], warden: Warden, runtime_dir: Path) -> None:
    """Docker answers as the contract says, with a warden of ours in each container."""
    wall, image = docker
    await check.run(Runtime(wall, warden, runtime_dir=runtime_dir, boot_id=BOOT_ID, default_image=image))
