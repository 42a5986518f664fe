"""What a client says for an engine that can't be paused, loaded or asked its version: the version is what it was told.

Such an engine is quiet when its calls have ended, and the pool sees to that. Whoever changes its weights says so.
"""

from __future__ import annotations

from array import array

import trio

from prorld.domain.versions import PolicyVersion
from prorld.errors import Unsupported
from prorld.inference.contract import PauseMode, WeightRef

__all__ = ["Uncontrolled"]


class Uncontrolled:
    """The optional part of ``Backend`` for engines that have none of it. A client overrides what its engine can."""

    def __init__(self) -> None:
        self._told = PolicyVersion()

    async def score(self, token_ids: array[int], start: int) -> array[float]:
        """Not here."""
        raise Unsupported("this kind of engine can't score tokens that it is given")

    async def pause(self, mode: PauseMode) -> None:
        """Nothing to do: no calls are sent to it meanwhile."""
        await trio.lowlevel.checkpoint()

    async def resume(self) -> None:
        """Nothing to do."""
        await trio.lowlevel.checkpoint()

    async def load_weights(self, ref: WeightRef) -> None:
        """Not here."""
        raise Unsupported("this kind of engine can't load weights; change them yourself and say so")

    async def unload_adapter(self, name: str) -> None:
        """Nothing to do: it has none."""
        await trio.lowlevel.checkpoint()

    async def clear_cache(self) -> None:
        """Not here, and not needed where the weights change only with the process."""
        await trio.lowlevel.checkpoint()

    async def set_version(self, version: PolicyVersion) -> None:
        """Remember what it was told."""
        self._told = version
        await trio.lowlevel.checkpoint()

    async def read_version(self) -> PolicyVersion | None:
        """What it was told."""
        await trio.lowlevel.checkpoint()
        return self._told
