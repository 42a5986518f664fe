"""Pausing calls that are made of steps, in the client of an engine that can't be paused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from prorld.errors import EngineBusy
from prorld.inference.contract import PauseMode
from prorld.inference.engine_http import within

__all__ = ["StepGate"]

# Running calls may be as long as a context.
PAUSE_SECONDS_MAX = 1800.0


class StepGate:
    """Between two steps a call asks whether it may go on. Every change wakes whoever waits for one."""

    def __init__(self) -> None:
        self._mode: PauseMode | None = None
        self._calls = 0
        self._frozen = 0
        self._changed = trio.Event()

    def __repr__(self) -> str:
        return f"<StepGate {self._mode or 'open'}: {self._calls} calls, {self._frozen} frozen>"

    @asynccontextmanager
    async def call(self, where: str) -> AsyncIterator[None]:
        """Count a call. While paused there are no new ones."""
        if self._mode is not None:
            raise EngineBusy(f"{where} is paused")
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._note_change()

    async def must_end(self) -> bool:
        """Whether the call has to end here; it may be held for as long as a pause lasts."""
        await trio.lowlevel.checkpoint()
        if self._mode == "keep":
            self._frozen += 1
            self._note_change()
            try:
                while self._mode == "keep":
                    await self._changed.wait()
            finally:
                self._frozen -= 1
        return self._mode == "abort"

    async def pause(self, mode: PauseMode) -> None:
        """Until no call takes a step any more."""
        self._mode = mode
        self._note_change()
        with within(PAUSE_SECONDS_MAX, "a pause"):
            await trio.lowlevel.checkpoint()
            while self._mode == mode and self._calls > (self._frozen if mode == "keep" else 0):
                await self._changed.wait()

    async def resume(self) -> None:
        """Let them go on."""
        self._mode = None
        self._note_change()
        await trio.lowlevel.checkpoint()

    def _note_change(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()
