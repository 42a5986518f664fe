"""What outlives the daemon of the surface for old trainers: whether it was started, and the engines that were named."""

from __future__ import annotations

from pathlib import Path

import msgspec
import trio

from prorld.errors import ConfigError
from prorld.whole_file import replace_file

__all__ = ["COMPAT_FILE", "CompatFile", "CompatState"]

COMPAT_FILE = "compat.json"
FILE_BYTES_MAX = 4 << 20


class CompatState(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. ``tokenizer`` is one that a trainer named, where nobody else had.

    Results that ended before the instant ``since`` are of an earlier batch or of other engines; ``fetched`` are jobs
    that ended later, and whose results a trainer has got.
    """

    started: bool = False
    addresses: list[str] = []
    tokenizer: str | None = None
    since: str | None = None
    fetched: list[str] = []


class CompatFile:
    """``compat.json`` of one state directory."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / COMPAT_FILE
        self._turn = trio.Lock()

    def load(self) -> CompatState:
        """What is in it; the defaults where there is none. Raises ``ConfigError``."""
        try:
            with self._path.open("rb") as file:
                data = file.read(FILE_BYTES_MAX + 1)
            if len(data) > FILE_BYTES_MAX:
                raise ConfigError(f"{self._path} is larger than {FILE_BYTES_MAX} bytes; it is none of ours")
            return msgspec.json.decode(data, type=CompatState)
        except FileNotFoundError:
            return CompatState()
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            cure = "repair it, or move it away: trainers then start the server and name their engines again"
            raise ConfigError(f"{self._path} can't be read: {exc}; {cure}") from exc

    async def save(self, state: CompatState) -> None:
        """Replace it; the latest call is the last one to write. Raises ``OSError``."""
        content = msgspec.json.encode(state)
        async with self._turn:
            await trio.to_thread.run_sync(replace_file, self._path, content)
