"""The probe makes a sandbox of any kind, with an image of its own where the kind needs one, and says what is wrong."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from prorld.kit.lanes import Lane
from prorld.sandbox.apptainer import Apptainer
from prorld.sandbox.bubblewrap import Bubblewrap
from prorld.sandbox.contract import SandboxSpec
from prorld.sandbox.docker import Docker
from prorld.sandbox.local import Local
from prorld.sandbox.probe import check_wall
from prorld.sandbox.runtime import Runtime
from prorld.sandbox.tiny_image import PROBED, make_tiny_image
from prorld.sandbox.wall import Wall
from prorld.sandbox.warden_client import Warden
from prorld.testing.sandbox_contract import open_sandbox
from tests.sandbox.support import open_descriptors, real_apptainer, real_docker


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that whoever runs sandboxes can pass through."""
    with tempfile.TemporaryDirectory(prefix="prorld-image-") as name:
        Path(name).chmod(0o711)
        yield Path(name)


@pytest.mark.parametrize("wall", [Bubblewrap(), Local()], ids=lambda wall: wall.name)
async def test_works(wall: Wall) -> None:
    """What works here says nothing and leaves nothing; what has no walls is tried with work that is trusted."""
    before = open_descriptors()
    assert await check_wall(wall) is None
    assert open_descriptors() == before


async def test_the_configured_image_is_tried() -> None:
    """An image that is not there is what is wrong."""
    assert "no such image: /nowhere" in str(await check_wall(Bubblewrap(), image="/nowhere"))


@pytest.mark.skipif(os.getuid() != 0, reason="only root's sandboxes run as somebody else")
async def test_what_lies_below_a_closed_directory_is_reached_where_it_is_exposed(place: Path) -> None:
    """As the daemon reaches the images in its state directory."""
    closed = place / "closed"
    closed.mkdir(mode=0o700)
    owner = (65534, 65534)
    image = str(await make_tiny_image(closed / "image", owner, Lane("test", 1)))
    assert "Permission denied" in str(await check_wall(Bubblewrap(), user=owner, image=image))
    assert await check_wall(Bubblewrap(), user=owner, image=image, exposed=[image]) is None


async def test_a_tiny_image(place: Path, warden: Warden, runtime_dir: Path) -> None:
    """It is a root file system with a shell, and its directories can be removed and made again in a sandbox."""
    image = await make_tiny_image(place / "image", (warden.uid, warden.gid), Lane("test", 1))
    runtime = Runtime(Bubblewrap(), warden, runtime_dir=runtime_dir, boot_id="b")
    async with open_sandbox(runtime, SandboxSpec(image=str(image))) as sandbox:
        assert (await sandbox.bash(f"rm -r {PROBED} && mkdir {PROBED} && echo on")).output == b"on\n"
    assert (image / PROBED.lstrip("/") / "file").exists()
    (runtime_dir / "sandboxes" / "b" / "owner").unlink()
    (runtime_dir / "sandboxes" / "b").rmdir()


@pytest.mark.parametrize(
    ("said", "cure"),
    [
        ("Cannot connect to the Docker daemon at unix:///x. Is the docker daemon running?", "sandbox.docker_host"),
        ("Got permission denied while trying to connect to the Docker daemon socket", "group docker"),
    ],
)
async def test_docker_without_an_image_is_asked_whether_it_answers(tmp_path: Path, said: str, cure: str) -> None:
    """Its own words come with the cure."""
    program = tmp_path / "docker"
    program.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    program.chmod(0o755)
    trouble = str(await check_wall(Docker(str(program))))
    assert said.split(" to ", maxsplit=1)[0] in trouble
    assert cure in trouble
    program.write_text("#!/bin/sh\necho 28.0\n")
    assert await check_wall(Docker(str(program))) is None


@pytest.mark.real
@pytest.mark.slow
async def test_apptainer() -> None:
    """It is tried with an image made on the spot; one that is not Apptainer is found out."""
    assert await check_wall(Apptainer(real_apptainer())) is None
    assert "ended" in str(await check_wall(Apptainer("/bin/false")))


@pytest.mark.real
@pytest.mark.slow
async def test_docker() -> None:
    """With an image a whole sandbox is made of it."""
    wall, image = real_docker()
    assert await check_wall(wall, image=image) is None
    assert "o such image" in str(await check_wall(wall, image=f"{image}-{os.getpid()}"))
