"""Second looks: they tell the truth about stored rollouts and change nothing that was delivered."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from prorld.domain.outcome import OutcomeKind
from prorld.errors import Conflict, Forgotten, NotFound, Overloaded
from prorld.handlers.base import Grade, RunResult
from prorld.rollout import looks as looks_module
from prorld.rollout.reevaluation import KEPT_PER_JOB_MAX
from prorld.testing.fake_backend import FakeBackend
from prorld.testing.handlers import FakeHandler
from prorld.testing.scripted_engine.script import Latency, Script
from prorld.wire.looks import ReevaluateJob, ReevaluationState
from prorld.wire.ops import StagePatch, StagesPatch
from tests.rollout.support import Room, room


def talkative() -> list[FakeBackend]:
    """An engine that answers at once."""
    return [FakeBackend(Script(turns=["the answer is 42"]))]


async def reevaluated(here: Room, job_id: str, **fields):
    """One reevaluation to its end."""
    begun = await here.looks.reevaluate(job_id, "tests", ReevaluateJob(**fields))
    return await here.looks.wait_reevaluation(job_id, "tests", begun.n)


def regraded(**fields: Any) -> Any:
    """The fake handler's grader, as if these fields of the instance were others."""
    grade = FakeHandler.evaluate

    async def evaluate(self: FakeHandler, job: Any, result: RunResult) -> Grade:
        job._entry.instance = msgspec.structs.replace(job.instance, **fields)
        return await grade(self, job, result)

    return evaluate


@pytest.mark.parametrize("inline", [True, False])
async def test_a_sound_rollout_verifies(inline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inline and in a thread: everything holds, and the counts are those of the record."""
    if not inline:
        monkeypatch.setattr(looks_module, "INLINE_TOKENS_MAX", 0)
    async with room(backends=talkative()) as here:
        record = await here.finish("a")
        said = await here.looks.verify("a", "tests")
        assert (said.ok, said.result, said.violations, said.unverifiable) == (True, "ok", [], [])
        assert (said.branches, said.calls, said.sampled) == (1, 1, record.tokens.sampled)


async def test_what_no_engine_serves_any_more_is_unverifiable(autojump_clock: trio.testing.MockClock) -> None:
    """When the engine is gone, or has moved on, its tokens are named by version and not called ok."""
    async with room(backends=talkative()) as here:
        record = await here.finish("a")
        (info,) = here.pool.list().items
        await here.pool.remove(info.backend_id)
        said = await here.looks.verify("a", "tests")
        assert (said.ok, said.result, said.violations) == (False, "unverifiable", [])
        assert [(gone.version, gone.tokens) for gone in said.unverifiable] == [(0, record.tokens.sampled)]


async def test_a_broken_rollout_is_told(autojump_clock: trio.testing.MockClock) -> None:
    """A flipped mask bit is a violation with a code and a place."""
    async with room(backends=talkative()) as here:
        await here.finish("a")
        branches = (await here.stored("a")).trajectory.branches
        branches[0] = msgspec.structs.replace(branches[0], mask=b"\x01" + branches[0].mask[1:])
        said = await here.looks.verify("a", "tests")
        assert (said.ok, said.result) == (False, "broken")
        assert {"mask_source", "mask_sum"} <= {violation.code for violation in said.violations}
        assert said.violations[0].branch == 0


async def test_looks_need_an_ended_job_of_the_caller(autojump_clock: trio.testing.MockClock) -> None:
    """A job that runs is a conflict, another tenant's is not there, one that never came to EVAL has no score."""
    slow = [FakeBackend(Script(latency=Latency(fixed_s=100.0)))]
    async with room(backends=slow) as here:
        await here.submit("a")
        for act in (here.looks.verify("a", "tests"), here.looks.reevaluate("a", "tests", ReevaluateJob())):
            with pytest.raises(Conflict) as caught:
                await act
            assert caught.value.stable_code == "not_done"
        with pytest.raises(NotFound):
            await here.looks.verify("a", "others")
        await here.supervisor.cancel("a", "tests", "enough")
        await here.supervisor.wait_done("a", "tests")
        with pytest.raises(Conflict) as caught:
            await here.looks.reevaluate("a", "tests", ReevaluateJob())
        assert caught.value.stable_code == "nothing_to_score"


async def test_a_reevaluation_is_a_record_of_its_own(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grader of today gives another reward; record, trajectory and events stay as they were, to the byte."""
    async with room(backends=talkative()) as here:
        await here.finish("a", {"expected": "42"})
        before = msgspec.json.encode(
            [
                await here.supervisor.trajectory("a", "tests"),
                await here.supervisor.events("a", "tests"),
                here.supervisor.feed.last,
            ]
        )
        monkeypatch.setattr(FakeHandler, "evaluate", regraded(reward=0.25, seconds={"eval": 7.0}))
        found = await reevaluated(here, "a", reason="the grader was repaired")
        assert (found.n, found.state, found.reward, found.reason) == (
            1, ReevaluationState.DONE, 0.25, "the grader was repaired",
        )  # fmt: skip
        assert found.outcome is not None
        assert (found.outcome.kind, found.eval_s) == (OutcomeKind.OK, 7.0)
        after = [
            await here.supervisor.trajectory("a", "tests"),
            await here.supervisor.events("a", "tests"),
            here.supervisor.feed.last,
        ]
        assert msgspec.json.encode(after) == before
        assert [r.n for r in (await here.looks.reevaluations("a", "tests")).items] == [1]
        here.assert_clean()


async def test_a_grader_that_fails_again_has_an_outcome_and_no_reward(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure and a time-out are told as such; neither is a zero."""
    async with room(backends=talkative()) as here:
        await here.finish("a")
        for fail, kind in (("grader", OutcomeKind.GRADER_ERROR), ("bug", OutcomeKind.GRADER_ERROR),
                           ("hang", OutcomeKind.TIMEOUT)):  # fmt: skip
            with monkeypatch.context() as patch:
                patch.setattr(FakeHandler, "evaluate", regraded(fail={"eval": fail}))
                found = await reevaluated(here, "a", eval_s=3.0)
            assert found.outcome is not None
            assert (found.outcome.kind, found.reward) == (kind, None)
        assert (await here.supervisor.get("a", "tests")).reward == 1.0


async def test_reevaluations_wait_at_the_gate_and_can_be_cancelled(autojump_clock: trio.testing.MockClock) -> None:
    """They take places of EVAL; one at a time per job; the end of one leaves nothing behind."""
    async with room(backends=talkative(), workers=(4, 4, 1)) as here:
        await here.finish("a")
        here.supervisor.set_stages(StagesPatch(eval=StagePatch(workers=0)))
        begun = await here.looks.reevaluate("a", "tests", ReevaluateJob())
        await trio.testing.wait_all_tasks_blocked()
        assert here.supervisor.stages().eval.waiting == 1
        assert (await here.looks.reevaluation("a", "tests", begun.n)).state is ReevaluationState.QUEUED
        with pytest.raises(Conflict) as caught:
            await here.looks.reevaluate("a", "tests", ReevaluateJob())
        assert caught.value.stable_code == "reevaluating"
        await here.looks.cancel_reevaluation("a", "tests", begun.n, "never mind")
        found = await here.looks.wait_reevaluation("a", "tests", begun.n)
        assert found.outcome is not None
        assert (found.outcome.kind, found.outcome.message) == (OutcomeKind.CANCELLED, "never mind")
        here.assert_clean()
        assert (await here.looks.cancel_reevaluation("a", "tests", begun.n, "again")).outcome == found.outcome


async def test_old_reevaluations_are_forgotten(autojump_clock: trio.testing.MockClock) -> None:
    """So many are kept of a job; older numbers are gone, higher ones were never there, and all go with the job."""
    async with room(backends=talkative()) as here:
        await here.finish("a")
        for _ in range(KEPT_PER_JOB_MAX + 1):
            await reevaluated(here, "a")
        with pytest.raises(Forgotten):
            await here.looks.reevaluation("a", "tests", 1)
        with pytest.raises(NotFound):
            await here.looks.reevaluation("a", "tests", KEPT_PER_JOB_MAX + 2)
        await here.forget("a")
        with pytest.raises(Forgotten):
            await here.looks.reevaluations("a", "tests")


async def test_what_was_graded_in_its_sandbox_is_not_graded_again(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sandbox is gone, and a grade without it would be another one. Draining refuses, too."""
    async with room(backends=talkative()) as here:
        await here.finish("a")
        monkeypatch.setattr(FakeHandler, "grades_in_sandbox", True)
        with pytest.raises(Conflict) as caught:
            await here.looks.reevaluate("a", "tests", ReevaluateJob())
        assert caught.value.stable_code == "sandbox_gone"
        monkeypatch.setattr(FakeHandler, "grades_in_sandbox", False)
        here.supervisor.drain()
        with pytest.raises(Overloaded):
            await here.looks.reevaluate("a", "tests", ReevaluateJob())
