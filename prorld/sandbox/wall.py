"""What stands between a sandbox and its host: the seam between the one runtime and the kinds of walls it can use.

A wall says how the outermost process of a sandbox is started and how programs get inside. Everything else, the
sessions, the files, the limits and the end, is the same for all of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec
import trio

from prorld.errors import SandboxError
from prorld.sandbox.births import CONTROL_FD
from prorld.sandbox.contract import SandboxSpec
from prorld.sandbox.images.contract import Image
from prorld.sandbox.warden_client import Warden

__all__ = [
    "HOLDER",
    "HOME",
    "READY",
    "SHM_BYTES",
    "Build",
    "Enclosing",
    "Enclosure",
    "Holder",
    "Request",
    "Wall",
    "give_directory",
    "image_environment",
]

READY = b"R"
SHM_BYTES = 64 << 20
HOME = "/tmp/home"  # noqa: S108 - of the sandbox
# The first process of a sandbox: a bash that does nothing but wait for the end of its control socket. Sessions and file
# transfers enter from outside, so that none of them can end it.
_HOLD = f"printf {READY.decode()} >&{CONTROL_FD}; while IFS= read -r -u {CONTROL_FD} _; do :; done"
HOLDER = ("/bin/bash", "--norc", "--noprofile", "-c", _HOLD)

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox that is to be made. ``place`` is its own directory; ``uid`` and ``gid`` are the warden's."""

    spec: SandboxSpec
    sandbox_id: str
    place: Path
    image: Image | None
    uid: int
    gid: int


class Build(msgspec.Struct, frozen=True, kw_only=True):
    """How a sandbox is made.

    ``argv`` starts its outermost process, with ``data`` on descriptors; ``env`` is that process's, ``session_env`` that
    of the programs inside. ``has_namespaces`` says that these enter the namespaces of its first process, ``furnish``
    what is put there beforehand; otherwise they run beside it, under the system call filter where it is ``filtered``.
    ``bare`` says that this first process has no filter itself, so that they are kept from taking it over.
    ``scratch`` are its directories in memory, ``on_disk`` those on the host's disk that it writes to.
    """

    argv: list[str]
    env: dict[str, str] = {}
    data: list[bytes] = []
    helpers: bool = False
    marker: str = ""
    has_namespaces: bool = True
    filtered: bool = False
    bare: bool = False
    furnish: dict[str, object] = {}
    session_env: Mapping[str, str]
    workdir: str
    scratch: tuple[str, ...] = ()
    on_disk: tuple[str, ...] = ()


class Wall(Protocol):
    """One kind of wall."""

    @property
    def name(self) -> str:
        """The kind, as it shows in status and in records."""
        ...

    @property
    def unpacked(self) -> bool:
        """Whether images have to be directories."""
        ...

    def check(self, spec: SandboxSpec) -> None:
        """Raise ``SandboxError``, not to be tried again, for what this wall can't make."""
        ...

    def uses_disk(self, image: Image | None) -> bool:
        """Whether a sandbox of this image has files in its own directory, which is made for it only then."""
        ...

    def build(self, request: Request) -> Build:
        """Make what has to be there beforehand, and say how to go on.

        Blocks where there are files to make, and is called in a thread lane then.
        """
        ...


class Holder(Protocol):
    """The process whose end is a sandbox's end. ``first`` is the one that all others of it are below."""

    @property
    def pid(self) -> int:
        """Its number on this host."""
        ...

    @property
    def first(self) -> int | None:
        """The number on this host of the first process in there."""
        ...

    @property
    def failure(self) -> SandboxError | None:
        """Why it has ended, where more is known than that."""
        ...

    @property
    def running(self) -> bool:
        """Whether its end has not been heard of."""
        ...

    async def wait(self) -> int:
        """Wait until it is gone; its exit code."""
        ...

    async def end(self) -> None:
        """Kill it, and everything of it, and wait until it is gone. The caller bounds the wait."""
        ...


class Enclosure(msgspec.Struct, frozen=True, kw_only=True):
    """What stands already, with a warden of its own within."""

    warden: Warden
    first: Holder


@runtime_checkable
class Enclosing(Protocol):
    """A wall that nobody enters from outside: it brings a warden within, and has images of its own."""

    async def greet(self) -> None:
        """Raise ``SandboxError`` where what makes it does not answer."""
        ...

    async def resolve(self, name: str) -> Image:
        """The image of this name. Raises ``SandboxError``."""
        ...

    async def enclose(
        self, request: Request, *, task_status: trio.TaskStatus[Enclosure] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Keep what encloses a sandbox until cancelled, then leave nothing of it. Raises ``SandboxError``."""
        ...

    async def reap(self, runtime_dir: Path, *, boot_id: str) -> int:
        """Remove what daemons that are gone have left of theirs; says how many."""
        ...


def give_directory(path: Path, request: Request, *, mode: int) -> None:
    """Make a directory of the sandbox's user, with this mode whatever the umask."""
    path.mkdir(mode=mode)
    path.chmod(mode)
    os.chown(path, request.uid, request.gid)


def image_environment(image: Image | None, home: str = HOME) -> dict[str, str]:
    """What every program in a sandbox finds in its environment, before what its task adds."""
    return {"PATH": _PATH, **({} if image is None else image.env), "HOME": home}
