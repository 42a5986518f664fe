"""Images by a real Apptainer and a real apt: built, pulled, unpacked, and used by a real sandbox."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from prorld.errors import SandboxError
from prorld.sandbox.contract import SandboxSpec
from prorld.sandbox.images.look import look
from prorld.sandbox.images.making import build, pull
from prorld.sandbox.images.progress import Silence
from prorld.sandbox.images.rootfs import make_rootfs
from prorld.sandbox.images.store import ImageStore
from prorld.sandbox.runtime import Runtime
from prorld.testing.sandbox_contract import open_sandbox
from tests.sandbox.images.support import OWNER, Heard

pytestmark = [pytest.mark.real, pytest.mark.slow]

QUIET = Silence()
TEXT = "made by the test\n"
SECONDS = 600.0
# Whatever a registry's image sets comes out as it was.
ODD = 'ODD=$5 `id` \\\\d "word" it\'s two\nlines'


@pytest.fixture
def real(place: Path, apptainer: str) -> Iterator[ImageStore]:
    """An empty store with the real Apptainer."""
    store = ImageStore(place / "store", owner=OWNER, apptainer=apptainer)
    yield store
    store.close()


def blob(layout: Path, data: bytes, kind: str) -> dict[str, Any]:
    """A blob of an OCI layout, as its manifests name it."""
    digest = hashlib.sha256(data).hexdigest()
    (layout / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
    (layout / "blobs" / "sha256" / digest).write_bytes(data)
    return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(data)}


def oci_layout(layout: Path, environment: list[str]) -> Path:
    """A registry's image in a directory: one layer with a file, a setuid program and a link out of the image."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, mode in (("made", 0o644), ("bin/suid", 0o4755)):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(TEXT), mode
            tar.addfile(entry, io.BytesIO(TEXT.encode()))
        link = tarfile.TarInfo("out")
        link.type, link.linkname = tarfile.SYMTYPE, "../../../../etc"
        tar.addfile(link)
    plain = packed.getvalue()
    config = {
        "architecture": "amd64", "os": "linux", "config": {"Env": environment},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(plain).hexdigest()}"]},
    }  # fmt: skip
    manifest = {
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": blob(layout, json.dumps(config).encode(), "config.v1+json"),
        "layers": [blob(layout, gzip.compress(plain, mtime=0), "layer.v1.tar+gzip")],
    }  # fmt: skip
    index = {"schemaVersion": 2, "manifests": [blob(layout, json.dumps(manifest).encode(), "manifest.v1+json")]}
    (layout / "index.json").write_text(json.dumps(index))
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return layout


def archived(layout: Path, archive: Path) -> Path:
    """The same as one file."""
    with tarfile.open(archive, "w") as tar:
        for path in sorted(layout.iterdir()):
            tar.add(path, path.name)
    return archive


@pytest.mark.parametrize("form", ["oci", "oci-archive"])
async def test_an_image_of_a_registry_is_pulled_and_unpacked(real, place, form):
    """Its environment is known before it is unpacked and after, and nothing in it is setuid."""
    layout = oci_layout(place / "layout", ["PATH=/opt/bin:/bin", ODD])
    source = layout if form == "oci" else archived(layout, place / "image.tar")
    with trio.fail_after(SECONDS):
        made = await pull(real, f"{form}:{source}", name="small", mode="versioned", progress=QUIET)
        packed = await real.resolve("small", unpacked=False)
        image = await real.resolve("small", unpacked=True)
        again = await pull(real, f"{form}:{source}", name="other", mode="versioned", progress=QUIET)
    assert (made.reused, again.reused, again.record.digest) == (False, True, made.record.digest)
    assert packed.kind == "sif"
    assert packed.env == image.env
    assert image.env["PATH"] == "/opt/bin:/bin"
    assert f"ODD={image.env['ODD']}" == ODD
    root = Path(image.path)
    assert (root / "made").read_text() == TEXT
    assert (root / "bin" / "suid").lstat().st_mode & 0o7777 == 0o755
    assert (root / "out").is_symlink()


async def test_a_definition_is_built_once(real, place, apptainer):
    """On a directory of this host, with an argument; the same content is taken from the store, another is built."""
    base = await pull(real, f"oci:{oci_layout(place / 'layout', [])}", name="base", mode="lock", progress=QUIET)
    sif = real.shelf.path(base.record)
    place.joinpath("copied").write_text("one")
    definition = place / "env.def"
    definition.write_text(
        f"Bootstrap: localimage\nFrom: {sif}\n%files\n  copied /copied\n%environment\n  export SAID='{{{{ SAID }}}}'\n"
    )
    options: dict[str, Any] = {"name": "built", "mode": "lock", "progress": QUIET}
    with trio.fail_after(SECONDS):
        first = await build(real, str(definition), arguments={"SAID": "hello there"}, **options)
        again = await build(real, str(definition), arguments={"SAID": "hello there"}, **options)
        image = await real.resolve("built", unpacked=True)
        place.joinpath("copied").write_text("two")
        other = await build(real, str(definition), arguments={"SAID": "hello there"}, **options)
    assert (first.reused, again.reused, other.reused) == (False, True, False)
    assert first.record.env["SAID"] == image.env["SAID"] == "hello there"
    assert (Path(image.path) / "copied").read_text() == "one"
    assert other.record.digest != first.record.digest


@pytest.mark.skipif(os.geteuid() != 0, reason="only root keeps its store below /root")
async def test_roots_own_directories_do(place, apptainer):
    """The store, the definition and its files lie below /root, which the user that builds can't pass."""
    with tempfile.TemporaryDirectory(dir="/root", prefix=".prorld-images-") as home:
        store = ImageStore(Path(home) / "store", owner=OWNER, apptainer=apptainer)
        base = await pull(store, f"oci:{oci_layout(place / 'layout', [])}", name="base", mode="lock", progress=QUIET)
        context = Path(home) / "context"
        context.mkdir()
        (context / "copied").write_text("one")
        (place / "base.sif").write_bytes(store.shelf.path(base.record).read_bytes())
        (context / "env.def").write_text(f"Bootstrap: localimage\nFrom: {place}/base.sif\n%files\n  copied /copied\n")
        options: dict[str, Any] = {"name": "built", "mode": "scratch", "arguments": {}, "progress": QUIET}
        with trio.fail_after(SECONDS):
            await build(store, str(context), **options)
            image = await store.resolve("built", unpacked=True)
            assert (Path(image.path) / "copied").read_text() == "one"
            context.chmod(0o700)
            with pytest.raises(SandboxError, match="can't enter") as caught:
                await build(store, str(context), **options)
        store.close()
    assert caught.value.stable_code == "image_build_failed"


async def test_a_build_that_fails_says_what_apptainer_said(real, place):
    """And leaves nothing."""
    (place / "env.def").write_text("Bootstrap: nonsense\nFrom: nowhere\n")
    with trio.fail_after(SECONDS), pytest.raises(SandboxError, match="nonsense") as caught:
        await build(real, str(place / "env.def"), name=None, mode="lock", arguments={}, progress=QUIET)
    assert (caught.value.stable_code, caught.value.may_retry) == ("image_build_failed", False)
    assert caught.value.details is not None
    assert caught.value.details["said"]
    assert [*(real.directory / "staging").iterdir()] == []


async def test_a_registry_that_can_not_be_reached_may_be_asked_again(real):
    """What it said is in the message; what was never pulled is not there."""
    reference = "docker://127.0.0.1:1/no/image:1"
    with trio.fail_after(SECONDS), pytest.raises(SandboxError, match="refused") as caught:
        await pull(real, reference, name=None, mode="versioned", progress=QUIET)
    assert (caught.value.stable_code, caught.value.may_retry) == ("image_pull_failed", True)
    with pytest.raises(SandboxError) as unknown:
        await real.resolve(reference, unpacked=True)
    assert unknown.value.stable_code == "no_image"


async def test_a_damaged_sif_file_is_a_broken_image(real, place):
    """Apptainer itself says so."""
    made = await pull(real, f"oci:{oci_layout(place / 'layout', [])}", name="a", mode="lock", progress=QUIET)
    data = real.shelf.path(made.record).read_bytes()
    (place / "half.sif").write_bytes(data[: len(data) // 2])
    with trio.fail_after(SECONDS), pytest.raises(SandboxError) as caught:
        await real.resolve(str(place / "half.sif"), unpacked=True)
    assert (caught.value.stable_code, caught.value.may_retry) == ("image_broken", False)


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="no apt on this machine")
async def test_a_sandbox_runs_on_an_image_of_packages(place, runtime: Runtime):
    """Shell, Python and git answer; the same packages again are taken from the store."""
    store = ImageStore(place / "store", owner=OWNER)
    heard = Heard()
    with trio.fail_after(SECONDS):
        made = await make_rootfs(store, "small", [], mode="versioned", progress=heard)
        again = await make_rootfs(store, "small", [], mode="versioned", progress=QUIET)
        image = await store.resolve("small", unpacked=True)
        async with open_sandbox(runtime, SandboxSpec(image=image.path)) as sandbox:
            command = (
                "awk 'BEGIN {print 1}'; sh -c 'echo 2'; python3 -c 'print(3)'; git --version; ps -o comm= | head -1"
            )
            result = await sandbox.bash(command, limit_s=60.0)
    store.close()
    assert (made.reused, again.reused) == (False, True)
    assert len(made.record.packages) > 20
    assert [step.split()[0] for step in heard.steps] == ["reading", "fetching", "unpacking", "taking"]
    lines = result.text.splitlines()
    assert lines[:3] == ["1", "2", "3"], result
    assert lines[3].startswith("git version")
    found = look(Path(image.path))
    assert (found.libc, found.misses) == ("glibc", ())


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="no apt on this machine")
async def test_packages_that_are_not_there_are_named(place):
    """In the words of apt, and nothing is left."""
    store = ImageStore(place / "store", owner=OWNER)
    with trio.fail_after(SECONDS), pytest.raises(SandboxError, match="no-such-package") as caught:
        await make_rootfs(store, "small", ["no-such-package"], mode="versioned", progress=QUIET)
    assert (caught.value.stable_code, caught.value.may_retry) == ("image_build_failed", False)
    assert await store.list() == []
    assert [*(store.directory / "staging").iterdir()] == []
