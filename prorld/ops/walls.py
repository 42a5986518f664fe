"""The walls of the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prorld.config import Sandbox
from prorld.sandbox.kinds import WallSettings, make_wall
from prorld.sandbox.wall import Wall

__all__ = ["wall_of"]


def wall_of(chosen: Sandbox, kind: str, hide: Sequence[str] = ()) -> Wall:
    """A wall of one of the kinds that prorld brings, as the section ``sandbox`` has it."""
    settings = WallSettings(
        hide=hide,
        socket_dir=None if chosen.socket_dir is None else Path(chosen.socket_dir),
        host_network=chosen.host_network,
        apptainer=chosen.apptainer,
        docker=chosen.docker,
        docker_host=chosen.docker_host,
        allow_unisolated=chosen.allow_unisolated,
    )
    return make_wall(kind, settings)
