"""What the tests of this room ask the machine."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from prorld.errors import SandboxError
from prorld.sandbox.docker import Docker, find_docker
from prorld.sandbox.images.apptainer import find_apptainer

BOOT_ID = "boot-of-the-test"


def open_descriptors() -> int:
    """How many descriptors this process has."""
    return len(list(Path("/proc/self/fd").iterdir()))


def children(pid: int | None = None) -> set[int]:
    """The children of a process, whichever of its threads started them; of this process by default."""
    found: set[int] = set()
    for path in Path(f"/proc/{os.getpid() if pid is None else pid}/task").glob("*/children"):
        with suppress(OSError):
            found |= {int(word) for word in path.read_text().split()}
    return found


def of_process(pid: int, name: str) -> str:
    """What /proc says of a process."""
    return Path(f"/proc/{pid}/{name}").read_text().strip()


def descendants(pid: int) -> set[int]:
    """All processes below one."""
    found: set[int] = set()
    todo = [pid]
    while todo:
        fresh = children(todo.pop()) - found
        found |= fresh
        todo += fresh
    return found


def descendants_named(pid: int, name: str) -> set[int]:
    """The processes below one that run a program of this name; one that ends while it is looked at runs none."""
    found: set[int] = set()
    for below in descendants(pid):
        with suppress(FileNotFoundError, ProcessLookupError):
            if of_process(below, "comm") == name:
                found.add(below)
    return found


def process_tree_of(pid: int) -> set[int]:
    """A process and all below it."""
    return {pid, *descendants(pid)}


def on_disk(runtime_dir: Path) -> list[str]:
    """The sandboxes of this boot that have a directory or are on record."""
    found = runtime_dir.glob(f"sandboxes/{BOOT_ID}/*")
    return sorted({path.name.removeprefix("@") for path in found if path.name != "owner"})


def lives(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody reaps does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def gone(pids: set[int], seconds: float = 5.0) -> bool:
    """Whether the processes are gone in time."""
    with trio.move_on_after(seconds):
        while any(lives(pid) for pid in pids):  # noqa: ASYNC110 - there is no event for strangers
            await trio.sleep(0.01)
        return True
    return False


def real_apptainer() -> str:
    """The Apptainer that scripts/test-real has installed; the test is skipped where there is none."""
    try:
        return find_apptainer()
    except SandboxError as exc:
        pytest.skip(exc.message)


def real_image(kind: str) -> Path:
    """The image that scripts/test-image has made, as a directory or as a SIF file; the test is skipped without one."""
    variable = "PRORLD_TEST_IMAGE" if kind == "directory" else "PRORLD_TEST_SIF"
    named = os.environ.get(variable)
    if not named:
        pytest.skip(f"{variable} names no image; scripts/test-real sandboxes makes one")
    return Path(named)


def needed_by_real_ones() -> list[str]:
    """Where images and Apptainer lie, which may be in a directory closed to the sandboxes' user."""
    found = [os.environ[name] for name in ("PRORLD_TEST_IMAGE", "PRORLD_TEST_SIF") if os.environ.get(name)]
    with suppress(SandboxError):
        found.append(str(Path(find_apptainer()).resolve().parents[1]))
    return found


def real_docker() -> tuple[Docker, str]:
    """Docker and its image that has bash and Python; the test is skipped where none is named or no daemon answers."""
    image = os.environ.get("PRORLD_TEST_DOCKER_IMAGE")
    if not image:
        pytest.skip("PRORLD_TEST_DOCKER_IMAGE names no image")
    try:
        find_docker()
    except SandboxError as exc:
        pytest.skip(exc.message)
    return Docker(), image
