"""The walls and the images of the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from prorld.config import Config, Loaded, Sandbox
from prorld.errors import SandboxError
from prorld.ops.state_dir import make_private
from prorld.ops.users import sandbox_user
from prorld.sandbox.images.apptainer import find_apptainer
from prorld.sandbox.images.store import ImageStore
from prorld.sandbox.kinds import WallSettings, make_wall
from prorld.sandbox.wall import Wall

__all__ = ["image_store", "places_of", "wall_of"]

IMAGES_DIRECTORY = "images"


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


def image_store(loaded: Loaded) -> ImageStore:
    """The store that the daemon and every command of this configuration share. Raises ``ConfigError``."""
    chosen = loaded.config.sandbox
    if chosen.images_dir is None:
        make_private(loaded.state_dir)
        directory = loaded.state_dir / IMAGES_DIRECTORY
    else:
        directory = Path(chosen.images_dir).expanduser()
    return ImageStore(directory, owner=sandbox_user(chosen.user), apptainer=chosen.apptainer)


def places_of(config: Config, kind: str, store: ImageStore) -> list[str]:
    """What the sandboxes' user has to reach for sandboxes of a kind, wherever it lies: the images, and the program."""
    places = [str(store.directory)]
    if kind == "apptainer":
        with suppress(SandboxError):  # the runtime says it when a sandbox is asked for
            places.append(str(Path(find_apptainer(config.sandbox.apptainer)).resolve().parents[1]))
    return places
