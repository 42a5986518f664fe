"""No wall at all: programs run beside the daemon, as its user, in a directory of their own.

For a laptop without namespaces, and for work that is the task's own. A policy's work is refused unless the operator
says otherwise. What such a sandbox starts is found and ended by its session and by a mark in its environment; a program
that leaves both is ended when the warden ends. There is no limit of processes, and the network is the host's.
"""

from __future__ import annotations

import os

from prorld.errors import SandboxError
from prorld.sandbox.contract import SandboxSpec
from prorld.sandbox.images.contract import Image
from prorld.sandbox.wall import HOLDER, Build, Request, give_directory

__all__ = ["Local"]

_MARK = "PRORLD_SANDBOX"


class Local:
    """The missing wall. ``forced`` lets in what is not trusted."""

    name = "local"
    unpacked = True

    def __init__(self, *, forced: bool = False) -> None:
        self._forced = forced

    def check(self, spec: SandboxSpec) -> None:
        """Refuse a policy's work, and images."""
        if not spec.trusted and not self._forced:
            words = "local sandboxes have no walls, and this work is not trusted: sandbox.allow_unisolated forces it"
            raise SandboxError(words, code="no_isolation", retryable=False)
        if spec.image is not None:
            raise SandboxError("local sandboxes have no images", code="no_image", retryable=False)

    def uses_disk(self, image: Image | None) -> bool:
        """For its working directory and its home."""
        return True

    def build(self, request: Request) -> Build:
        """Make the working directory and a home."""
        home, work = request.place / "home", request.place / "work"
        for path in (home, work):
            give_directory(path, request, mode=0o700)
        marker = f"{_MARK}={request.sandbox_id}"
        environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(home), "TMPDIR": str(home)}
        return Build(
            argv=list(HOLDER),
            env=dict([marker.split("=", 1)]),
            marker=marker,
            has_namespaces=False,
            session_env={**environment, **request.spec.env},
            workdir=str(work),
            on_disk=(str(request.place),),
        )
