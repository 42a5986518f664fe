"""The listener for trainers that were written for other servers."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from prorld.config.loopback import is_loopback
from prorld.config.units import Seconds

__all__ = ["Compat"]


class Compat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A listener of its own that asks for no token: the original ProRL Agent server's routes, and NeMo Gym's /run."""

    bind: Annotated[
        Annotated[str, Meta(pattern=r"^(\[[^\s\]]+\]|[^\s:]+):[0-9]{1,5}$")] | None,
        Meta(
            description="HOST:PORT to listen on; port 0 takes a free one. Unset: there is no such listener.",
        ),
    ] = None
    open: Annotated[
        bool,
        Meta(description="Let bind be an address that other machines can reach. Whoever reaches it may do everything."),
    ] = False
    policy: Annotated[
        str, Meta(min_length=1, max_length=128, description="The policy of its jobs, and of the engines named there.")
    ] = "compat"
    timeout_s: Annotated[
        Seconds, Meta(description="A job's one budget over INIT, RUN and EVAL; waiting in queues does not count.")
    ] = 300.0
    engine_hosts: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=256)]] | None,
        Meta(description="Hosts that engines may be named on, with * in patterns; unset: any."),
    ] = None

    def __post_init__(self) -> None:
        if self.bind is not None and not self.open and not is_loopback(self.host):
            raise ValueError(f"bind is {self.bind}, which others than this machine can reach; say so with open = true")

    @property
    def host(self) -> str:
        """The host of ``bind``."""
        return (self.bind or "").rpartition(":")[0].removeprefix("[").removesuffix("]")
