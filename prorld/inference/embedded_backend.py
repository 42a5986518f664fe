"""The client of the embedded engine, which can give it other weights: a process with them takes the old one's place.

The old process serves until the new one has proved itself, so that weights that can't be loaded leave everything as it
was, also where the new process dies meanwhile; for that moment both models are in memory. Nothing of the old weights is
left in the new process, its cache least of all.

llama.cpp takes adapters when it starts. So an adapter gets a process of its own beside the one of the weights that it
was made for, and a call goes to the process of the adapter that it names.

The client keeps the address of the first process as its name: the engine is one, whatever its processes are just now.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.domain.job import Sampling
from prorld.domain.versions import PolicyVersion
from prorld.errors import BackendError, ProrldError, WeightsRefused, chain
from prorld.inference.contract import Capabilities, EngineLoad, Generation, GenerationRequest, WeightRef
from prorld.inference.embedded import READY_SECONDS_MAX, EmbeddedEngine, WeightsFile
from prorld.inference.embedded_process import EmbeddedProcess, Processes
from prorld.inference.engine_http import EngineHttp
from prorld.inference.llamacpp import CONNECTIONS_MAX, RESPONSE_BYTES_MAX, LlamaCppBackend
from prorld.inference.step_gate import StepGate

__all__ = ["WEIGHTS_BYTES_MAX", "EmbeddedBackend", "run_embedded_backend"]

log: FilteringBoundLogger = structlog.get_logger("prorld.inference")

WEIGHTS_BYTES_MAX = 16 << 30
# For a process with new weights to answer: they come from a disk, or over a network.
RELOAD_SECONDS_MAX = 900.0
CLOSE_SECONDS_MAX = 2.0
# Each is a model in memory. One serves, one comes, and one may wait for its last calls.
ADAPTERS_MAX = 3
# For the last calls on an adapter to end, where a trainer is quicker than they are.
ROOM_SECONDS_MAX = 300.0


class EmbeddedBackend(LlamaCppBackend):
    """The one client of one embedded engine, made by ``run_embedded_backend``; it may be closed and used again."""

    def __init__(self, process: EmbeddedProcess, processes: Processes, *, bytes_max: int) -> None:
        super().__init__(process.engine.url)
        self._name = process.engine.url
        self._process = process
        self._processes = processes
        self._bytes_max = bytes_max
        self._turn = trio.Lock()
        self._path: str | None = None
        self._adapters: dict[str, _Adapted] = {}
        self._unloaded = trio.Event()
        # Why it has other weights than it was to have.
        self.behind: str | None = None

    @property
    def url(self) -> str:
        """Where its first process listened, which is its name from then on."""
        return self._name

    @property
    def engine(self) -> EmbeddedEngine:
        """The process that serves the weights now."""
        return self._process.engine

    @property
    def adapters(self) -> dict[str, EmbeddedEngine]:
        """The process of each adapter."""
        return {name: adapted.engine for name, adapted in self._adapters.items()}

    async def probe(self) -> Capabilities:
        """As any llama.cpp server, but for the weights, which it can change."""
        found = await super().probe()
        told = {
            "address": self.engine.url,
            "weights_path": self._path,
            "adapters": {name: adapted.path for name, adapted in self._adapters.items()},
        }
        return msgspec.structs.replace(
            found, reload=True, lora=True, reads_here=True, behind=self.behind, details={**found.details, **told}
        )

    # --- calls --------------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample, from the adapter that is named where one is."""
        if request.adapter is None:
            return await super().generate(request)
        adapted = self._adapters.get(request.adapter)
        if adapted is None:
            raise BackendError(f"{self.url} does not serve the adapter {request.adapter}")
        return await adapted.generate(request)

    async def healthy(self) -> bool:
        """Whether all of its processes are. They are asked at once: together they have the time of one."""
        ill: list[str | None] = []

        async def ask(name: str | None, healthy: Callable[[], Awaitable[bool]]) -> None:
            if not await healthy():
                ill.append(name)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, None, super().healthy)
            for name, adapted in self._adapters.items():
                nursery.start_soon(ask, name, adapted.healthy)
        # One that was unloaded meanwhile may well not answer.
        return not any(name is None or name in self._adapters for name in ill)

    async def load(self) -> EngineLoad:
        """That of all its processes."""
        loads = [await super().load(), *[await adapted.load() for adapted in [*self._adapters.values()]]]
        return EngineLoad(
            running=sum(load.running or 0 for load in loads),
            waiting=sum(load.waiting or 0 for load in loads),
            tokens_total=sum(load.tokens_total or 0 for load in loads),
        )

    # --- weights ------------------------------------------------------------------------------------------------------

    async def load_weights(self, ref: WeightRef) -> None:
        """Start a process with these weights, or with this adapter, and let it serve once it has proved itself.

        For weights, calls must have ended, or stand still between two steps; calls on an adapter go on, for it gets a
        name of its own. Raises ``WeightsRefused`` where nothing was changed.
        """
        async with self._turn:
            began = trio.current_time()
            wish = WeightsFile(path=ref.path, bytes_max=self._bytes_max, seal=ref.seal)
            process = await self._adapt(ref, wish) if ref.how == "lora" else await self._replace(ref, wish)
            log.info(
                "engine.reloaded", url=self.url, pid=process.engine.pid, how=ref.how, path=ref.path,
                version=ref.version.label, seconds=round(trio.current_time() - began, 3),
            )  # fmt: skip

    async def _replace(self, ref: WeightRef, wish: WeightsFile) -> EmbeddedProcess:
        made, client = await self._proved(ref, weights=wish, adapter=None)
        old, old_http = self._process, self._http
        # In one step: from here on every token is of the new weights, and is called so.
        made.serves = True
        self._process, self._http = made, client.sockets
        self._told, self._path, self.behind = ref.version, ref.path, None
        old.end("another process has taken its place")
        await old_http.aclose()
        return made

    async def _adapt(self, ref: WeightRef, wish: WeightsFile) -> EmbeddedProcess:
        name = ref.name or ref.version.label
        with trio.move_on_after(ROOM_SECONDS_MAX):
            await trio.lowlevel.checkpoint()
            while self._is_full_for(name):
                await self._unloaded.wait()
        if self._is_full_for(name):
            raise WeightsRefused(f"{self.url} still has {', '.join(self._adapters)}; it takes {ADAPTERS_MAX} at once")
        # The file of the weights is read again, and is refused where it is no longer what it was.
        made, client = await self._proved(ref, weights=self.engine.weights, adapter=wish)
        old = self._adapters.get(name)
        made.serves = True
        self._adapters[name] = client
        if old is not None:
            await old.end("it was loaded again")
        return made

    def _is_full_for(self, name: str) -> bool:
        return len(self._adapters) >= ADAPTERS_MAX and name not in self._adapters

    async def _proved(
        self, ref: WeightRef, *, weights: WeightsFile | None, adapter: WeightsFile | None
    ) -> tuple[EmbeddedProcess, _Adapted]:
        """A process that is fit to serve and its client; raises ``WeightsRefused``, and then it is gone."""
        try:
            made = await self._processes.start(RELOAD_SECONDS_MAX, weights=weights, adapter=adapter)
        except ProrldError as exc:
            raise WeightsRefused(f"{ref.path} can't be loaded: {chain(exc)}") from exc
        client, proved = _Adapted(made, ref, self._steps), False
        try:
            await self._must_be_alike(client, ref.path)
            await client.must_speak()
            proved = True
        except WeightsRefused:
            raise
        except BackendError as exc:
            raise WeightsRefused(f"{ref.path} can't be served: {made.failure or chain(exc)}") from exc
        finally:
            if not proved:
                with trio.move_on_after(CLOSE_SECONDS_MAX, shield=True):
                    await client.end("its weights are not taken")
        return made, client

    async def _must_be_alike(self, new: LlamaCppBackend, path: str) -> None:
        """Tokens are chosen and counted by what the probe has found: another vocabulary would be another language."""
        mine, theirs = (await super().probe()), (await new.probe())
        for what, ours, other in (
            ("tokens in the vocabulary", mine.details["vocabulary"], theirs.details["vocabulary"]),
            ("tokens of context", mine.max_context_tokens, theirs.max_context_tokens),
        ):
            if ours != other:
                raise WeightsRefused(f"{path} is of another model: {other} {what} and not {ours}")

    async def unload_adapter(self, name: str) -> None:
        """End the adapter's process; calls that are still on it fail.

        Not in turn: weights may take long to load, and an adapter that is not unloaded now will never be.
        """
        adapted = self._adapters.pop(name, None)
        unloaded, self._unloaded = self._unloaded, trio.Event()
        unloaded.set()
        if adapted is not None:
            await adapted.end("its adapter is not wanted any more")

    async def aclose(self) -> None:
        """Close the sockets. It is the same client for whoever adds the engine again."""
        old, self._http = self._http, _sockets(self.engine.url)
        await old.aclose()
        for adapted in [*self._adapters.values()]:
            await adapted.renew_sockets()


class _Adapted(LlamaCppBackend):
    """The client of one process more. It is paused with the engine that it belongs to."""

    def __init__(self, process: EmbeddedProcess, ref: WeightRef, steps: StepGate) -> None:
        super().__init__(process.engine.url)
        self.path = ref.path
        self._process = process
        self._told: PolicyVersion = ref.version
        self._steps = steps

    @property
    def engine(self) -> EmbeddedEngine:
        """Its process."""
        return self._process.engine

    @property
    def sockets(self) -> EngineHttp:
        """What it talks through."""
        return self._http

    async def must_speak(self) -> None:
        """Weights that are no numbers are loaded without a word, and give tokens without log-probabilities.

        Raises ``BackendError``, also where its process has ended by now.
        """
        request = GenerationRequest(
            token_ids=array("i", [0]), max_tokens=1, sampling=Sampling(temperature=0.0), stop_token_ids=(),
            request_id="trial", session="trial",
        )  # fmt: skip
        # Not behind the gate, which is closed while weights change.
        steps, self._steps = self._steps, StepGate()
        try:
            await self.generate(request)
        finally:
            self._steps = steps
        if self._process.failure is not None:
            raise BackendError(self._process.failure)

    async def renew_sockets(self) -> None:
        """Close those that there are."""
        old, self._http = self._http, _sockets(self._process.engine.url)
        await old.aclose()

    async def end(self, reason: str) -> None:
        """With its process."""
        self._process.end(reason)
        await self.aclose()


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
    async with trio.open_nursery() as nursery:
        processes = Processes(
            nursery, model_path=model_path, slots=slots, context_per_slot=context_per_slot, threads=threads
        )
        first = await processes.start(READY_SECONDS_MAX, serves=True)
        backend = EmbeddedBackend(first, processes, bytes_max=weights_bytes_max)
        try:
            task_status.started(backend)
            await trio.sleep_forever()
        finally:
            with trio.move_on_after(CLOSE_SECONDS_MAX, shield=True):
                await backend.aclose()
