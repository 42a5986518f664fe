"""What every handler has to keep, as checks that its author runs one by one, on fakes and without a daemon.

Make a ``HandlerUnderTest`` and await each check of ``HANDLER_CONTRACT`` with it, for example through
``pytest.mark.parametrize``; ``prorld plugin check`` does the same from a shell. A check raises ``AssertionError`` for
what is not kept; what the handler itself raises comes out as its ``__cause__`` or as it is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import trio

from prorld.domain.job import AgentLimits
from prorld.domain.messages import Message
from prorld.domain.outcome import StopReason
from prorld.errors import GraderError, ProrldError
from prorld.handlers.base import AgentHandler, Grade, RunResult
from prorld.handlers.registry import accept
from prorld.inference.contract import Turn
from prorld.sandbox.contract import SandboxRuntime, SandboxSpec
from prorld.testing.fake_sandbox import FakeRuntime
from prorld.testing.jobs import FakeJob, ScriptedModel
from prorld.testing.sweep import CancelAtStep

__all__ = ["HANDLER_CONTRACT", "HOSTILE_ANSWERS", "HandlerCheck", "HandlerUnderTest"]

CHECK_S = 300.0
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

HOSTILE_ANSWERS: Mapping[str, str] = {
    "nothing": "",
    "blanks": " \t\r\n\u00a0\u2003",
    "control characters": "\x00\x07\x1b[2J\x7f\u202e",
    "a lone surrogate": "\ud800",
    "a very long line": "a" * 200_000,
    "a number of 10,000 digits": "9" * 10_000,
    "a huge exponent": "9**9**9**9",
    "no number": "nan",
    "infinity": "-1e999",
    "deep brackets": "[" * 5000 + "(" * 5000,
    "unclosed braces": "\\boxed{" * 2000,
    "broken JSON": '{"answer": [1, 2, {"x": ',
    "deep JSON": '{"a":' * 2000 + "1" + "}" * 2000,
    "code that exits": "__import__('os')._exit(0)",
    "a broken tool call": '<tool_call>{"name": 7}</tool_call>',
    "markup": "</think><answer><answer></answer>" * 500,
    "a pattern that explodes": "(a+)+$" + "a" * 4000 + "!",
    "digits of another script": "\u0664\u0662 \u00bd \u2460",
}


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
    processes, descriptors = _children(), _descriptors()
    async with under.handler.open():
        await trio.lowlevel.checkpoint()
    left = _children() - processes
    assert not left, f"open() leaves processes: {sorted(left)}"
    assert _descriptors() <= descriptors, "open() leaves descriptors open"


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
    for what, instance in _spoilt(under.instances[0]):
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


async def its_grades_are_typed(under: HandlerUnderTest) -> None:
    """Every instance goes through the three stages and comes out as a ``Grade`` of plain numbers."""
    async with under.handler.open():
        for number, instance in enumerate(under.instances):
            grade = await _graded(under, instance, "42")
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
            grade = await under.handler.evaluate(job, RunResult(stop=stop))
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
        await under.handler.evaluate(job, RunResult(stop=StopReason.FINISHED, answer="42"))

    async with under.handler.open():
        await _cancelled_everywhere(under, "evaluate", stage)
        assert isinstance(await _graded(under, under.instances[0], "42"), Grade), "no Grade after a cancel"


async def nothing_is_left_over(under: HandlerUnderTest) -> None:
    """After rollouts that ended and one that was cancelled, no sandbox, process, task or descriptor is left."""
    await _some_rollouts(under)
    processes, descriptors, tasks = _children(), _descriptors(), _tasks()
    await _some_rollouts(under)
    left = _children() - processes
    assert not left, f"processes are left: {sorted(left)}"
    assert _descriptors() <= descriptors, f"{_descriptors() - descriptors} descriptors are left open"
    assert _tasks() <= tasks, f"{_tasks() - tasks} tasks are left"


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
    it_opens_again_after_it_was_closed,
    its_grades_are_typed,
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


async def _graded(under: HandlerUnderTest, instance: Mapping[str, Any], answer: str) -> object:
    """What ``evaluate`` returns when the policy says the same thing in every turn."""
    limits = AgentLimits()
    async with _stage_room(under, instance, [answer] * limits.max_turns) as job:
        await under.handler.init(job)
        result = await under.handler.run(job)
        assert isinstance(result, RunResult), f"run returned {type(result).__name__}, no RunResult"
        if not under.handler.grades_in_sandbox:
            await job.close_sandbox()
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
        began = trio.current_time()
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
        if not instrument.fired:
            return
        seconds = trio.current_time() - began
        assert seconds < GONE_S, f"{what}, cancelled at step {step}, takes {seconds:.1f} s to end"


def _steps() -> Iterator[int]:
    step = 1
    while step < STEPS_MAX:
        yield step
        step = step + 1 if step < STEPS_EACH else int(step * STEPS_GROWTH)


# --- what is looked at ------------------------------------------------------------------------------------------------


_WRONG: tuple[object, ...] = (None, "", "\x00", [], {}, 0, -1, 10**30, True)


def _spoilt(instance: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "nothing in it", {}
    for field in instance:
        yield f"no {field}", {name: value for name, value in instance.items() if name != field}
        for wrong in _WRONG:
            yield f"{field} = {wrong!r}", {**instance, field: wrong}


def _children() -> set[int]:
    """Live children of this process."""
    found: set[int] = set()
    for entry in Path("/proc/self/task").glob("*/children"):
        found |= {int(pid) for pid in entry.read_text().split() if _is_alive(pid)}
    return found


def _is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _tasks() -> int:
    return trio.lowlevel.current_statistics().tasks_living


def _first(group: BaseExceptionGroup[Exception]) -> Exception:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
