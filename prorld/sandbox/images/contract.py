"""What stands behind the image that a task names."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Protocol

import msgspec
import trio

from prorld.errors import SandboxError

__all__ = ["Image", "ImageKind", "Images", "PathImages"]

ImageKind = Literal["directory", "sif"]


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """A root file system on this host. ``name`` is what the task called it."""

    name: str
    path: str
    kind: ImageKind


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
        path = Path(name)
        if path.is_absolute() and path.is_dir():
            return Image(name=name, path=name, kind="directory")
        if path.is_absolute() and path.is_file() and not unpacked:
            return Image(name=name, path=name, kind="sif")
        raise SandboxError(f"no such image: {name}", code="no_image", retryable=False)
