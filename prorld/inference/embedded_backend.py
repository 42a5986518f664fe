"""The client of the embedded engine, which can give it other weights: a process with them takes the old one's place.

The old process serves until the new one answers, so that weights that can't be loaded leave everything as it was; for
that moment both models are in memory. Nothing of the old weights is left in the new process, its cache least of all.

The client keeps the address of the first process as its name: the engine is one, whatever its process is at the time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec
import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.errors import BackendError, ProrldError, Unsupported, WeightsRefused, chain
from prorld.inference.contract import Capabilities, WeightRef
from prorld.inference.embedded import READY_SECONDS_MAX, EmbeddedEngine, WeightsFile, run_embedded_engine
from prorld.inference.engine_http import EngineHttp
from prorld.inference.llamacpp import CONNECTIONS_MAX, RESPONSE_BYTES_MAX, LlamaCppBackend

__all__ = ["WEIGHTS_BYTES_MAX", "EmbeddedBackend", "run_embedded_backend"]

log: FilteringBoundLogger = structlog.get_logger("prorld.inference")

WEIGHTS_BYTES_MAX = 16 << 30
# For a process with new weights to answer: they come from a disk, or over a network.
RELOAD_SECONDS_MAX = 900.0
CLOSE_SECONDS_MAX = 2.0


class _Process(msgspec.Struct, frozen=True):
    """A process that serves, and the scope that it lives in."""

    engine: EmbeddedEngine
    scope: trio.CancelScope


Start = Callable[[WeightsFile | None, float], Awaitable[_Process]]


class EmbeddedBackend(LlamaCppBackend):
    """The one client of one embedded engine, made by ``run_embedded_backend``; it may be closed and used again."""

    def __init__(self, process: _Process, start: Start, *, bytes_max: int) -> None:
        super().__init__(process.engine.url)
        self._name = process.engine.url
        self._process = process
        self._start = start
        self._bytes_max = bytes_max
        self._turn = trio.Lock()
        self._path: str | None = None
        # Why it has other weights than it was to have.
        self.behind: str | None = None

    @property
    def url(self) -> str:
        """Where its first process listened, which is its name from then on."""
        return self._name

    @property
    def engine(self) -> EmbeddedEngine:
        """The process that serves now."""
        return self._process.engine

    async def probe(self) -> Capabilities:
        """As any llama.cpp server, but for the weights, which it can change."""
        found = await super().probe()
        told = {"address": self.engine.url, "weights_path": self._path}
        return msgspec.structs.replace(
            found, reload=True, reads_here=True, behind=self.behind, details={**found.details, **told}
        )

    async def load_weights(self, ref: WeightRef) -> None:
        """Start a process with these weights and let it take the place of the one there is.

        Calls must have ended, or stand still between two steps. Raises ``WeightsRefused`` where nothing was changed.
        """
        if ref.how != "reload":
            # llama.cpp takes adapters when it starts: calls could not end on the old one while others use the new.
            raise Unsupported("the embedded engine takes no adapters while it runs; merge it, and reload the whole")
        async with self._turn:
            began = trio.current_time()
            wish = WeightsFile(path=ref.path, bytes_max=self._bytes_max, seal=ref.seal)
            try:
                made = await self._start(wish, RELOAD_SECONDS_MAX)
            except ProrldError as exc:
                raise WeightsRefused(f"{ref.path} can't be loaded: {chain(exc)}") from exc
            try:
                await self._must_be_alike(made.engine, ref.path)
            except BaseException:
                made.scope.cancel("its weights are not taken")
                raise
            old, old_http = self._process, self._http
            # In one step: from here on every token is of the new weights, and is called so.
            self._process, self._http = made, _sockets(made.engine.url)
            self._told, self._path, self.behind = ref.version, ref.path, None
            old.scope.cancel("another process has taken its place")
            log.info(
                "engine.reloaded", url=self.url, pid=made.engine.pid, path=ref.path, version=ref.version.label,
                seconds=round(trio.current_time() - began, 3),
            )  # fmt: skip
            await old_http.aclose()

    async def _must_be_alike(self, engine: EmbeddedEngine, path: str) -> None:
        """Tokens are chosen and counted by what the probe has found: another vocabulary would be another language."""
        new = LlamaCppBackend(engine.url)
        try:
            try:
                mine, theirs = (await super().probe()), (await new.probe())
            except BackendError as exc:
                raise WeightsRefused(f"{path} can't be looked at: {chain(exc)}") from exc
            for what, ours, other in (
                ("tokens in the vocabulary", mine.details["vocabulary"], theirs.details["vocabulary"]),
                ("tokens of context", mine.max_context_tokens, theirs.max_context_tokens),
            ):
                if ours != other:
                    raise WeightsRefused(f"{path} is of another model: {other} {what} and not {ours}")
        finally:
            with trio.move_on_after(CLOSE_SECONDS_MAX, shield=True):
                await new.aclose()

    async def aclose(self) -> None:
        """Close the sockets. It is the same client for whoever adds the engine again."""
        old, self._http = self._http, _sockets(self.engine.url)
        await old.aclose()


def _sockets(url: str) -> EngineHttp:
    return EngineHttp(url, connections_max=CONNECTIONS_MAX, response_bytes_max=RESPONSE_BYTES_MAX)


async def run_embedded_backend(
    *,
    model_path: str | Path | None = None,
    slots: int = 4,
    context_per_slot: int = 2048,
    threads: int | None = None,
    weights_bytes_max: int = WEIGHTS_BYTES_MAX,
    task_status: trio.TaskStatus[EmbeddedBackend] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run the engine until cancelled, one process after the other; hands out its client once it answers.

    Raises as ``run_embedded_engine`` does, also when a process that serves ends by itself.
    """
    run = partial(
        run_embedded_engine, model_path=model_path, slots=slots, context_per_slot=context_per_slot, threads=threads
    )
    async with trio.open_nursery() as nursery:

        async def start(weights: WeightsFile | None, seconds: float) -> _Process:
            scope = trio.CancelScope()
            wanted = partial(run, weights=weights, ready_seconds_max=seconds, scope=scope)
            engine: EmbeddedEngine = await nursery.start(wanted, name="embedded engine process")
            return _Process(engine, scope)

        backend = EmbeddedBackend(await start(None, READY_SECONDS_MAX), start, bytes_max=weights_bytes_max)
        try:
            task_status.started(backend)
            await trio.sleep_forever()
        finally:
            with trio.move_on_after(CLOSE_SECONDS_MAX, shield=True):
                await backend.aclose()
