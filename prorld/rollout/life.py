r"""The life of one job, top to bottom: one trio task from acceptance to the terminal event.

    accept -> [INIT gate] init -> [RUN gate] run -> [EVAL gate] evaluate -> write -> tell

    queued -> initialising -> running -> evaluating -> done
       \___________\____________\__________\____-> done        (any end; a retry goes back to initialising)

Scopes nest as job > attempt > stage > call. The sandbox lives in the attempt's nursery: it is made inside INIT's
deadline, outlives INIT, and is gone before anything is reported. Nothing else in the project changes a job's state.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import msgspec
import structlog
import trio

from prorld.domain.job import JobSpec
from prorld.domain.outcome import (
    Outcome,
    OutcomeKind,
    Stage,
    Verdict,
    cancelled,
    outcome_of_error,
    outcome_of_stop,
    should_retry,
    verdict_of,
)
from prorld.errors import (
    BackendError,
    GraderError,
    HandlerError,
    RendererError,
    RolloutError,
    SandboxError,
    Stale,
    chain,
    leaves,
)
from prorld.handlers.base import Grade, RunResult
from prorld.handlers.grading import evaluate, open_grading_sandbox, take_along
from prorld.inference.contract import Turn
from prorld.inference.session import ModelSession
from prorld.kit.containment import contained
from prorld.kit.last_words import LastWords
from prorld.metrics import Metrics
from prorld.rollout.clock import Clock
from prorld.rollout.context import AttemptContext
from prorld.rollout.document import empty_job, record_of, stored_job
from prorld.rollout.entry import JobEntry
from prorld.rollout.grading_hint import GradingHint
from prorld.rollout.stages import Gates, StageTimedOut, TotalBudget, run_stage
from prorld.sandbox.contract import SandboxRuntime, SandboxSpec
from prorld.store.jobs import JobEnded, StoredJob
from prorld.store.journal import Journal

__all__ = ["ModelSource", "World", "attempt", "grade", "live"]

log = structlog.get_logger("prorld.rollout")

T = TypeVar("T")

# Between two attempts: long enough for a restarted engine to listen again, short enough not to matter beside a rollout.
RETRY_PAUSE_S = 0.5
RETRY_PAUSE_MAX_S = 8.0
# For the ends that are on their way to the disk when the daemon ends.
LAST_WORD_S = 5.0


def _nobody_listens(spec: SandboxSpec) -> None:
    pass


class ModelSource(Protocol):
    """Where a job gets its policy from."""

    def open(
        self, spec: JobSpec, attempt: int, on_turn: Callable[[int, Turn], None]
    ) -> AbstractAsyncContextManager[ModelSession]:
        """Lease an engine for as long as the block lasts and talk to it. Waits for one where there is none."""
        ...

    def knows(self, policy: str) -> bool:
        """Whether there is such a policy, with an engine or without."""
        ...


@dataclass(frozen=True, kw_only=True)
class World:
    """What a job needs from the rest of the daemon."""

    gates: Gates
    runtime: SandboxRuntime
    models: ModelSource
    clock: Clock
    boot_id: str
    verdicts: Mapping[OutcomeKind, Verdict]
    metrics: Metrics
    journal: Journal
    last_words: LastWords = field(default_factory=partial(LastWords, LAST_WORD_S))
    # Told which sandbox a job will soon want; whoever makes sandboxes may then have one ready.
    expect: Callable[[SandboxSpec], None] = _nobody_listens


async def live(entry: JobEntry, world: World, tell: Callable[[JobEntry, StoredJob], None]) -> None:
    """One job. Whatever happens, it ends here, once, after everything it held is gone.

    Only when the daemon ends before the job does, nothing is told: the job goes on in the next life of the daemon.
    """
    outcome: Outcome | None = None
    with structlog.contextvars.bound_contextvars(job_id=entry.spec.job_id, handler=entry.spec.handler):
        try:
            with entry.scope:
                outcome = await _attempts(entry, world)
        except* Exception as group:
            # Not a rollout's trouble (that is caught per attempt) but a bug of ours. It ends this job and no other.
            outcome = outcome_of_error(_leading(group), entry.stage)
            log.exception("job.crashed", exc_info=group)
        finally:
            outcome = outcome or _interrupted(entry)
            if outcome is not None:
                await _end(entry, world, outcome, tell)  # noqa: ASYNC102  (what it awaits, it shields)


async def _end(entry: JobEntry, world: World, outcome: Outcome, tell: Callable[[JobEntry, StoredJob], None]) -> None:
    """The end of a job: on the disk first, then told. A disk that refuses it holds up this job alone.

    Where the daemon ends before it is written, it was told to nobody, and the job runs again at the next start.
    """
    entry.ends(outcome, verdict_of(outcome, graded=entry.grade is not None, table=world.verdicts))
    with world.last_words.shield() as scope:
        try:
            stored = stored_job(entry)
            await world.journal.owe(JobEnded(serial=entry.serial, record=record_of(stored), stored=stored))
        except Exception as exc:
            log.exception("job.unkept", exc_info=exc)
            entry.is_unkept(chain(exc))
            stored = empty_job(entry)
            await world.journal.owe(  # noqa: ASYNC102  (a shield, with a deadline once the daemon ends)
                JobEnded(serial=entry.serial, record=record_of(stored), stored=stored)
            )
    if not scope.cancelled_caught:
        entry.is_told()
        tell(entry, stored)


async def _attempts(entry: JobEntry, world: World) -> Outcome:
    """Try until an outcome stands: infrastructure failures are tried again, and every try is kept."""
    if entry.doom is not None:
        await trio.lowlevel.checkpoint()
        return entry.doom
    budget = TotalBudget(entry.spec.timeouts)
    while True:
        n, tries = entry.attempt_begins(), entry.tries + 1
        outcome = await attempt(entry, world, n, partial(_stages, entry, world, budget))
        if not should_retry(outcome, tries, entry.spec.max_attempts):
            return outcome
        entry.attempt_ends(outcome)
        world.metrics.job_retried(outcome.kind.value)
        log.info("attempt.failed", attempt=n, outcome=outcome.kind.value, code=outcome.code, message=outcome.message)
        await trio.sleep(min(RETRY_PAUSE_MAX_S, RETRY_PAUSE_S * 2 ** (tries - 1)))


async def attempt(
    entry: JobEntry, world: World, n: int, stages: Callable[[AttemptContext], Awaitable[Outcome]]
) -> Outcome:
    """One try. What it raises is classified; what is still open when it ends is closed before it returns."""
    outcome: Outcome | None = None
    try:
        with contained("the handler"):
            async with trio.open_nursery() as nursery:
                job = AttemptContext(
                    entry,
                    n,
                    attempt_nursery=nursery,
                    runtime=world.runtime,
                    boot_id=world.boot_id,
                    metrics=world.metrics,
                    judges=world.models,
                )
                outcome = await stages(job)
                if nursery.child_tasks:
                    nursery.cancel_scope.cancel("the attempt is over")
    except* Exception as group:
        error = _leading(group)
        if outcome is not None:
            # The grade stands; what failed is the clean-up after it.
            log.warning("cleanup.failed", exc_info=group)
        else:
            outcome = error.outcome if isinstance(error, StageTimedOut) else outcome_of_error(error, entry.stage)
            if not isinstance(error, (RolloutError, StageTimedOut)):
                log.exception("handler.crashed", exc_info=group)
    if outcome is None:
        raise AssertionError("an attempt ended without an outcome")
    return outcome


async def _stages(entry: JobEntry, world: World, budget: TotalBudget, job: AttemptContext) -> Outcome:
    """INIT, RUN, EVAL."""
    handler = entry.handler
    apart = handler.grading_sandbox(entry.instance)
    hint = GradingHint(apart, max_turns=entry.spec.agent.max_turns, expect=world.expect)

    def spoke(turn: int, said: Turn) -> None:
        entry.spoke(turn, said)
        hint.spoke(turn, said)

    async def init() -> None:
        await handler.init(job)

    async def run() -> RunResult:
        await makes_room()
        entry.wants_engine = True
        async with world.models.open(entry.spec, job.attempt, spoke) as session:
            entry.wants_engine = False
            assert entry.allowance is not None
            with session.under(entry.allowance), job.lend_model(session):
                result = await handler.run(job)
            session.must_be_fresh()
            return result

    async def carry() -> None:
        if apart is not None:
            hint.give()
            entry.carried = await take_along(handler, job)

    async with world.gates.ahead(entry) as makes_room:
        await _stage(entry, world, job, budget, "init", init, type(None))
        result = await _stage(entry, world, job, budget, "run", run, RunResult, then=carry)
    if entry.session is None or not entry.session.calls:
        raise HandlerError("the model was never called", code="no_model_calls")
    entry.stop, entry.result = result.stop, result
    if apart is not None or not handler.grades_in_sandbox:
        await job.close_sandbox()

    entry.grade = await grade(entry, world, job, budget, result)
    await job.close_sandbox()
    return outcome_of_stop(result.stop)


async def grade(entry: JobEntry, world: World, job: AttemptContext, budget: TotalBudget, result: RunResult) -> Grade:
    """EVAL, in a fresh sandbox where the handler wants one."""

    async def graded() -> Grade:
        spec = entry.handler.grading_sandbox(entry.instance)
        if spec is not None:
            await open_grading_sandbox(job, spec, entry.carried)
        return await evaluate(entry.handler, job, result)

    return await _stage(entry, world, job, budget, "eval", graded, Grade)


async def _stage(
    entry: JobEntry,
    world: World,
    job: AttemptContext,
    budget: TotalBudget,
    stage: Stage,
    work: Callable[[], Awaitable[T]],
    returns: type[T],
    then: Callable[[], Awaitable[None]] | None = None,
) -> T:
    """One stage, with the handler's own recovery inside its deadline. ``then`` follows, recovered or not.

    What it returns is checked: nothing makes a plugin run its types through a checker.
    """

    async def guarded(nursery: trio.Nursery) -> T:
        with job.lend_nursery(nursery):
            result: object
            try:
                result = await work()
            except Exception as exc:
                # A cancelled stage raises Cancelled, alone or in a group, which this does not catch. Trouble of the
                # infrastructure is not the handler's to explain away: it is recorded, and tried again.
                if any(_is_infrastructure(leaf) for leaf in leaves(exc)):
                    raise
                # What recovery returns stands for what the stage should have returned; by default it raises again.
                result = await entry.handler.recover(job, stage, exc)
                entry.events.emit("job.recovered", world.clock.wall(), stage=stage, error=chain(exc))
            sound = _sound(result, stage, returns)
            if then is not None:
                await then()
        return sound

    return await run_stage(world.gates, world.metrics, entry, stage, budget, guarded)


def _sound(result: object, stage: Stage, returns: type[T]) -> T:
    """What a stage returned, when it is what it must be: nothing else may get into a record."""
    wrong = GraderError if stage == "eval" else HandlerError
    if not isinstance(result, returns):
        raise wrong(f"{stage} returned {type(result).__name__}, not {returns.__name__}", code="wrong_result")
    # What a handler hands from RUN to EVAL is its own affair; the rest is read by others.
    told = msgspec.structs.replace(result, data={}) if isinstance(result, RunResult) else result
    try:
        plain = msgspec.json.decode(msgspec.json.encode(told), type=returns)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as exc:
        raise wrong(
            f"{stage} returned a {returns.__name__} that can't be told: {chain(exc)}", code="wrong_result"
        ) from exc
    # A grade is read as it will be read from the disk, where 1 is 1.0; what EVAL gets of RUN stays the handler's own.
    return plain if isinstance(plain, Grade) else result


def _is_infrastructure(exc: BaseException) -> bool:
    """Whether an error is of an engine, a policy or a sandbox, or of a grader that could not do its work."""
    if isinstance(exc, GraderError):
        return exc.may_retry
    return isinstance(exc, (BackendError, RendererError, SandboxError, Stale))


def _interrupted(entry: JobEntry) -> Outcome | None:
    """The outcome of a job whose scope was cancelled; none where it is the daemon that ends.

    A grade that was given before that stands.
    """
    if entry.grade is not None and entry.stop is not None:
        return outcome_of_stop(entry.stop)
    return None if entry.cancel_reason is None else cancelled(entry.cancel_reason, entry.stage)


def _leading(group: BaseExceptionGroup[Exception]) -> Exception:
    """The error that decides the outcome: a time-out first, then a classified one, then whatever came first."""
    found = [leaf for leaf in leaves(group) if isinstance(leaf, Exception)]
    for kind in (StageTimedOut, RolloutError):
        for leaf in found:
            if isinstance(leaf, kind):
                return leaf
    return found[0]
