"""Sandboxes on an image: changes go to an overlay of their own, and an image without Python still moves files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from prorld.errors import SandboxError
from prorld.sandbox.contract import SandboxLimits, SandboxSpec
from prorld.sandbox.runtime import Runtime
from prorld.testing.sandbox_contract import open_sandbox

PROGRAMS = ("bash", "cat", "head", "ls", "mkdir", "mv", "rm", "touch")


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    """A root file system of a few programs and their libraries, owned by whoever runs sandboxes."""
    root = Path(tempfile.mkdtemp(prefix="prorld-image-"))
    for program in PROGRAMS:
        binary = shutil.which(program)
        assert binary is not None
        _copy(Path(binary), root / "bin" / program)
        said = subprocess.run(["ldd", binary], capture_output=True, text=True, check=True).stdout
        for library in re.findall(r"(/\S+) \(0x", said):
            _copy(Path(library), root / library.lstrip("/"))
    for name in ("proc", "dev", "tmp", "work", "data/old"):
        (root / name).mkdir(parents=True)
    (root / "data" / "old" / "file").write_text("from the image")
    if os.getuid() == 0:
        for path in (root, *root.rglob("*")):
            os.chown(path, 65534, 65534)
    root.chmod(0o755)
    yield str(root)
    shutil.rmtree(root)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


async def test_changes_are_its_own(runtime: Runtime, image: str) -> None:
    """Everything of the image can be changed, removed and made again, and the next sandbox sees the image as it was."""
    for sandbox_id in ("first", "second"):
        async with open_sandbox(runtime, SandboxSpec(image=image), sandbox_id=sandbox_id) as sandbox:
            assert (await sandbox.bash("cat /data/old/file")).output == b"from the image"
            changed = await sandbox.bash(
                "rm -r /data/old; mkdir /data/old; echo new > /data/old/file; mv /data /moved; ls /moved/old"
            )
            assert (changed.exit_code, changed.output) == (0, b"file\n")
            assert (await sandbox.read_file("/moved/old/file")) == b"new\n"
            assert {row.image for row in runtime.list()} == {image}


async def test_an_overlay_under_a_private_umask(runtime: Runtime, image: str) -> None:
    """The umask of the daemon keeps a sandbox neither from its changes to the image nor from its root directory."""
    before = os.umask(0o077)
    try:
        async with open_sandbox(runtime, SandboxSpec(image=image)) as sandbox:
            assert (await sandbox.bash("echo x >/data/new; cat /data/new; [[ -w / ]]")).output == b"x\n"
    finally:
        os.umask(before)


async def test_files_without_python(runtime: Runtime, image: str) -> None:
    """Bash and two small programs are all that a file transfer needs."""
    content = bytes(range(256)) * 1000
    async with open_sandbox(runtime, SandboxSpec(image=image)) as sandbox:
        await sandbox.write_file("a/b/c", content)
        assert await sandbox.read_file("a/b/c", max_bytes=len(content)) == content
        with pytest.raises(SandboxError, match="python"):
            await sandbox.python("1")
        assert (await sandbox.bash("echo on")).output == b"on\n"


async def test_sees_nothing_of_the_host(runtime: Runtime, image: str) -> None:
    """Only the image is there."""
    async with open_sandbox(runtime, SandboxSpec(image=image)) as sandbox:
        assert (await sandbox.bash("ls /usr /etc /home 2>/dev/null")).output == b""


@pytest.fixture
def empty_image() -> Iterator[str]:
    """A directory with nothing in it."""
    with tempfile.TemporaryDirectory(prefix="prorld-image-") as root:
        Path(root).chmod(0o755)
        yield root


async def test_no_shell_in_the_image(runtime: Runtime, empty_image: str) -> None:
    """An image that can't be used says why, in bubblewrap's own words."""
    with pytest.raises(SandboxError, match="bubblewrap: bwrap: "):
        await runtime.run(SandboxSpec(image=empty_image), sandbox_id="s", job_id="j")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "head -c 16M /dev/zero >/data/much",
        "exec 5>/data/much; rm /data/much; head -c 16M /dev/zero >&5",
    ],
)
async def test_the_disk_is_bounded(command: str, runtime: Runtime, image: str) -> None:
    """Who writes more to the overlay than the limit ends, with names or without, and that is said; others stay."""
    spec = SandboxSpec(image=image, limits=SandboxLimits(disk_bytes=4 << 20))
    async with open_sandbox(runtime, spec, sandbox_id="little") as little:
        await little.bash(
            "head -c 1M /dev/zero >/data/little; exec 5>/tmp/much; rm /tmp/much; head -c 16M /dev/zero >&5"
        )
        with trio.fail_after(30), pytest.RaisesGroup(pytest.RaisesExc(SandboxError, match="bytes of disk")) as caught:
            async with open_sandbox(runtime, spec, sandbox_id="much") as much:
                await much.bash(command)
                await trio.sleep_forever()
        (failure,) = caught.value.exceptions
        assert isinstance(failure, SandboxError)
        assert failure.stable_code == "sandbox_out_of_disk"
        assert (await little.bash("echo on")).output == b"on\n"
