"""The runtimes that prorld brings, by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from prorld.sandbox.apptainer import Apptainer
from prorld.sandbox.bubblewrap import Bubblewrap
from prorld.sandbox.docker import Docker
from prorld.sandbox.local import Local
from prorld.sandbox.wall import Wall

__all__ = ["DEFAULT", "KINDS", "ROOTLESS", "WallSettings", "make_wall"]

DEFAULT = "bubblewrap"
# Those that share the store of images.
ROOTLESS = (DEFAULT, "apptainer")
KINDS = (*ROOTLESS, "docker", "local")


class WallSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator has decided about walls.

    ``hide`` are files and directories of the host that no sandbox may read; ``socket_dir`` holds the daemon's socket
    for sandboxes; ``apptainer`` and ``docker`` are these programs where they are not on PATH, ``docker_host`` is the
    address of docker's daemon where it is not the usual one.
    """

    hide: Sequence[str] = ()
    socket_dir: Path | None = None
    host_network: bool = False
    apptainer: str | None = None
    docker: str | None = None
    docker_host: str | None = None
    allow_unisolated: bool = False


def make_wall(kind: str, settings: WallSettings) -> Wall:
    """The wall of one of ``KINDS``."""
    if kind == "apptainer":
        return Apptainer(settings.apptainer, socket_dir=settings.socket_dir, host_network=settings.host_network)
    if kind == "docker":
        return Docker(
            settings.docker,
            host=settings.docker_host,
            socket_dir=settings.socket_dir,
            host_network=settings.host_network,
        )
    if kind == "local":
        return Local(forced=settings.allow_unisolated)
    assert kind == DEFAULT, kind
    return Bubblewrap(settings.hide, socket_dir=settings.socket_dir, host_network=settings.host_network)
