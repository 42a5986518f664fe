"""The file of the engines that were named while the daemon ran: written whole before the answer, read at the start.

It has addresses and no keys: those are of the environment. A file that can't be read ends the start: without it jobs
would wait for engines that nobody knows to be missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
import trio
from msgspec import Meta

from prorld.domain.versions import PolicyVersion
from prorld.errors import ConfigError
from prorld.store.state_file import read_state
from prorld.whole_file import replace_file
from prorld.wire.ops import AddBackend

__all__ = ["ENGINES_MAX", "ENGINE_FILE", "EngineFile", "KeptEngine"]

ENGINE_FILE = "engines.json"
SCHEMA = 1
FILE_BYTES_MAX = 16 << 20
ENGINES_MAX = 1024


class KeptEngine(msgspec.Struct, frozen=True, kw_only=True):
    """As it was named, by which id, and what it said that it is: one that comes back as another model is kept out.

    ``control``: it can be paused and told its version. ``weights`` are those that one which can't was said to have.
    """

    backend_id: Annotated[str, Meta(min_length=1, max_length=256)]
    request: AddBackend
    model: str
    max_context_tokens: Annotated[int, Meta(ge=1)]
    control: bool = False
    weights: PolicyVersion | None = None
    draining: bool = False


class _Content(msgspec.Struct, frozen=True, kw_only=True):
    schema: int = SCHEMA
    engines: Annotated[list[KeptEngine], Meta(max_length=ENGINES_MAX)] = []


class EngineFile:
    """``engines.json`` of one state directory."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / ENGINE_FILE
        self._turn = trio.Lock()

    def load(self) -> list[KeptEngine]:
        """What is in it; nothing where there is none. Raises ``ConfigError``."""
        content = read_state(self._path, _Content, schema=SCHEMA, bytes_max=FILE_BYTES_MAX, cure=_CURE)
        engines = [] if content is None else content.engines
        if len({(each.request.policy, each.request.url.rstrip("/")) for each in engines}) != len(engines):
            raise ConfigError(f"{self._path} contradicts itself: it names an engine of a policy twice; {_CURE}")
        if len({each.backend_id for each in engines}) != len(engines):
            raise ConfigError(f"{self._path} contradicts itself: two engines have one id; {_CURE}")
        return engines

    async def save(self, engines: Iterable[KeptEngine]) -> None:
        """Replace it. What is written is what is given now; the latest call is the last one to write."""
        content = msgspec.json.encode(_Content(engines=list(engines)))
        async with self._turn:
            await trio.to_thread.run_sync(replace_file, self._path, content)


_CURE = "repair it, or move it away: engines that were named while the daemon ran are then to be named again"
