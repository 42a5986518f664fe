"""What a restart of the daemon goes on with, written down: at once where a call's answer says so, else soon."""

from __future__ import annotations

from collections.abc import Callable

import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.errors import Overloaded
from prorld.store.compat_file import CompatFile, CompatState

__all__ = ["Kept"]

log: FilteringBoundLogger = structlog.get_logger("prorld.compat")


class Kept:
    """The state on the disk. ``as_it_is`` says what it should be by now."""

    def __init__(self, file: CompatFile, as_it_is: Callable[[], CompatState]) -> None:
        self._file, self._as_it_is = file, as_it_is
        self.state = file.load()
        self._is_dirty = False
        self._writes = False

    async def save(self) -> None:
        """Write it down as it is now; ``Overloaded`` where the disk refuses."""
        state = self._as_it_is()
        try:
            await self._file.save(state)
        except OSError as exc:
            raise Overloaded(f"the state can't be written: {exc}", code="journal_failing", retry_after_s=2.0) from exc
        self.state = state

    async def save_quietly(self) -> None:
        """The same where nobody is there to hear of a refusal."""
        try:
            await self.save()
        except Overloaded as exc:
            log.warning("compat.unwritten", reason=exc.message)

    def save_soon(self, nursery: trio.Nursery) -> None:
        """Without anybody waiting; what comes while it is written is written together after that."""
        self._is_dirty = True
        if not self._writes:
            self._writes = True
            nursery.start_soon(self._save_all, name="compat state")

    async def _save_all(self) -> None:
        while self._is_dirty:
            self._is_dirty = False
            await self.save_quietly()
        self._writes = False
