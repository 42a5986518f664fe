"""Uploads and downloads of a real sandbox: trees both ways, with and without ``tar``, and what is refused."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from prorld.errors import SandboxError
from prorld.sandbox.contract import Sandbox, SandboxLimits, SandboxSpec
from prorld.sandbox.runtime import Runtime
from prorld.testing.sandbox_contract import open_sandbox
from tests.sandbox.test_tar import look

# The image's commands, but for its tar.
NO_TAR = {"PATH": "/tmp/bin"}
HIDE_TAR = "mkdir /tmp/bin; ln -s /usr/bin/* /tmp/bin/; rm /tmp/bin/tar"


def peak_kib(*, afresh: bool = False) -> int:
    """The most memory that this process has had resident, or has now if it is to be counted from here on."""
    if afresh:
        Path("/proc/self/clear_refs").write_text("5")
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1])


def names(directory: Path) -> list[str]:
    """What is in a directory of this host."""
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with all that is kept."""
    root = tmp_path / "tree"
    long = "d" * 130
    (root / "sub" / long).mkdir(parents=True)
    (root / "sub" / long / "deep").write_bytes(b"deep")
    (root / "empty").write_bytes(b"")
    (root / "even").write_bytes(bytes(range(256)) * 4)
    (root / "odd \n name").write_bytes(b"\0x" * 513)
    (root / os.fsdecode(b"\xff\xfe")).write_bytes(b"bytes")
    (root / "run").write_bytes(b"#!/bin/sh\n")
    (root / "run").chmod(0o755)
    (root / "sub" / "up").symlink_to("../run")
    (root / "far").symlink_to(f"sub/{long}/deep")
    (root / "closed").mkdir()
    (root / "closed" / "in").write_bytes(b"in")
    (root / "closed").chmod(0o555)
    return root


@pytest.fixture
async def sandbox(runtime: Runtime) -> AsyncIterator[Sandbox]:
    """A sandbox whose working directory has nothing else in it, wherever this interpreter lies."""
    async with open_sandbox(runtime, SandboxSpec(workdir="/box")) as opened:
        yield opened


@pytest.fixture(params=[{}, NO_TAR], ids=["tar", "without tar"])
async def either(runtime: Runtime, request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    """A sandbox that has tar, and one that has not."""
    async with open_sandbox(runtime, SandboxSpec(workdir="/box", env=request.param)) as opened:
        if request.param:
            assert (await opened.bash(f"PATH=/usr/bin; {HIDE_TAR}")).exit_code == 0
            assert (await opened.bash("PATH=/tmp/bin; type tar")).exit_code == 1
        yield opened


async def test_tree(either: Sandbox, tree: Path, tmp_path: Path) -> None:
    """A tree comes out as it went in; nothing else is left on either side."""
    await either.upload(tree, "a/b/tree")
    assert (await either.bash("cat a/b/tree/far; a/b/tree/run; ls -A a/b")).output == b"deeptree\n"
    await either.download("a/b/tree", tmp_path / "new" / "out")
    given, got = look(tree), look(tmp_path / "new" / "out")
    assert got == {**given, "closed": ("directory", 0o755, b"")}
    assert names(tmp_path / "new") == ["out"]


async def test_empty_directories_are_filled(either: Sandbox, tree: Path, tmp_path: Path) -> None:
    """An empty directory is filled, the working directory too; one with something in it is left as it is."""
    await either.upload(tree, ".")
    (tmp_path / "out").mkdir()
    await either.download("/box", tmp_path / "out")
    assert look(tmp_path / "out").keys() == look(tree).keys()
    with pytest.raises(FileExistsError):
        await either.upload(tree, "sub")
    with pytest.raises(FileExistsError):
        await either.download("sub", tmp_path / "out")
    with pytest.raises(NotADirectoryError):
        await either.upload(tree, "run")


async def test_file(either: Sandbox, tmp_path: Path) -> None:
    """A file comes out as it went in, with its mode, and replaces a file."""
    source = tmp_path / "source"
    for content in (b"", b"D", b"F644\n", os.urandom(1 << 20)):
        source.write_bytes(content)
        source.chmod(0o751)
        await either.upload(source, "x/y")
        assert (await either.bash("stat -c '%a %s' x/y; ls -A x")).output == b"751 %d\ny\n" % len(content)
        await either.download("x/y", tmp_path / "out")
        assert (tmp_path / "out").read_bytes() == content
        assert (tmp_path / "out").stat().st_mode & 0o777 == 0o751
    with pytest.raises(IsADirectoryError):
        await either.upload(source, "x")


async def test_refusals(sandbox: Sandbox, tmp_path: Path) -> None:
    """What can't be had has the error that files have, and nothing comes to the target."""
    await sandbox.bash("touch closed; chmod 0 closed; mkfifo pipe; mkdir fifos; mkfifo fifos/p; echo 123456 > six")
    await sandbox.bash("mkdir out; ln -s /etc/passwd out/link; truncate -s 900M holes; mkdir sparse; mv holes sparse")
    for path, kind in (
        ("nowhere", FileNotFoundError),
        ("closed", PermissionError),
        ("pipe", ValueError),
        ("fifos", ValueError),
        ("out", ValueError),
        ("sparse", ValueError),
        ("sparse/holes", ValueError),
        ("six", ValueError),
        ("a\0b", FileNotFoundError),
    ):
        with pytest.raises(kind):
            await sandbox.download(path, tmp_path / "target", max_bytes=6)
    assert names(tmp_path) == []
    with pytest.raises(FileNotFoundError):
        await sandbox.upload(tmp_path / "nowhere", "x")
    os.mkfifo(tmp_path / "pipe")
    for source in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ValueError, match="neither"):
            await sandbox.upload(source, "x")
    (tmp_path / "pipe").unlink()
    with pytest.raises(OSError, match="Read-only"):
        await sandbox.upload(tmp_path, "/usr/x")
    assert (await sandbox.bash("ls -A")).output.split() == [b"closed", b"fifos", b"out", b"pipe", b"six", b"sparse"]


async def test_a_tar_that_lies(runtime: Runtime, tmp_path: Path) -> None:
    """A program of the sandbox that takes the place of its tar can't write anywhere but below the target."""
    evil = (
        'python3 -c \'import tarfile, sys; a = tarfile.open(fileobj=sys.stdout.buffer, mode="w|"); '
        't = tarfile.TarInfo("../evil"); a.addfile(t); a.close()\''
    )
    async with open_sandbox(runtime, SandboxSpec(workdir="/box", env={"PATH": "/box/bin:/usr/bin:/bin"})) as sandbox:
        await sandbox.bash(f"mkdir bin d; cat > bin/tar <<'EOF'\n#!/bin/bash\n{evil}\nEOF\nchmod +x bin/tar")
        with pytest.raises(ValueError, match="leaves"):
            await sandbox.download("d", tmp_path / "target")
        assert names(tmp_path) == []
        for lie in ("exec sleep 1000 >/dev/null", "echo nonsense", "true", "exit 3", "yes"):
            await sandbox.bash(f"printf '#!/bin/bash\n{lie}\n' > bin/tar")
            with trio.move_on_after(1.0), pytest.raises((OSError, ValueError, trio.Cancelled)):
                await sandbox.download("d", tmp_path / "target")
        assert names(tmp_path) == []


@pytest.mark.slow
async def test_large_tree_in_little_memory(runtime: Runtime, tmp_path: Path) -> None:
    """Two hundred megabytes both ways do not pass through memory as a whole."""
    (tmp_path / "in").mkdir()
    for number in range(2):
        with (tmp_path / "in" / f"f{number}").open("wb") as file:
            file.truncate(100 << 20)
    before = peak_kib(afresh=True)
    limits = SandboxLimits(scratch_bytes=1 << 30, memory_bytes=4 << 30)
    async with open_sandbox(runtime, SandboxSpec(limits=limits)) as sandbox:
        await sandbox.upload(tmp_path / "in", "tree")
        await sandbox.download("tree", tmp_path / "out")
    assert {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()} == {
        "f0": 100 << 20,
        "f1": 100 << 20,
    }
    assert peak_kib() - before < 64 << 10


async def test_full_sandbox(runtime: Runtime, tmp_path: Path) -> None:
    """A sandbox without room refuses, and what had come is gone again."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "big").write_bytes(bytes(4 << 20))
    spec = SandboxSpec(workdir="/box", limits=SandboxLimits(scratch_bytes=2 << 20))
    async with open_sandbox(runtime, spec) as sandbox:
        for source in (tmp_path / "in", tmp_path / "in" / "big"):
            with pytest.raises(OSError, match=r"No space left|Wrote only"):
                await sandbox.upload(source, "x")
        assert (await sandbox.bash("ls -A; df --output=used . | tail -1")).output.split() == [b"0"]


async def test_cancelled(sandbox: Sandbox, tmp_path: Path) -> None:
    """A transfer that is given up leaves nothing at its target, and the next one works."""
    source = tmp_path / "big"
    source.write_bytes(bytes(64 << 20))
    for seconds in (0.0, 0.005, 0.02):
        with trio.move_on_after(seconds):
            await sandbox.upload(source, "big")
        assert (await sandbox.bash("ls -A")).output == b""
        with trio.move_on_after(seconds):
            await sandbox.upload(tmp_path, "tree")
        assert (await sandbox.bash("ls -A")).output == b""
    await sandbox.upload(source, "big")
    for seconds in (0.0, 0.005, 0.02):
        with trio.move_on_after(seconds):
            await sandbox.download("big", tmp_path / "out")
        assert names(tmp_path) == ["big"]
    await sandbox.download("big", tmp_path / "out")
    assert (tmp_path / "out").stat().st_size == 64 << 20


async def test_sandbox_that_ends(runtime: Runtime, tmp_path: Path) -> None:
    """A transfer that the end of the sandbox cuts off is the sandbox's error."""
    source = tmp_path / "big"
    source.write_bytes(bytes(1 << 20))
    async with open_sandbox(runtime) as sandbox:
        pass
    with pytest.raises(SandboxError):
        await sandbox.upload(source, "x")
    with pytest.raises(SandboxError):
        await sandbox.download("x", tmp_path / "x")
