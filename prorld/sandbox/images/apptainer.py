"""Apptainer's own work on images: building, pulling, unpacking, reading what a file says of itself.

Each piece is a child process (``apptainer_child``) in a process group, a scrubbed environment and a home of its own. It
runs as the user that sandboxes run as: as root, Apptainer fails where a capability is missing, and what an image brings
along is nothing that root should unpack.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import trio

from prorld.errors import SandboxError
from prorld.sandbox.images.programs import Said, run_lines

__all__ = ["Apptainer", "Request", "find_apptainer"]

Action = Literal["build", "pull", "unpack", "inspect"]

PROGRAMS = ("apptainer", "singularity")
VARIABLE = "PRORLD_APPTAINER"
# Downloads of tens of gigabytes and compilers are no fault; what stands still for so long is.
SECONDS_MAX: Mapping[Action, float] = {"build": 4 * 3600.0, "pull": 4 * 3600.0, "unpack": 1800.0, "inspect": 60.0}

_CHILD = "prorld.sandbox.images.apptainer_child"
_RESULT_BYTES_MAX = 4 << 20
# How one reaches the network is the user's; nothing else of the environment is handed on.
_NETWORK = (
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR",
)  # fmt: skip
# What a registry says that it says the next time, too.
_SETTLED = ("unauthorized", "denied", "manifest unknown", "not found", "no such image", "invalid reference format")
CURE = "install it, run `scripts/apptainer` of prorld's sources, or name one with sandbox.apptainer"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of work, as the child finds it on its command line."""

    action: Action
    program: str
    source: str
    work: str
    output: str = ""
    options: tuple[str, ...] = ()
    uid: int = -1
    gid: int = -1
    reach: tuple[str, ...] = ()
    cwd: str | None = None


def find_apptainer(chosen: str | None = None) -> str:
    """The chosen program, that of the environment, the one on PATH, or the one that ``scripts/apptainer`` installed."""
    chosen = chosen or os.environ.get(VARIABLE)
    if chosen:
        if os.access(chosen, os.X_OK) and Path(chosen).is_file():
            return str(Path(chosen).absolute())
        raise SandboxError(
            f"the Apptainer that was named, {chosen}, can't be run", code="no_apptainer", retryable=False
        )
    for name in PROGRAMS:
        found = shutil.which(name)
        if found is not None:
            return found
    ours = Path(sys.prefix).parent / ".tools" / "apptainer" / "bin" / "apptainer"
    if os.access(ours, os.X_OK):
        return str(ours)
    raise SandboxError(f"there is no Apptainer here: {CURE}", code="no_apptainer", retryable=False)


class Apptainer:
    """Runs pieces of work as ``owner``, one process group each."""

    def __init__(self, chosen: str | None, owner: tuple[int, int] | None) -> None:
        self._chosen = chosen
        self._owner = owner

    def program(self) -> str:
        """The program that is used. Raises ``SandboxError`` where there is none."""
        return find_apptainer(self._chosen)

    async def build(
        self, source: str, output: Path, work: Path, *, cwd: str, options: tuple[str, ...], said: Said
    ) -> None:
        """Make a SIF file from a definition, a directory, an archive or a reference."""
        await self._do("build", source, work, output=output, options=options, said=said, cwd=cwd, reach=(cwd,))

    async def pull(self, reference: str, output: Path, work: Path, *, said: Said) -> None:
        """Fetch a SIF file, or make one of what a registry has."""
        await self._do("pull", reference, work, output=output, said=said)

    async def unpack(self, sif: Path, output: Path, work: Path, *, said: Said) -> None:
        """Make a directory of a SIF file."""
        await self._do("unpack", str(sif), work, output=output, said=said, reach=(str(sif.parent),))

    async def inspect(self, sif: Path, work: Path) -> dict[str, Any]:
        """What a SIF file says of itself: labels, environment, definition."""
        output = work / "inspected.json"
        await self._do("inspect", str(sif), work, output=output, said=_ignore, reach=(str(sif.parent),))
        try:
            with output.open("rb") as file:
                found = msgspec.json.decode(file.read(_RESULT_BYTES_MAX), type=dict[str, Any])
        except (OSError, msgspec.DecodeError) as exc:
            raise SandboxError("Apptainer said nothing of the image", code="image_broken", retryable=False) from exc
        return found

    async def _do(
        self,
        action: Action,
        source: str,
        work: Path,
        *,
        output: Path,
        said: Said,
        options: tuple[str, ...] = (),
        reach: tuple[str, ...] = (),
        cwd: str | None = None,
    ) -> None:
        program = self.program()
        uid, gid = self._owner or (-1, -1)
        request = Request(
            action=action, program=program, source=source, work=str(work), output=str(output), options=options,
            uid=uid, gid=gid, cwd=cwd, reach=(str(work), _prefix(program), *reach),
        )  # fmt: skip
        argv = [sys.executable, "-I", "-m", _CHILD, msgspec.json.encode(request).decode()]
        try:
            with trio.fail_after(SECONDS_MAX[action]):
                code, last = await run_lines(argv, env=environment(work, os.environ), said=said, lifeline=True)
        except trio.TooSlowError:
            raise SandboxError(f"Apptainer took longer than {SECONDS_MAX[action]:.0f} s to {action} {source}") from None
        if code != 0:
            raise failed(action, source, last)


def _prefix(program: str) -> str:
    """Where Apptainer is installed: it takes its libraries and helpers from there."""
    return str(Path(program).resolve().parent.parent)


def environment(work: Path, own: Mapping[str, str]) -> dict[str, str]:
    """All that Apptainer gets to see of the environment."""
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        # A home that is there would be mounted over /root while a definition is built, and hide the store of root.
        "HOME": "/nonexistent",
        "LANG": "C.UTF-8",
        "TMPDIR": str(work),
        "APPTAINER_CONFIGDIR": str(work / "config"),
        "APPTAINER_TMPDIR": str(work),
        "APPTAINER_CACHEDIR": str(work / "cache"),
        "APPTAINER_MESSAGELEVEL": "1",
        **{name: own[name] for name in _NETWORK if name in own},
    }


def failed(action: str, source: str, last: list[str]) -> SandboxError:
    """What went wrong, from what Apptainer said last."""
    words = next((line for line in reversed(last) if line.startswith(("FATAL", "ERROR"))), last[-1] if last else "")
    words = words.removeprefix("FATAL:").removeprefix("ERROR:").strip() or "it said nothing"
    code = {"build": "image_build_failed", "pull": "image_pull_failed"}.get(action, "image_broken")
    is_settled = any(said in words.lower() for said in _SETTLED)
    if any("No module named 'spython'" in line for line in last):
        words, code = "the package spython is missing; prorld[apptainer] and `./just init` bring it", "no_apptainer"
    elif "newuidmap was not found" in words:
        words += "; install it (the package uidmap), or build as a user that /etc/subuid does not name"
    details = {"said": last}
    return SandboxError(
        f"Apptainer could not {action} {source}: {words}",
        code=code,
        retryable=code == "image_pull_failed" and not is_settled,
        details=details,
    )


def _ignore(_: str) -> None:
    pass
