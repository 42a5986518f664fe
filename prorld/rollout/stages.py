"""A stage: a gate, a deadline that starts when the gate opens, and a nursery of its own.

Here, and nowhere else, a stage's deadline is set. Waiting at the gate costs no budget, and neither does waiting for a
policy that is paused: the deadline stands still meanwhile.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TypeVar

import trio

from prorld.domain.job import StageTimeouts
from prorld.domain.outcome import STAGES, Outcome, Stage, starved, timed_out
from prorld.errors import HandlerError
from prorld.kit.allowance import Allowance
from prorld.kit.gate import Gate
from prorld.metrics import Metrics
from prorld.rollout.entry import JobEntry
from prorld.wire.ops import Stages, StagesPatch, StageStatus

__all__ = ["Gates", "StageTimedOut", "TotalBudget", "run_stage"]

T = TypeVar("T")


class StageTimedOut(Exception):
    """A stage used up its time; carries the outcome."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome


class Gates:
    """The three independent gates, and a bound on how far INIT may run ahead of RUN.

    A job that is ready holds a sandbox. Without the bound, a slow RUN would let INIT make one for every accepted job.
    ``ahead`` jobs may be between the start of INIT and the start of RUN; waiting for that counts as waiting for INIT.
    """

    def __init__(
        self,
        *,
        init: int,
        run: int,
        eval: int,  # noqa: A002  (the stage's name)
        ahead: int,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self._ahead = Gate("ahead", ahead, weights)
        workers: dict[Stage, int] = {"init": init, "run": run, "eval": eval}
        self._gates: dict[Stage, Gate] = {stage: Gate(stage, workers[stage], weights) for stage in STAGES}

    def of(self, stage: Stage) -> Gate:
        """One gate."""
        return self._gates[stage]

    def resize(self, patch: StagesPatch) -> None:
        """New sizes, at once; 0 pauses a stage."""
        for stage in STAGES:
            change = getattr(patch, stage)
            if change is not None:
                self._gates[stage].set_workers(change.workers)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """What tenants weigh, at once."""
        for gate in (self._ahead, *self._gates.values()):
            gate.set_weights(weights)

    def status(self) -> Stages:
        """How full they are."""
        return Stages(init=self._status("init"), run=self._status("run"), eval=self._status("eval"))

    @asynccontextmanager
    async def ahead(self, entry: JobEntry) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """A place among the jobs that are made ready. Left by what it yields, or with the block."""
        asked = trio.current_time()
        entry.waits_for("init")
        async with AsyncExitStack() as place:
            await place.enter_async_context(_enter(self._ahead, entry))
            entry.timing.queued("init", trio.current_time() - asked)
            yield place.aclose

    def _status(self, stage: Stage) -> StageStatus:
        seen = self._gates[stage].statistics()
        held_back = self._ahead.statistics().waiting if stage == "init" else 0
        return StageStatus(workers=seen.workers, active=seen.active, waiting=seen.waiting + held_back)


def _enter(gate: Gate, entry: JobEntry) -> AbstractAsyncContextManager[None]:
    """A place for a job: the jobs of a batch share what their tenant has, as one, with its other batches and jobs."""
    spec = entry.spec
    return gate.enter(priority=spec.priority, tenant=spec.tenant, flow=spec.batch_id or "")


class TotalBudget:
    """The optional budget over all stages of a job; only time inside a stage counts."""

    def __init__(self, timeouts: StageTimeouts) -> None:
        self._timeouts = timeouts
        self._left = timeouts.total_s

    def limit(self, stage: Stage) -> tuple[float, bool]:
        """Seconds this stage may take, and whether it is the total that says so."""
        own = self._timeouts.of(stage)
        if self._left is None or self._left >= own:
            return own, False
        return max(0.0, self._left), True

    def spend(self, seconds: float) -> None:
        """A stage took this long."""
        if self._left is not None:
            self._left -= seconds


async def run_stage(
    gates: Gates,
    metrics: Metrics,
    entry: JobEntry,
    stage: Stage,
    budget: TotalBudget,
    work: Callable[[trio.Nursery], Awaitable[T]],
) -> T:
    """Wait at the gate, then do the work under the stage's deadline. Raises ``StageTimedOut``."""
    asked = trio.current_time()
    entry.waits_for(stage)
    async with _enter(gates.of(stage), entry):
        began = trio.current_time()
        entry.timing.queued(stage, began - asked)
        entry.enters(stage)
        seconds, is_total = budget.limit(stage)
        results: list[T] = []
        in_time: list[Exception] = []
        allowance = Allowance(seconds)
        entry.allowance, scope = allowance, allowance.scope
        try:
            with scope:
                async with trio.open_nursery() as nursery:
                    try:
                        result = await work(nursery)
                        # Work that swallowed its cancellation has nothing to say: its time was up.
                        await trio.lowlevel.checkpoint_if_cancelled()
                        results.append(result)
                    except Exception as exc:
                        in_time += [] if scope.cancel_called else [exc]
                        raise
                    # Most stages leave nobody behind, and a cancellation costs more than the question.
                    if nursery.child_tasks:
                        nursery.cancel_scope.cancel(f"{stage} is over")
        except Exception as exc:
            # What a stage raises while its time is up is a consequence of the time-out and not the cause of the end;
            # what it raised before, only to clean up beyond its time, is the cause.
            if scope.cancel_called and not in_time and not entry.scope.cancel_called:
                raise StageTimedOut(_time_is_up(entry, stage, seconds, total=is_total)) from exc
            raise
        finally:
            entry.allowance = None
            spent = trio.current_time() - began - allowance.held_s
            budget.spend(spent)
            entry.timing.ran(stage, spent)
            entry.timing.paused_s += allowance.held_s
            metrics.stage_passed(stage, waited_s=began - asked, ran_s=spent)
            entry.leaves(stage)
        if not results and not scope.cancelled_caught:
            raise HandlerError(f"the handler cancelled its own {stage} stage", code="self_cancelled")
        if not results:
            raise StageTimedOut(_time_is_up(entry, stage, seconds, total=is_total))
        return results[0]


def _time_is_up(entry: JobEntry, stage: Stage, seconds: float, *, total: bool) -> Outcome:
    """A stage that spent the end of its time waiting for an engine did not fail by its policy's doing."""
    outcome = timed_out(stage, seconds, total=total)
    lacking = entry.lacking
    return outcome if lacking is None else starved(outcome, lacking)
