"""What every handler has to keep, as checks that its author runs one by one, on fakes and without a daemon.

Make a ``HandlerUnderTest`` and await each check of ``HANDLER_CONTRACT`` with it, for example through
``pytest.mark.parametrize``; ``prorld plugin check`` does the same from a shell. A check raises ``AssertionError`` for
what is not kept; what the handler itself raises comes out as its ``__cause__`` or as it is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import trio

from prorld.domain.job import AgentLimits
from prorld.domain.messages import Message
from prorld.domain.outcome import StopReason
from prorld.errors import GraderError, ProrldError
from prorld.handlers.base import AgentHandler, Grade, RunResult
from prorld.handlers.play import GOLD, Play
from prorld.handlers.registry import accept
from prorld.inference.contract import Turn
from prorld.sandbox.contract import SandboxRuntime, SandboxSpec
from prorld.testing.fake_sandbox import Answer, FakeRuntime, SessionName, toy_answer
from prorld.testing.hostile import HOSTILE_ANSWERS, spoilt
from prorld.testing.jobs import FakeJob, ScriptedModel, ready_to_grade
from prorld.testing.leftovers import children, descriptors, tasks
from prorld.testing.plays import check_plays, turns_of
from prorld.testing.sweep import CancelAtStep

__all__ = ["HANDLER_CONTRACT", "HOSTILE_ANSWERS", "HandlerCheck", "HandlerUnderTest"]

CHECK_S = 300.0
REWARD_TOLERANCE = 1e-9
# What a grader may take for one answer, however hostile.
GRADE_S = 60.0
# What clean-up may take after a cancel, graders in child processes included.
GONE_S = 10.0
# Every one of the first steps gets its cancel, then ever fewer: a stage may take thousands.
STEPS_EACH = 24
STEPS_GROWTH = 1.5
STEPS_MAX = 5000
# Where one grade takes seconds, the sweep ends early.
SWEEP_S = 20.0


@dataclass(kw_only=True)
class HandlerUnderTest:
    """A handler, some instances of it, and the sandboxes that it gets; by default sandboxes in name only."""

    handler: AgentHandler[Any]
    instances: Sequence[Mapping[str, Any]]
    runtime: SandboxRuntime | None = None

    def new_runtime(self) -> SandboxRuntime:
        """The sandboxes of one check."""
        return self.runtime or FakeRuntime()


HandlerCheck = Callable[[HandlerUnderTest], Awaitable[None]]


async def its_types_make_a_schema(under: HandlerUnderTest) -> None:
    """It names itself and its instance type, and both its types can be described as JSON schema."""
    await trio.lowlevel.checkpoint()
    under.handler.check()
    for kind in (under.handler.instance_type, under.handler.config_type):
        msgspec.json.encode(msgspec.json.schema(kind))


async def it_opens_again_after_it_was_closed(under: HandlerUnderTest) -> None:
    """``open`` can be entered a second time, and leaves no process and no descriptor behind."""
    async with under.handler.open():
        await trio.lowlevel.checkpoint()
    processes, open_files = children(), descriptors()
    async with under.handler.open():
        await trio.lowlevel.checkpoint()
    left = children() - processes
    assert not left, f"open() leaves processes: {sorted(left)}"
    assert descriptors() <= open_files, "open() leaves descriptors open"


async def it_takes_its_instances(under: HandlerUnderTest) -> None:
    """Every instance is accepted, and is the same after a way through JSON."""
    await trio.lowlevel.checkpoint()
    assert under.instances, "nothing to check: no instance was given"
    for number, instance in enumerate(under.instances):
        decoded = accept(under.handler, instance, AgentLimits())
        again = msgspec.convert(msgspec.to_builtins(decoded), under.handler.instance_type)
        assert again == decoded, f"instance {number} changes on its way through JSON"


async def it_refuses_what_it_can_not_do(under: HandlerUnderTest) -> None:
    """An instance with any field missing or wrong is refused with a typed error, or can be prompted for."""
    await trio.lowlevel.checkpoint()
    for what, instance in spoilt(under.instances[0]):
        try:
            decoded = accept(under.handler, instance, AgentLimits())
        except ProrldError as exc:
            cause = exc.__cause__
            typed = cause is None or isinstance(cause, msgspec.MsgspecError | ProrldError)
            assert typed, f"an instance with {what} makes accept() raise {cause!r}; raise Impossible"
            continue
        try:
            list(under.handler.prompt(decoded))
        except Exception as exc:
            raise AssertionError(f"an instance with {what} is accepted, and then prompt() raises {exc!r}") from exc


async def its_prompts_are_stable(under: HandlerUnderTest) -> None:
    """Asked twice, the conversation opens the same way: a user's turn last, a system message only first."""
    await trio.lowlevel.checkpoint()
    for number, instance in enumerate(under.instances):
        decoded = accept(under.handler, instance, AgentLimits())
        messages = list(under.handler.prompt(decoded))
        assert messages, f"instance {number}: an empty prompt"
        assert all(isinstance(message, Message) for message in messages), f"instance {number}: not all are Messages"
        assert messages == list(under.handler.prompt(decoded)), f"instance {number}: the prompt changes"
        assert messages[-1].role == "user", f"instance {number}: the prompt ends with {messages[-1].role}"
        assert all(message.role != "system" for message in messages[1:]), f"instance {number}: a late system message"
        spec = under.handler.sandbox_spec(decoded)
        assert spec is None or isinstance(spec, SandboxSpec), f"instance {number}: {spec!r} is no SandboxSpec"


async def its_plays_are_sound(under: HandlerUnderTest) -> None:
    """The plays of every instance can be said, have names and rewards of their own, and stay the same."""
    await trio.lowlevel.checkpoint()
    for number, instance in enumerate(under.instances):
        try:
            check_plays(under.handler, instance)
        except AssertionError as exc:
            raise AssertionError(f"instance {number}: {exc}") from exc
        except Exception as exc:
            raise AssertionError(f"instance {number}: plays() raises {exc!r}") from exc


async def its_gold_plays_score(under: HandlerUnderTest) -> None:
    """A gold play comes to its reward; on fakes that is asked only where no sandbox has a part in it."""
    async with under.handler.open():
        for number, instance in enumerate(under.instances):
            decoded = accept(under.handler, instance, AgentLimits())
            in_sandbox = under.handler.grades_in_sandbox or under.handler.grading_sandbox(decoded) is not None
            if in_sandbox and under.runtime is None:
                continue
            for play in under.handler.plays(decoded):
                if play.name == GOLD:
                    await _scores(under, instance, play, f"instance {number}, play {play.name}")


async def its_grades_are_typed(under: HandlerUnderTest) -> None:
    """Every instance goes through the three stages and comes out as a ``Grade`` of plain numbers."""
    async with under.handler.open():
        for number, instance in enumerate(under.instances):
            grade = await _told(f"instance {number}", partial(_graded, under, instance, "42"))
            assert isinstance(grade, Grade), f"instance {number}: evaluate returned {type(grade).__name__}, no Grade"
            again = msgspec.convert(msgspec.to_builtins(grade), Grade)
            assert again == grade, f"instance {number}: the grade holds something else than numbers: {grade!r}"


async def hostile_answers_get_a_grade(under: HandlerUnderTest) -> None:
    """Whatever the policy says, ``evaluate`` gives a ``Grade`` in time or raises ``GraderError``, and nothing else."""
    async with under.handler.open():
        for what, answer in HOSTILE_ANSWERS.items():
            error: Exception | None = None
            grade: object = None
            scope = trio.CancelScope(deadline=trio.current_time() + GRADE_S)
            try:
                with scope:
                    grade = await _graded(under, under.instances[0], answer)
            except* Exception as group:  # noqa: BLE001 - whatever a handler raises is judged below
                error = _first(group)
            assert not scope.cancelled_caught, f"the answer {what!r} takes longer than {GRADE_S:g} s to grade"
            if error is None:
                assert isinstance(grade, Grade), f"the answer {what!r} is graded with {grade!r}"
            elif not isinstance(error, GraderError):
                raise AssertionError(f"the answer {what!r} makes the handler raise {error!r}") from error


async def an_end_without_an_answer_gets_a_grade(under: HandlerUnderTest) -> None:
    """A rollout that met a limit has no answer, and is graded all the same."""
    async with under.handler.open(), _stage_room(under, under.instances[0]) as job:
        await under.handler.init(job)
        for stop in (StopReason.MAX_TURNS, StopReason.CONTEXT_FULL, StopReason.MALFORMED):
            evaluate = partial(under.handler.evaluate, job, RunResult(stop=stop))
            grade = await _told(f"{stop.value} without an answer", evaluate)
            assert isinstance(grade, Grade), f"evaluate returned {type(grade).__name__}, no Grade, after {stop.value}"


async def init_can_be_cancelled_anywhere(under: HandlerUnderTest) -> None:
    """A cancel at any step of INIT ends it at once, and no sandbox is left."""

    async def stage(job: FakeJob) -> None:
        await under.handler.init(job)

    async with under.handler.open():
        await _cancelled_everywhere(under, "init", stage)


async def run_can_be_cancelled_anywhere(under: HandlerUnderTest) -> None:
    """A cancel at any step of RUN ends it at once, and no sandbox is left."""

    async def stage(job: FakeJob) -> None:
        await under.handler.init(job)
        await under.handler.run(job)

    async with under.handler.open():
        await _cancelled_everywhere(under, "run", stage)


async def evaluate_can_be_cancelled_anywhere(under: HandlerUnderTest) -> None:
    """A cancel at any step of EVAL ends it at once, and the next grade is well."""

    async def stage(job: FakeJob) -> None:
        await under.handler.init(job)
        await ready_to_grade(under.handler, job)
        await under.handler.evaluate(job, RunResult(stop=StopReason.FINISHED, answer="42"))

    async with under.handler.open():
        await _cancelled_everywhere(under, "evaluate", stage)
        assert isinstance(await _graded(under, under.instances[0], "42"), Grade), "no Grade after a cancel"


async def nothing_is_left_over(under: HandlerUnderTest) -> None:
    """After rollouts that ended and one that was cancelled, no sandbox, process, task or descriptor is left."""
    await _some_rollouts(under)
    processes, open_files, running = children(), descriptors(), tasks()
    await _some_rollouts(under)
    left = children() - processes
    assert not left, f"processes are left: {sorted(left)}"
    assert descriptors() <= open_files, f"{descriptors() - open_files} descriptors are left open"
    assert tasks() <= running, f"{tasks() - running} tasks are left"


@contextmanager
def _no_grade_is_fine() -> Iterator[None]:
    try:
        yield
    except* GraderError:
        pass


async def _some_rollouts(under: HandlerUnderTest) -> None:
    async with under.handler.open():
        for answer in ("42", HOSTILE_ANSWERS["broken JSON"]):
            with _no_grade_is_fine():
                await _graded(under, under.instances[0], answer)
        async with _stage_room(under, under.instances[0]) as job:
            await under.handler.init(job)


HANDLER_CONTRACT: tuple[HandlerCheck, ...] = (
    its_types_make_a_schema,
    it_takes_its_instances,
    it_refuses_what_it_can_not_do,
    its_prompts_are_stable,
    its_plays_are_sound,
    it_opens_again_after_it_was_closed,
    its_grades_are_typed,
    its_gold_plays_score,
    hostile_answers_get_a_grade,
    an_end_without_an_answer_gets_a_grade,
    init_can_be_cancelled_anywhere,
    run_can_be_cancelled_anywhere,
    evaluate_can_be_cancelled_anywhere,
    nothing_is_left_over,
)


# --- how a stage is run -----------------------------------------------------------------------------------------------


@asynccontextmanager
async def _stage_room(
    under: HandlerUnderTest, instance: Mapping[str, Any], turns: Sequence[Turn | str] = ("42",)
) -> AsyncIterator[FakeJob]:
    """A job whose sandbox ends with the block; its model has one conversation."""
    decoded = accept(under.handler, instance, AgentLimits())
    runtime = under.new_runtime()
    async with trio.open_nursery() as nursery:
        yield FakeJob(decoded, ScriptedModel(turns), nursery, runtime=runtime)
        nursery.cancel_scope.cancel("the check is over")
    assert not runtime.list(), f"sandboxes are left: {runtime.list()}"


async def _told(what: str, work: Callable[[], Awaitable[object]]) -> object:
    """What the handler's code gives; what it raises is an ``AssertionError`` that says at what."""
    result: object = None
    try:
        result = await work()
    except* Exception as group:  # noqa: BLE001 - told with what it was done for
        error = _first(group)
        raise AssertionError(f"{what}: the handler raises {error!r}") from error
    return result


async def _scores(under: HandlerUnderTest, instance: Mapping[str, Any], play: Play, what: str) -> None:
    """Hold a play to its reward, unless a fake sandbox was asked something that only a real one knows."""
    asked: list[str] = []

    def answer(session: SessionName, code: str) -> Answer:
        asked.append(code)
        return toy_answer(session, code)

    room = under if under.runtime is not None else replace(under, runtime=FakeRuntime(answer))
    try:
        grade = await _told(what, partial(_played, room, instance, play.turns))
    except AssertionError:
        if asked:
            return
        raise
    assert isinstance(grade, Grade), f"{what}: evaluate returned {type(grade).__name__}, no Grade"
    right = abs(grade.reward - play.reward) <= REWARD_TOLERANCE
    assert right or asked, f"{what}: the reward is {grade.reward:g}, and not {play.reward:g}"


async def _played(under: HandlerUnderTest, instance: Mapping[str, Any], turns: Sequence[str]) -> object:
    """What ``evaluate`` returns when the policy says these turns, and the last of them to the end."""
    async with _stage_room(under, instance) as job:
        spoken = turns_of(turns, [tool.schema.name for tool in under.handler.tools(job)])
        job.model = ScriptedModel([*spoken, *spoken[-1:] * job.limits.max_turns])
        return await _to_the_end(under, job)


async def _graded(under: HandlerUnderTest, instance: Mapping[str, Any], answer: str) -> object:
    """What ``evaluate`` returns when the policy says the same thing in every turn."""
    async with _stage_room(under, instance, [answer] * AgentLimits().max_turns) as job:
        return await _to_the_end(under, job)


async def _to_the_end(under: HandlerUnderTest, job: FakeJob) -> object:
    await under.handler.init(job)
    result = await under.handler.run(job)
    assert isinstance(result, RunResult), f"run returned {type(result).__name__}, no RunResult"
    await ready_to_grade(under.handler, job)
    grade: object = await under.handler.evaluate(job, result)
    return grade


async def _cancelled_everywhere(
    under: HandlerUnderTest, what: str, stage: Callable[[FakeJob], Awaitable[None]]
) -> None:
    until = trio.current_time() + SWEEP_S
    for step in _steps():
        if trio.current_time() > until:
            return
        scope = trio.CancelScope()
        instrument = CancelAtStep(scope, step)
        trio.lowlevel.add_instrument(instrument)
        try:
            async with _stage_room(under, under.instances[0], ["42"] * AgentLimits().max_turns) as job:
                with scope:
                    await stage(job)
                instrument.stop()
        except* Exception as group:  # noqa: BLE001 - told with its step
            error = _first(group)
            raise AssertionError(f"{what}, cancelled at step {step}, raises {error!r}") from error
        finally:
            trio.lowlevel.remove_instrument(instrument)
        if instrument.cancelled_at is None:
            return
        seconds = trio.current_time() - instrument.cancelled_at
        assert seconds < GONE_S, f"{what}, cancelled at step {step}, takes {seconds:.1f} s to end"


def _steps() -> Iterator[int]:
    step = 1
    while step < STEPS_MAX:
        yield step
        step = step + 1 if step < STEPS_EACH else int(step * STEPS_GROWTH)


def _first(group: BaseExceptionGroup[Exception]) -> Exception:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
