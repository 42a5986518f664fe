"""The original ProRL Agent server's calls, on our jobs: start, stop, status, engines, process, cancel.

Each call of a trainer is answered by what really holds: a stop when every job of this surface is gone, a cancel when
that job is, a result when it is on the disk. Jobs live on when the trainer that asked hangs up, and when the daemon
ends: what was started is started at the next start, with the same engines, the same jobs, and the results that nobody
has got.
"""

from __future__ import annotations

import secrets
from typing import Final, Literal

import msgspec
import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.errors import BadRequest, Overloaded, RequestError
from prorld.export.prorl import process_result
from prorld.handlers.registry import Registry
from prorld.kit.cleanup import shielded
from prorld.rollout.clock import SystemClock
from prorld.rollout.compat.engines import CompatEngines
from prorld.rollout.compat.jobs import STOP_S, CompatJobs, Rollouts
from prorld.rollout.compat.kept import Kept
from prorld.rollout.compat.request import Asked, Mark, asked_of
from prorld.rollout.compat.tries import Try
from prorld.rollout.compat.troubles import sentence
from prorld.store.compat_file import CompatFile, CompatState
from prorld.store.jobs import StoredJob
from prorld.wire.compat import CompatStatus, ProcessRequest, ProcessResult
from prorld.wire.jobs import JobRecord
from prorld.wire.trajectory import unpacked

__all__ = ["CompatService"]

log: FilteringBoundLogger = structlog.get_logger("prorld.compat")

# Closing the sockets of engines, and one write.
CLEAR_S: Final = 30.0
# For engines of the daemon's own configuration to come after a start; the embedded one takes the longest.
COME_S: Final = 60.0
NOT_STARTED: Final = "not_started"
ALREADY_STARTED: Final = "already_started"
_PATCHES: Final = (".diff", ".patch")

State = Literal["stopped", "running", "stopping"]


class CompatService:
    """The surface. ``run`` is the task in which its jobs are followed."""

    def __init__(
        self,
        rollouts: Rollouts,
        engines: CompatEngines,
        file: CompatFile,
        *,
        handlers: Registry,
        policy: str,
        total_s: float,
        expects: bool = False,
    ) -> None:
        """``expects``: the policy has engines by the configuration, which come by themselves."""
        self._jobs = CompatJobs(rollouts, lambda: self._state == "running")
        self._handlers = handlers
        self._engines = engines
        self._policy = policy
        self._total_s = total_s
        self._expects = expects
        self._kept = kept = Kept(file, self._as_it_is)
        self._starts = kept.state.started
        self._state: State = "stopped"
        self._stopped = trio.Event()
        # Results that ended earlier are of another batch, or of engines that were cleared.
        self._since = kept.state.since
        self._clock = SystemClock()
        # How often engines were cleared in this life.
        self.clears = 0
        self._began_at = 0.0
        self._nursery: trio.Nursery | None = None
        self._switching = trio.Lock()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Go on where the last life of the daemon ended, then follow jobs, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            kept = self._kept.state
            for address in kept.addresses:
                try:
                    self._engines.add(address, nursery)
                except RequestError as exc:
                    log.error("backend.refused", url=address, policy=self._policy, reason=exc.message)  # noqa: TRY400
            self._engines.learn_tokenizer(kept.tokenizer)
            self._state = "running" if kept.started else "stopped"
            self._began_at = trio.current_time()
            await self._jobs.restore(nursery, since=self._since, fetched=kept.fetched, now=self._clock.wall())
            task_status.started()
            await trio.sleep_forever()

    @property
    def policy(self) -> str:
        """The policy of its jobs and of the engines that are named here."""
        return self._policy

    @property
    def others_restored(self) -> list[JobRecord]:
        """Jobs of this tenant that lived again when this life began, and that no call of ``process`` asked for."""
        return self._jobs.others

    @property
    def began_at(self) -> float:
        """When this life began, on trio's clock."""
        return self._began_at

    def must_have_engine(self) -> None:
        """``Overloaded`` where a job would wait for an engine in vain."""
        if self._expects and trio.current_time() < self._began_at + COME_S:
            return
        if self._engines.is_empty():
            words = "there is no engine: POST /add_llm_server first"
        elif self._engines.is_hopeless():
            words = f"no engine that was named can be used: {sentence(self._engines.troubles())}"
        else:
            return
        raise Overloaded(words, code="no_backend", retry_after_s=5.0)

    @property
    def has_engines(self) -> bool:
        """Whether any engine was named, or is there by its operator's doing."""
        return not self._engines.is_empty()

    # --- start, stop, status ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Take jobs from now on; ``BadRequest`` where it does already."""
        async with self._switching:
            if self._state == "stopping":
                await self._wait_stopped()
            if self._state == "running":
                raise BadRequest("it has been started already", code=ALREADY_STARTED)
            self._starts = True
            self._since = self._clock.wall()
            try:
                await self._kept.save()
            except BaseException:
                # Also where the trainer hung up: what is written down next must not say that it runs.
                self._starts = False
                raise
            self._state = "running"
            log.info("compat.started", policy=self._policy, engines=len(self._engines.addresses))

    async def stop(self) -> None:
        """Take no more, and end all that there are; returns when they are gone. ``Overloaded`` where it was stopped."""
        if self._state == "stopped":
            raise _not_started()
        if self._state == "running":
            self._state = "stopping"
            self._stopped = trio.Event()
            self._room.start_soon(self._stop_all, name="compat stop")
        await self._wait_stopped()

    async def _wait_stopped(self) -> None:
        with trio.move_on_after(STOP_S):
            await self._stopped.wait()
            return
        raise Overloaded(f"{len(self._jobs.tries)} jobs are still ending", code="still_stopping", retry_after_s=2.0)

    async def _stop_all(self) -> None:
        """In a task of its own: whoever asked may leave."""
        ended = len(self._jobs.tries)
        self._starts = False
        # The jobs end in any case; where this can't be written, a restart before the next stop would begin them anew.
        await self._kept.save_quietly()
        await self._jobs.end_all("the server was stopped")
        self._jobs.tries.drop_unfetched()
        self._state = "stopped"
        self._stopped.set()
        log.info("compat.stopped", jobs=ended)

    async def status(self) -> CompatStatus:
        """Where the jobs are; ``Overloaded`` while it is not started."""
        self._must_run()
        count = await self._jobs.places()
        troubles = self._engines.troubles()
        return msgspec.convert({**count, **({"detail": sentence(troubles)} if troubles else {})}, CompatStatus)

    # --- engines ------------------------------------------------------------------------------------------------------

    async def add_engine(self, address: str) -> bool:
        """Name an engine; whether jobs are taken for it now. One that is there already stays as it is."""
        self._engines.add(address, self._room)
        if self._kept.state.addresses != self._engines.addresses:
            await self._kept.save()
        if self._state != "running":
            return False
        await self._engines.wait_asked(address)
        return True

    async def clear_engines(self) -> None:
        """Forget all engines. Jobs wait for the next one; results that nobody has got are of the old ones."""
        self._jobs.tries.drop_unfetched()
        self._since = self._clock.wall()
        self.clears += 1
        # A trainer that hangs up in the middle has cleared them all the same: one that is left has old weights.
        with shielded(CLEAR_S, "clearing the engines"):
            await self._engines.clear()
            await self._kept.save()
            return
        raise Overloaded("the engines are still being cleared", code="still_stopping", retry_after_s=2.0)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    async def process(self, request: ProcessRequest) -> ProcessResult:
        """Run a job to its end, or join the one that runs under this name."""
        self._must_run()
        name = request.job_id or f"c-{secrets.token_hex(8)}"
        one = self._jobs.tries.live(name)
        if one is None:
            asked = asked_of(request, name, policy=self._policy, total_s=self._total_s)
            one = self._jobs.tries.unfetched(asked.mark) or self._begin(asked)
        stored = await self._jobs.stored(one)
        result = self._explained(_result(stored, one.mark))
        # Nothing awaits between here and the answer: a trainer that has hung up by now never comes this far.
        if self._jobs.tries.fetch(one):
            self._kept.save_soon(self._room)
        return result

    async def cancel(self, name: str) -> None:
        """End the job of this name; returns when it is gone. ``NotFound`` where none runs, or its end came first."""
        await self._jobs.cancel(name)

    def _explained(self, result: ProcessResult) -> ProcessResult:
        """Whose time was up may have waited for an engine; what is wrong with those is said with it."""
        troubles = self._engines.troubles() if result.critical_error == "timeout" else []
        if not troubles:
            return result
        return msgspec.structs.replace(result, error=f"{result.error} (engines: {sentence(troubles)})")

    def _begin(self, asked: Asked) -> Try:
        self._handlers.select(None, asked.job.instance)
        self.must_have_engine()
        mark = asked.mark
        if not self._engines.learn_tokenizer(asked.tokenizer):
            words = "the policy's own tokenizer is used; name a directory with tokenizer.json on the daemon's machine"
            mark = msgspec.structs.replace(mark, noted={**mark.noted, "custom_tokenizer": words})
        elif asked.tokenizer is not None and self._kept.state.tokenizer != asked.tokenizer:
            self._kept.save_soon(self._room)
        job = msgspec.structs.replace(asked.job, metadata={"compat": msgspec.to_builtins(mark)})
        return self._jobs.begin(mark, job, self._room)

    # --- what outlives the daemon -------------------------------------------------------------------------------------

    def _as_it_is(self) -> CompatState:
        return CompatState(
            started=self._starts,
            addresses=self._engines.addresses,
            tokenizer=self._engines.tokenizer,
            since=self._since,
            fetched=self._jobs.tries.fetched,
        )

    @property
    def _room(self) -> trio.Nursery:
        if self._nursery is None:
            raise AssertionError("the service does not run")
        return self._nursery

    def _must_run(self) -> None:
        if self._state != "running":
            raise _not_started()


def _not_started() -> Overloaded:
    return Overloaded("it has not been started: POST /start first", code=NOT_STARTED)


def _result(stored: StoredJob, mark: Mark) -> ProcessResult:
    patches = [data for path, data in stored.carried.items() if path.endswith(_PATCHES)]
    return process_result(
        unpacked(stored.trajectory),
        name=mark.job_id,
        total_s=mark.total_s,
        git_patch=patches[0].decode("utf-8", "replace") if patches else None,
        ignored=mark.ignored,
        noted=mark.noted,
    )
