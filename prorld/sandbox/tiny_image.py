"""A root file system of a shell and a few programs of this host, made on the spot to try walls that need an image."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from prorld.errors import SandboxError
from prorld.kit.lanes import Lane
from prorld.kit.process import run_group

__all__ = ["PROBED", "make_tiny_image"]

PROBED = "/probed/old"  # a directory of the image, with a file in it
_PROGRAMS = ("bash", "mkdir", "rm")
_MOUNT_POINTS = ("dev", "etc", "proc", "run", "sys", "tmp", "var/tmp", "work")
_LIBRARY = re.compile(r"(/\S+) \(0x")


async def make_tiny_image(root: Path, owner: tuple[int, int], lane: Lane) -> Path:
    """Make it as the directory ``root``. Raises ``SandboxError`` where this host has no such programs."""
    found = {name: shutil.which(name) for name in _PROGRAMS}
    files: dict[str, str] = {}
    for name, binary in found.items():
        if binary is None:
            raise SandboxError(f"no {name} on PATH", retryable=False)
        said = await run_group(["ldd", binary], env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"})
        files |= {library.lstrip("/"): library for library in _LIBRARY.findall(said.stdout.decode("utf-8", "replace"))}
        files[f"bin/{name}"] = binary
    await lane.run(_fill, root, files, owner)
    return root


def _fill(root: Path, files: dict[str, str], owner: tuple[int, int]) -> None:
    root.mkdir(mode=0o755)
    for name, source in files.items():
        target = root / name
        target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        shutil.copy(source, target)
    for name in (*_MOUNT_POINTS, PROBED.lstrip("/")):
        (root / name).mkdir(mode=0o755, parents=True, exist_ok=True)
    (root / PROBED.lstrip("/") / "file").write_text("")
    for name in ("hosts", "localtime", "passwd", "group", "resolv.conf"):
        (root / "etc" / name).write_text("")
    if os.getuid() == 0:
        for path in (root, *root.rglob("*")):
            os.chown(path, *owner)
    root.chmod(0o755)
