"""What the store remembers of an image, and how images are called."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote

import msgspec

from prorld.errors import SandboxError
from prorld.sandbox.images.contract import ImageKind

__all__ = [
    "Found",
    "ImageRecord",
    "Mode",
    "Origin",
    "check_name",
    "file_of_name",
    "is_name",
    "is_reference",
    "name_for",
    "name_of_file",
]

# When an image that is there already is taken instead of making it again.
Mode = Literal["scratch", "versioned", "lock"]
Origin = Literal["pull", "build", "rootfs", "path"]

NAME_BYTES_MAX = 200
REFERENCE_SCHEMES = ("docker", "oras", "library", "shub", "https", "oci-archive", "docker-archive", "oci")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@+~-]*")
_OF_FILES = ("https", "oci-archive", "docker-archive", "oci")
_SUFFIXES = (".sif", ".simg", ".def", ".tar", ".oci")


class ImageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One image of the store, as its ``record.json`` has it.

    ``digest`` is the SHA-256 of a SIF file, or that of the names, permissions and contents of a directory.
    """

    digest: str
    kind: ImageKind
    source: str
    origin: Origin
    mode: Mode
    size_bytes: int
    created_at: str
    made_with: str = ""
    packages: tuple[str, ...] = ()
    env: dict[str, str] = {}


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """An image with what changes about it. Of a ``broken`` one the record is lost, and only the digest is known."""

    record: ImageRecord
    names: tuple[str, ...]
    used_at: str
    in_use: bool
    unpacked: bool
    disk_bytes: int
    broken: bool = False


def is_reference(text: str) -> bool:
    """Whether this names an image that is somewhere else, as ``docker://python:3.12`` does."""
    scheme, colon, rest = text.partition(":")
    return bool(colon and rest) and scheme in REFERENCE_SCHEMES


def check_name(name: str) -> str:
    """The name, or ``SandboxError`` where an image can't be called so."""
    if _NAME.fullmatch(name) is None or ".." in name or name.startswith("sha256:"):
        words = "letters, digits and . _ - / : @ + ~, beginning with a letter or digit"
        raise SandboxError(f"an image can't be called {name!r}: {words}", code="bad_image_name", retryable=False)
    if len(file_of_name(name)) > NAME_BYTES_MAX:
        raise SandboxError("this name of an image is too long", code="bad_image_name", retryable=False)
    return name


def is_name(text: str) -> bool:
    """Whether an image can be called so at all."""
    return _NAME.fullmatch(text) is not None and len(file_of_name(text)) <= NAME_BYTES_MAX


def name_for(source: str) -> str:
    """What an image is called that was given no name: a reference is its own, a file or directory goes by its stem."""
    scheme, _, rest = source.partition(":")
    if not is_reference(source):
        stem = Path(source).name
    elif scheme in _OF_FILES:
        # Behind a second colon stands a tag, or a query behind a question mark.
        stem = Path(rest.partition("?" if scheme == "https" else ":")[0]).name
    else:
        return source
    for suffix in _SUFFIXES:
        stem = stem.removesuffix(suffix)
    return re.sub(r"[^A-Za-z0-9._-]", "-", stem).lstrip("._-") or "image"


def file_of_name(name: str) -> str:
    """The file name that stands for a name."""
    return quote(name, safe="")


def name_of_file(file: str) -> str:
    """The name that a file name stands for."""
    return unquote(file)
