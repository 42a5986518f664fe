"""Grading apart: EVAL has a fresh sandbox with what the handler names, and nothing else of the rollout's."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar, Literal

import msgspec
import pytest
import trio
import trio.testing

from prorld.domain.outcome import OutcomeKind, StopReason
from prorld.errors import Conflict, HandlerError, NotFound, SandboxError
from prorld.handlers import USED_UP, Grade, JobContext, RunResult, SandboxSpec
from prorld.rollout.document import kept_bytes
from prorld.sandbox.warm_plan import WarmRules
from prorld.testing.fake_backend import FakeBackend
from prorld.testing.fake_sandbox import FakeRuntime
from prorld.testing.handlers import FakeHandler, FakeInstance
from prorld.testing.jobs import run_handler
from prorld.testing.scripted_engine.script import Script
from prorld.testing.sweep import sweep
from prorld.wire.jobs import JobRecord
from prorld.wire.looks import ReevaluateJob
from prorld.wire.ops import StagePatch, StagesPatch
from tests.rollout.support import Room, byte_renderer, room

ROLLOUT = SandboxSpec(image="tools")
GRADING = SandboxSpec(image="tests")


class Apart(FakeHandler):
    """The policy's work is what stands in ``diff``; it is graded where nobody has been."""

    name = "apart"
    data_sources: ClassVar[tuple[str, ...]] = ()
    carried_files: ClassVar[tuple[str, ...]] = ("diff", "src/new.py")
    carry_bytes_max: ClassVar[int] = 1000

    def __init__(self, leaves: Mapping[str, bytes] | None = None) -> None:
        super().__init__()
        self.leaves = {"diff": b"+ right", "secret": b"x"} if leaves is None else leaves
        self.rollouts: list[str] = []
        self.graded: list[tuple[str, dict[str, bytes]]] = []
        self.seen: list[Mapping[str, bytes]] = []

    def sandbox_spec(self, instance: FakeInstance) -> SandboxSpec:
        return ROLLOUT

    def grading_sandbox(self, instance: FakeInstance) -> SandboxSpec | None:
        return GRADING

    async def run(self, job: JobContext[FakeInstance]) -> RunResult:
        result = await super().run(job)
        self.rollouts.append(job.sandbox.sandbox_id)
        for path, data in self.leaves.items():
            await job.sandbox.write_file(path, data)
        return result

    async def evaluate(self, job: JobContext[FakeInstance], result: RunResult) -> Grade:
        sandbox: Any = job.sandbox
        assert sandbox.spec == GRADING
        self.graded.append((sandbox.sandbox_id, dict(sandbox.files)))
        self.seen.append(job.carried)
        await trio.sleep(job.instance.seconds.get("eval", 0.0))
        work = await job.sandbox.read_file("diff") if "diff" in job.carried else b""
        return Grade(reward=float(work == b"+ right"))


def apart(here: Room, handler: FakeHandler) -> FakeHandler:
    """The handler, taking the jobs of the fake one."""
    here.registry.add(handler)
    return handler


def kind_of(record: JobRecord) -> OutcomeKind | None:
    return None if record.outcome is None else record.outcome.kind


async def graded(here: Room, name: str = "a", **fields: Any):
    return await here.finish(name, handler="apart", agent={"tools": []}, **fields)


async def test_only_what_is_named_gets_across(autojump_clock: trio.testing.MockClock) -> None:
    """The fresh sandbox has the named files that were there, under the same paths, and no other."""
    async with room() as here:
        handler = Apart()
        apart(here, handler)
        record = await graded(here)
        assert (record.outcome.kind, record.reward) == (OutcomeKind.OK, 1.0)
        ((grading_id, files),) = handler.graded
        assert files == {"/work/diff": b"+ right"}
        assert handler.seen == [{"diff": b"+ right"}]
        assert grading_id not in handler.rollouts
        here.assert_clean()


@pytest.mark.parametrize("leaves", [{}, {"diff/inner": b"a directory is in its place"}], ids=["nothing", "a directory"])
async def test_what_is_not_there_is_left_out(leaves, autojump_clock: trio.testing.MockClock) -> None:
    """A policy that left no file gets an honest grade for that."""
    async with room() as here:
        handler = Apart(leaves)
        apart(here, handler)
        record = await graded(here)
        assert (record.outcome.kind, record.reward) == (OutcomeKind.OK, 0.0)
        assert handler.seen == [{}]


@pytest.mark.parametrize(
    ("leaves", "carried"),
    [
        ({"diff": b"x" * 1001}, {}),
        ({"diff": b"x" * 600, "src/new.py": b"x" * 401}, {"diff": b"x" * 600}),
        ({"diff": b"x" * 1001, "src/new.py": b"x"}, {"src/new.py": b"x"}),
    ],
    ids=["one file", "together", "the first"],
)
async def test_too_much_is_no_way_out_of_a_grade(leaves, carried, autojump_clock: trio.testing.MockClock) -> None:
    """What is over the bound is left out whole, as if it were not there, and told: a policy must not gain by it."""
    async with room() as here:
        handler = Apart(leaves)
        apart(here, handler)
        record = await graded(here)
        assert (record.outcome.kind, record.reward) == (OutcomeKind.OK, 0.0)
        assert handler.seen == [carried]
        told = [event.data for event in await here.supervisor.events("a", "tests") if event.event == "job.progress"]
        (left_out,) = {"diff", "src/new.py"} & set(leaves) - set(carried)
        assert [(data["what"], data["facts"]["path"]) for data in told if data["facts"].get("path") in leaves] == [
            ("not carried over", left_out)
        ]
        here.assert_clean()


class Holding(Apart):
    """Its rollout holds the file for longer than so many reads wait."""

    name = "apart"

    def __init__(self, reads: int) -> None:
        super().__init__()
        self.held = reads

    async def carry(self, job: JobContext[FakeInstance]) -> Mapping[str, bytes]:
        sandbox: Any = job.sandbox
        read = sandbox.read_file

        async def held(path: str, *, max_bytes: int) -> bytes:
            self.held -= 1
            if self.held >= 0:
                raise TimeoutError(f"{path}: not let go of")
            return bytes(await read(path, max_bytes=max_bytes))

        sandbox.read_file = held
        return await super().carry(job)


@pytest.mark.parametrize(("reads", "kind"), [(1, OutcomeKind.OK), (2, OutcomeKind.HANDLER_ERROR)])
async def test_a_file_that_is_held_is_read_again(reads, kind, autojump_clock: trio.testing.MockClock) -> None:
    """A lease outlasts one read and not two; what can't be read then may be this host's fault, and is no grade."""
    async with room() as here:
        handler = Holding(reads)
        apart(here, handler)
        record = await graded(here)
        assert (record.outcome.kind, record.reward) == (kind, 1.0 if kind is OutcomeKind.OK else None)
        here.assert_clean()


class Strange(Apart):
    """Carries over what its instance says."""

    name = "apart"

    async def carry(self, job: JobContext[FakeInstance]) -> Mapping[str, bytes]:
        answers: dict[str, Any] = {
            "list": [],
            "text": {"diff": "text"},
            "number": {1: b""},
            "much": {"diff": b"x" * 1001},
            "long": {"x" * 5000: b""},
            "many": {str(number): b"" for number in range(2000)},
            "raises": ZeroDivisionError(),
            "dies": SandboxError("on purpose"),
        }
        answer = answers[job.instance.prompt]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize(
    ("what", "kind", "code"),
    [
        ("list", OutcomeKind.HANDLER_ERROR, "wrong_result"),
        ("text", OutcomeKind.HANDLER_ERROR, "wrong_result"),
        ("number", OutcomeKind.HANDLER_ERROR, "wrong_result"),
        ("much", OutcomeKind.HANDLER_ERROR, "carry_refused"),
        ("long", OutcomeKind.HANDLER_ERROR, "carry_refused"),
        ("many", OutcomeKind.HANDLER_ERROR, "carry_refused"),
        ("raises", OutcomeKind.HANDLER_ERROR, None),
        ("dies", OutcomeKind.ENV_ERROR, "sandbox_failed"),
    ],
)
async def test_a_carry_of_ones_own_is_checked(what, kind, code, autojump_clock: trio.testing.MockClock) -> None:
    """Nothing but bytes by path, and so many; what it raises ends the attempt with the outcome that it deserves."""
    async with room() as here:
        apart(here, Strange())
        record = await graded(here, instance={"prompt": what})
        assert record.outcome.kind == kind
        assert code is None or record.outcome.code == code
        assert record.reward is None
        here.assert_clean()


class Recovering(Apart):
    """Its run breaks after the work was done, and it goes on."""

    name = "apart"

    async def run(self, job: JobContext[FakeInstance]) -> RunResult:
        await super().run(job)
        raise ZeroDivisionError

    async def recover(self, job, stage, error):
        assert stage == "run"
        return RunResult(stop=StopReason.FINISHED)


async def test_a_recovered_run_is_carried_over(autojump_clock: trio.testing.MockClock) -> None:
    """What the policy did before the handler stumbled is graded."""
    async with room() as here:
        apart(here, Recovering())
        assert (await graded(here)).reward == 1.0


async def test_no_sandbox_is_held_at_the_gate(autojump_clock: trio.testing.MockClock) -> None:
    """While EVAL is paused the job has no sandbox, and one that was made ready for it is given up in time."""
    async with room(warm=WarmRules()) as here:
        apart(here, Apart())
        here.gates.resize(StagesPatch(eval=StagePatch(workers=0)))
        await here.submit("a", handler="apart", agent={"tools": []})
        await trio.sleep(5.0)
        assert (await here.supervisor.get("a", "tests")).waiting_for == "eval"
        assert not [box for box in here.runtime.live.values() if box.job_id]
        assert here.warm is not None
        assert here.warm.idle == 1
        await trio.sleep(60.0)
        assert here.runtime.live == {}
        here.gates.resize(StagesPatch(eval=StagePatch(workers=1)))
        assert (await here.supervisor.wait_done("a", "tests")).reward == 1.0


async def test_it_is_ready_when_eval_begins(autojump_clock: trio.testing.MockClock) -> None:
    """The hint comes with the policy's last turn, so that the grading sandbox starts while the rollout's ends."""
    async with room(warm=WarmRules(), runtime=FakeRuntime(boot_s=0.5, close_s=0.6)) as here:
        handler = Apart()
        apart(here, handler)
        record = await graded(here)
        assert record.reward == 1.0
        assert record.timing.eval_s < 0.1
        here.assert_clean()


@pytest.mark.parametrize(
    ("turns", "max_turns", "when"),
    [
        (["42"], 8, 0),
        (['<tool_call>{"name": "think", "arguments": {"thought": "x"}}</tool_call>', "42"], 8, 1),
        (['<tool_call>{"name": "think", "arguments": {"thought": "x"}}</tool_call>'] * 5, 2, 1),
        (['<tool_call>{"name": "finish", "arguments": {"message": "x"}}</tool_call>'] * 5, 8, 0),
    ],
)
async def test_the_hint_comes_once_and_with_the_last_turn(
    turns, max_turns, when, autojump_clock: trio.testing.MockClock
) -> None:
    """An answer, the last turn that is allowed, or a call that ends it."""
    async with room(backends=[FakeBackend(Script(turns=turns))]) as here:
        handler = Apart()
        apart(here, handler)
        told: list[int] = []

        def expect(spec: SandboxSpec) -> None:
            here.expected.append(spec)
            told.append(events(here))

        object.__setattr__(here.world, "expect", expect)
        await here.finish("a", handler="apart", agent={"tools": ["think", "finish"], "max_turns": max_turns})
        assert here.expected == [GRADING]
        assert told == [when + 1]


class Writing(Apart):
    """Its policy writes its calls as text, so that every turn looks like the last one."""

    name = "apart"
    calls: ClassVar[Literal["native", "text"]] = "text"


async def test_calls_in_text_are_not_taken_for_the_end_again_and_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The first turn may look like the last one; the next hint comes when the end has come."""
    call = "<function=think><parameter=thought>x</parameter></function>"
    async with room(backends=[FakeBackend(Script(turns=[*[call] * 5, "42"]))]) as here:
        apart(here, Writing())
        told: list[int] = []
        object.__setattr__(here.world, "expect", lambda spec: told.append(events(here)))
        record = await here.finish("a", handler="apart", agent={"tools": ["think"], "max_turns": 8})
        assert kind_of(record) is OutcomeKind.OK
        assert told == [1, 6]


def events(here: Room) -> int:
    """How many turns the policy has taken, those that nobody may see yet as well."""
    (entry,) = here.supervisor._book.of_id("a")
    return sum(event.event == "job.turn" for event in entry.events.kept)


async def test_a_grading_sandbox_that_fails_is_made_again(autojump_clock: trio.testing.MockClock) -> None:
    """The rollout is dear: two grading sandboxes that do not come up cost it nothing, a third one its attempt."""
    async with room(runtime=FakeRuntime(fail_starts=(2, 3))) as here:
        apart(here, Apart())
        record = await graded(here)
        assert (record.reward, record.attempts[0].n, len(record.attempts)) == (1.0, 1, 1)
    async with room(runtime=FakeRuntime(fail_starts=(2, 3, 4))) as here:
        apart(here, Apart())
        record = await graded(here)
        assert kind_of(record) == OutcomeKind.OK
        assert [attempt.outcome.kind for attempt in record.attempts] == [OutcomeKind.ENV_ERROR, OutcomeKind.OK]


class Bursting(FakeRuntime):
    """What is done in its sandboxes of one spec holds too much after a while, and they are ended for it."""

    def __init__(self, spec: SandboxSpec, code: str = "sandbox_out_of_memory") -> None:
        super().__init__()
        self.spec = spec
        self.code = code

    async def run(self, spec: SandboxSpec, **given: Any) -> None:
        with trio.move_on_after(5 if spec == self.spec else 1e9):
            await super().run(spec, **given)
        raise SandboxError("on purpose", code=self.code, retryable=False)


class Judging(Apart):
    """Its grader runs what was carried, and knows what it means when that uses the sandbox up."""

    name = "apart"

    async def evaluate(self, job: JobContext[FakeInstance], result: RunResult) -> Grade:
        try:
            await super().evaluate(job, result)
            await job.sandbox.bash("true")
        except SandboxError as exc:
            if exc.stable_code not in USED_UP:
                raise
            return Grade(reward=0.0, parts={"used_up": 1.0})
        return Grade(reward=1.0)


@pytest.mark.parametrize(
    ("handler", "runtime", "kind", "reward"),
    [
        (Judging, lambda: Bursting(GRADING), OutcomeKind.OK, 0.0),
        (Judging, lambda: Bursting(GRADING, "sandbox_out_of_disk"), OutcomeKind.OK, 0.0),
        (Judging, lambda: Bursting(GRADING, "sandbox_failed"), OutcomeKind.ENV_ERROR, None),
        (Apart, lambda: Bursting(GRADING), OutcomeKind.ENV_ERROR, None),
        (Judging, lambda: Bursting(ROLLOUT), OutcomeKind.ENV_ERROR, None),
    ],
    ids=["memory", "disk", "another trouble", "a grader that does not judge it", "in RUN"],
)
async def test_a_grader_may_judge_what_uses_its_sandbox_up(
    handler, runtime, kind, reward, autojump_clock: trio.testing.MockClock
) -> None:
    """Or work that is bad could get out of its grade by that. Where it does not, there is no grade, as before."""
    bursting = runtime()
    async with room(runtime=bursting) as here:
        apart(here, handler())
        record = await graded(here, instance={"seconds": {"run": 20.0, "eval": 20.0}}, max_attempts=1)
        assert (kind_of(record), record.reward) == (kind, reward)
        if kind is OutcomeKind.ENV_ERROR:
            assert record.outcome.code == bursting.code
        here.assert_clean()


async def test_it_can_be_graded_again(autojump_clock: trio.testing.MockClock) -> None:
    """What was carried is kept with the job, counted as memory, and put into a fresh sandbox each time."""
    async with room() as here:
        handler = Apart()
        apart(here, handler)
        await graded(here)
        for n in (1, 2):
            begun = await here.looks.reevaluate("a", "tests", ReevaluateJob())
            done = await here.looks.wait_reevaluation("a", "tests", begun.n)
            assert done.outcome is not None
            assert (done.n, done.reward, done.outcome.kind) == (n, 1.0, OutcomeKind.OK)
        assert len({sandbox_id for sandbox_id, _ in handler.graded}) == 3
        assert [files for _, files in handler.graded] == [{"/work/diff": b"+ right"}] * 3
        here.assert_clean()
        stored = await here.stored("a")
        without = msgspec.structs.replace(stored, carried={})
        assert kept_bytes(stored, 0) - kept_bytes(without, 0) == len("diff") + len(b"+ right")


class Inside(Apart):
    """Some instances are graded apart, the others in the rollout's own sandbox."""

    name = "apart"
    grades_in_sandbox: ClassVar[bool] = True

    def grading_sandbox(self, instance: FakeInstance) -> SandboxSpec | None:
        return GRADING if instance.sandbox else None

    async def evaluate(self, job: JobContext[FakeInstance], result: RunResult) -> Grade:
        assert (job.sandbox.sandbox_id in self.rollouts) != job.instance.sandbox
        return Grade(reward=1.0)


async def test_the_instance_decides(autojump_clock: trio.testing.MockClock) -> None:
    """Without a grading sandbox all is as it was, down to a reevaluation that can't be."""
    async with room() as here:
        apart(here, Inside())
        assert (await graded(here, "in", instance={"sandbox": False})).reward == 1.0
        assert (await graded(here, "out", instance={"sandbox": True})).reward == 1.0
        with pytest.raises(Conflict) as caught:
            await here.looks.reevaluate("in", "tests", ReevaluateJob())
        assert caught.value.stable_code == "sandbox_gone"
        begun = await here.looks.reevaluate("out", "tests", ReevaluateJob())
        assert (await here.looks.wait_reevaluation("out", "tests", begun.n)).reward == 1.0
        here.assert_clean()


class Forgetful(Apart):
    """A comma is missing."""

    carried_files = "diff"  # type: ignore[assignment]  # on purpose


def test_one_path_is_no_list_of_paths() -> None:
    """Text in place of a tuple would be read letter by letter; the registry refuses it with a readable line."""
    Apart().check()
    with pytest.raises(HandlerError, match="carried_files is text"):
        Forgetful().check()


async def test_without_a_daemon(autojump_clock: trio.testing.MockClock) -> None:
    """``run_handler`` does the same, so that authors can test it."""
    runtime = FakeRuntime()
    handler = Apart()
    run = await run_handler(handler, {}, turns=["42"], runtime=runtime)
    assert run.grade.reward == 1.0
    assert handler.graded[0][1] == {"/work/diff": b"+ right"}
    assert (runtime.starts, runtime.live) == (2, {})


@pytest.mark.slow
@pytest.mark.parametrize("warm", [None, WarmRules()])
def test_a_cancel_at_every_step(warm: WarmRules | None) -> None:
    """Wherever the job is cancelled: one end, no sandbox of it, and no grade unless it was graded."""
    byte_renderer()

    async def scenario(victim: trio.CancelScope) -> None:
        async with room(warm=warm) as here:
            handler = Apart()
            apart(here, handler)
            with victim:
                await here.submit("a", handler="apart", agent={"tools": []})
                await trio.sleep(100.0)
            while not here.supervisor.is_idle:
                # On its way to the disk it is not there for anybody yet.
                with suppress(NotFound):
                    await here.supervisor.cancel("a", "tests", "swept")
                    record = await here.supervisor.wait_done("a", "tests")
                    assert kind_of(record) in (OutcomeKind.CANCELLED, OutcomeKind.OK)
                    assert (record.reward is None) == (kind_of(record) == OutcomeKind.CANCELLED)
                await trio.sleep(0.01)
            here.assert_clean()

    assert sweep(scenario, seeds=range(1)).runs > 50
