"""The handler contract passes a good handler and catches each planted fault by the check that is for it."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar, cast

import msgspec
import pytest
import trio

from prorld.domain.messages import Message, system, user
from prorld.errors import GraderError
from prorld.handlers import AgentHandler, Grade, JobContext, Play, RunResult, SandboxSpec, tool_call
from prorld.kit.process import Child, child
from prorld.testing.fake_sandbox import FakeRuntime
from prorld.testing.handler_contract import HANDLER_CONTRACT, HandlerCheck, HandlerUnderTest
from prorld.testing.handlers import FakeHandler, check_handler


class Sum(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    a: int
    b: int


class Good(AgentHandler[Sum]):
    name = "good"
    instance_type = Sum

    def sandbox_spec(self, instance: Sum) -> SandboxSpec | None:
        return SandboxSpec()

    def prompt(self, instance: Sum) -> Sequence[Message]:
        return [user(f"{instance.a} + {instance.b}?")]

    async def evaluate(self, job: JobContext[Sum], result: RunResult) -> Grade:
        await trio.lowlevel.checkpoint()
        return Grade(reward=float((result.answer or "").strip() == str(job.instance.a + job.instance.b)))


class Divides(Good):
    def prompt(self, instance: Sum) -> Sequence[Message]:
        return [user(f"What is {instance.a // instance.b}?")]


class Rolls(Good):
    def prompt(self, instance: Sum) -> Sequence[Message]:
        return [user(f"{instance.a} + {instance.b}? {random.random()}")]


class Late(Good):
    def prompt(self, instance: Sum) -> Sequence[Message]:
        return [user("hello"), system("rules")]


class Points(Good):
    async def evaluate(self, job: JobContext[Sum], result: RunResult) -> Grade:
        return cast("Grade", 1.0)


class Trusting(Good):
    async def evaluate(self, job: JobContext[Sum], result: RunResult) -> Grade:
        return Grade(reward=float(int((result.answer or "0")[:20]) == 4))


class Careful(Good):
    async def evaluate(self, job: JobContext[Sum], result: RunResult) -> Grade:
        try:
            return Grade(reward=float(int((result.answer or "0")[:20]) == 4))
        except ValueError as exc:
            raise GraderError("no number") from exc


class Answered(Good):
    async def evaluate(self, job: JobContext[Sum], result: RunResult) -> Grade:
        return Grade(reward=float(len(cast("str", result.answer)) == 1))


class Stubborn(Good):
    """Turns a cancel into an error of its own."""

    async def evaluate(self, job: JobContext[Sum], result: RunResult) -> Grade:
        try:
            await trio.sleep(0.001)
        except BaseException as exc:
            raise ValueError("not now") from exc  # noqa: ASYNC104
        return Grade(reward=0.0)


class Hoarder(Good):
    """Starts another process for every grade and ends none."""

    def __init__(self, config: msgspec.Struct | None = None) -> None:
        super().__init__(config)
        self.keeper: trio.Nursery | None = None

    async def evaluate(self, job: JobContext[Sum], result: RunResult) -> Grade:
        assert self.keeper is not None
        _: Child = await self.keeper.start(lambda task_status: child(["sleep", "60"], env={}, task_status=task_status))
        return Grade(reward=0.0)


class Lacks(Good):
    def plays(self, instance: Sum) -> Sequence[Play]:
        return [Play(name="gold", turns=("1",), reward=1.0)]


class Doubles(Good):
    def plays(self, instance: Sum) -> Sequence[Play]:
        return [*super().plays(instance), *super().plays(instance)]


class Mute(Good):
    def plays(self, instance: Sum) -> Sequence[Play]:
        return [*super().plays(instance), Play(name="gold", turns=(), reward=1.0)]


class Unsayable(Good):
    def plays(self, instance: Sum) -> Sequence[Play]:
        return [*super().plays(instance), Play(name="gold", turns=("\ud800",), reward=1.0)]


class Boundless(Good):
    def plays(self, instance: Sum) -> Sequence[Play]:
        return [*super().plays(instance), Play(name="cheat:x", turns=("1",), reward=float("inf"))]


class Worthless(Good):
    def plays(self, instance: Sum) -> Sequence[Play]:
        return [*super().plays(instance), Play(name="gold", turns=(str(instance.a + instance.b),))]


class Changes(Good):
    def plays(self, instance: Sum) -> Sequence[Play]:
        return [*super().plays(instance), Play(name="gold", turns=(str(random.random()),), reward=1.0)]


class Breaks(Good):
    def plays(self, instance: Sum) -> Sequence[Play]:
        raise KeyError("patch")


class Golden(Good):
    """Calls a tool that only a real sandbox answers, and says the right number all the same."""

    default_tools: ClassVar[tuple[str, ...]] = ("python",)

    def plays(self, instance: Sum) -> Sequence[Play]:
        right = str(instance.a + instance.b)
        turns = (tool_call("python", code=f"print({instance.a} + {instance.b})"), right)
        return [*super().plays(instance), Play(name="gold", turns=turns, reward=1.0)]


class Brass(Good):
    def plays(self, instance: Sum) -> Sequence[Play]:
        return [*super().plays(instance), Play(name="gold", turns=("17",), reward=1.0)]


@asynccontextmanager
async def _kept(handler: AgentHandler[Any]) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        if isinstance(handler, Hoarder):
            handler.keeper = nursery
        yield
        nursery.cancel_scope.cancel()


def named(name: str) -> HandlerCheck:
    """One check."""
    return {check.__name__: check for check in HANDLER_CONTRACT}[name]


FAULTS = [
    (Divides, "it_refuses_what_it_can_not_do"),
    (Rolls, "its_prompts_are_stable"),
    (Late, "its_prompts_are_stable"),
    (Points, "its_grades_are_typed"),
    (Trusting, "hostile_answers_get_a_grade"),
    (Answered, "an_end_without_an_answer_gets_a_grade"),
    (Stubborn, "evaluate_can_be_cancelled_anywhere"),
    (Hoarder, "nothing_is_left_over"),
    *(
        (kind, "its_plays_are_sound")
        for kind in (Lacks, Doubles, Mute, Unsayable, Boundless, Worthless, Changes, Breaks)
    ),
    (Brass, "its_gold_plays_score"),
]


@pytest.mark.parametrize(("kind", "check"), FAULTS, ids=lambda value: getattr(value, "__name__", value))
async def test_a_planted_fault_is_found(kind: type[AgentHandler[Any]], check: str):
    """Each fault fails the check that is named for it, with words."""
    handler = kind()
    async with _kept(handler):
        with pytest.RaisesGroup(AssertionError, allow_unwrapped=True):
            await named(check)(HandlerUnderTest(handler=handler, instances=[{"a": 2, "b": 2}]))


@pytest.mark.parametrize("handler", [Good(), Careful(), Golden()], ids=["good", "grader-error", "golden"])
async def test_a_sound_handler_keeps_everything(handler: AgentHandler[Any]):
    """A typed grader error is a way to answer a hostile answer."""
    await check_handler(handler, [{"a": 2, "b": 2}, {"a": 2, "b": 3}])


async def test_the_instances_are_not_optional():
    """A check of nothing would pass everything."""
    with pytest.raises(AssertionError, match="no instance"):
        await check_handler(FakeHandler(), [])


class Gilt(Golden):
    def plays(self, instance: Sum) -> Sequence[Play]:
        turns = (tool_call("python", code="print(5)"), "5")
        return [*super().plays(instance)[:-1], Play(name="gold", turns=turns, reward=1.0)]


async def test_what_a_sandbox_has_a_part_in_is_judged_in_real_ones_only() -> None:
    """A fake one could not have helped it to the right answer."""
    instances = [{"a": 2, "b": 2}]
    await named("its_gold_plays_score")(HandlerUnderTest(handler=Gilt(), instances=instances))
    given = HandlerUnderTest(handler=Gilt(), instances=instances, runtime=FakeRuntime())
    with pytest.RaisesGroup(AssertionError, allow_unwrapped=True):
        await named("its_gold_plays_score")(given)
