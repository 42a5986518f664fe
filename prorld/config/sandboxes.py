"""The sections about sandboxes: how they are made, and how many stand ready."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from prorld.config.units import Bytes, Count, Seconds

__all__ = ["Sandbox", "Warm"]


class Sandbox(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where agents act."""

    runtime: Annotated[
        str,
        Meta(
            pattern=r"^[a-z][a-z0-9_-]{0,63}$",
            description="What makes them: `bubblewrap`, `apptainer`, `docker`, `local`, or a plugin's, by its name.",
        ),
    ] = "bubblewrap"
    image: Annotated[
        str | None,
        Meta(description="Image of tasks that name none; unset: the host's own programs, read-only, under bubblewrap."),
    ] = None
    apptainer: Annotated[
        str | None,
        Meta(description="Apptainer's program, or Singularity's; unset: $PRORLD_APPTAINER, else the one on PATH."),
    ] = None
    docker: Annotated[str | None, Meta(description="Docker's program; unset: the one on PATH.")] = None
    docker_host: Annotated[
        Annotated[str, Meta(pattern=r"^unix:///.+")] | None,
        Meta(description="Socket of docker's daemon, on this machine; unset: $DOCKER_HOST, else its usual one."),
    ] = None
    host_network: Annotated[
        bool, Meta(description="Let tasks ask for the host's network; engines and trainers are on it.")
    ] = False
    socket_dir: Annotated[
        str | None,
        Meta(description="Directory of the one socket, daemon.sock, that tasks with network `daemon` can reach."),
    ] = None
    allow_unisolated: Annotated[
        bool, Meta(description="Let the `local` runtime, which has no walls, run what a policy wrote.")
    ] = False
    user: Annotated[
        str,
        Meta(min_length=1, description="User name or uid that sandboxes run as when the daemon is root; never root."),
    ] = "nobody"
    scratch_dir: Annotated[
        str | None, Meta(description="Where writable layers go, on a local disk; unset: in the state directory.")
    ] = None
    images_dir: Annotated[
        str | None,
        Meta(
            description="The store of images; daemons of a host may share one. Unset: `images` in the state directory."
        ),
    ] = None
    starts_max: Annotated[
        Count | None,
        Meta(description="Sandboxes that may start at once; unset: two for each usable core, four at least."),
    ] = None

    def __post_init__(self) -> None:
        if self.user in {"root", "0"}:
            raise ValueError("user is root, and a sandbox never runs as root")


class Warm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sandboxes that are started before a job asks for them."""

    total: Annotated[
        int, Meta(ge=0, le=100_000, description="Sandboxes that may wait for a job, all together; 0 keeps none.")
    ] = 8
    per_spec: Annotated[
        Count, Meta(description="Of these, sandboxes of one kind that are kept because jobs keep asking for it.")
    ] = 4
    specs: Annotated[Count, Meta(description="Kinds of sandboxes that are kept at the same time.")] = 8
    memory_bytes: Annotated[Bytes, Meta(description="Memory of those that wait, by the largest one so far.")] = 1 << 30
    idle_s: Annotated[Seconds, Meta(description="For so long each ask counts; then one less is kept.")] = 300.0
    age_s: Annotated[Seconds, Meta(description="One that has waited for so long is replaced.")] = 3600.0
    images: Annotated[
        dict[str, Count],
        Meta(description="How many to keep of an image, whether jobs ask or not; the empty name: no image named."),
    ] = {}

    def __post_init__(self) -> None:
        wanted = sum(self.images.values())
        if wanted > self.total:
            raise ValueError(f"images are {wanted} sandboxes, more than the {self.total} of total")
