"""What stands behind the image that a task names."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Protocol

import msgspec
import trio

from prorld.errors import SandboxError

__all__ = ["Image", "ImageKind", "Images", "PathImages"]

ImageKind = Literal["directory", "sif", "docker"]


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """A root file system on this host. ``name`` is what the task called it, ``env`` what its programs expect.

    ``path`` of a docker image is its name there.
    """

    name: str
    path: str
    kind: ImageKind
    env: dict[str, str] = {}


class Images(Protocol):
    """Finds images by what tasks call them."""

    async def resolve(self, name: str, *, unpacked: bool) -> Image:
        """The image of this name; with ``unpacked`` always a directory. Raises ``SandboxError``."""
        ...


class PathImages:
    """Images by their paths, and no store."""

    async def resolve(self, name: str, *, unpacked: bool) -> Image:
        """The directory or the SIF file of this path."""
        await trio.lowlevel.checkpoint()
        kind = _kind_of(Path(name))
        if kind is None or (kind == "sif" and unpacked):
            words = "" if name.startswith("/") else " (an absolute path is needed here: there is no store)"
            raise SandboxError(f"no such image: {name}{words}", code="no_image", retryable=False)
        return Image(name=name, path=name, kind=kind)


def _kind_of(path: Path) -> ImageKind | None:
    if not path.is_absolute():
        return None
    return "directory" if path.is_dir() else "sif" if path.is_file() else None
