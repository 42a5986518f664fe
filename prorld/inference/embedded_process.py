"""The processes of the embedded engine, which begin on trial: one that dies then has failed, and takes nobody along."""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial
from pathlib import Path
from typing import Protocol

import trio

from prorld.errors import BackendError, chain
from prorld.inference.embedded import EmbeddedEngine, WeightsFile, run_embedded_engine

__all__ = ["EmbeddedProcess", "Processes"]


class EmbeddedProcess:
    """A process that answers, and the scope that it lives in.

    Once it ``serves``, that it ends by itself is the end of the engine; before, it is its ``failure``.
    """

    def __init__(self, engine: EmbeddedEngine, scope: trio.CancelScope, *, serves: bool) -> None:
        self.engine = engine
        self.serves = serves
        self.failure: str | None = None
        self._scope = scope

    def end(self, reason: str) -> None:
        """Let it go: nobody relies on it any more."""
        self.serves = False
        self._scope.cancel(reason)


class _Run(Protocol):
    def __call__(
        self,
        *,
        ready_seconds_max: float,
        weights: WeightsFile | None,
        adapter: WeightsFile | None,
        scope: trio.CancelScope,
        task_status: trio.TaskStatus[EmbeddedEngine],
    ) -> Awaitable[None]: ...


class Processes:
    """Starts processes of one model in a nursery, which gets the error of a process that served and ended."""

    def __init__(
        self,
        nursery: trio.Nursery,
        *,
        model_path: str | Path | None,
        slots: int,
        context_per_slot: int,
        threads: int | None,
    ) -> None:
        self._nursery = nursery
        self._run: _Run = partial(
            run_embedded_engine, model_path=model_path, slots=slots, context_per_slot=context_per_slot, threads=threads
        )

    async def start(
        self,
        ready_seconds_max: float,
        *,
        weights: WeightsFile | None = None,
        adapter: WeightsFile | None = None,
        serves: bool = False,
    ) -> EmbeddedProcess:
        """One more, ready. Raises as ``run_embedded_engine`` does where it does not come to that."""
        live = partial(self._live, ready_seconds_max, weights, adapter, serves=serves)
        process: EmbeddedProcess = await self._nursery.start(live, name="embedded engine process")
        return process

    async def _live(
        self,
        ready_seconds_max: float,
        weights: WeightsFile | None,
        adapter: WeightsFile | None,
        *,
        serves: bool,
        task_status: trio.TaskStatus[EmbeddedProcess],
    ) -> None:
        status = _Status(trio.CancelScope(), task_status, serves=serves)
        try:
            await self._run(
                ready_seconds_max=ready_seconds_max,
                weights=weights,
                adapter=adapter,
                scope=status.scope,
                task_status=status,
            )
        except BackendError as exc:
            if status.process is None or status.process.serves:
                raise
            status.process.failure = chain(exc)


class _Status:
    """Hands out a process in the place of its engine, and knows whether that has happened."""

    def __init__(self, scope: trio.CancelScope, above: trio.TaskStatus[EmbeddedProcess], *, serves: bool) -> None:
        self.scope = scope
        self.process: EmbeddedProcess | None = None
        self._above = above
        self._serves = serves

    def started(self, value: EmbeddedEngine | None = None) -> None:
        assert value is not None
        self.process = EmbeddedProcess(value, self.scope, serves=self._serves)
        self._above.started(self.process)
