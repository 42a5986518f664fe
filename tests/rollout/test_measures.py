"""Figures that are no reward: measured by the handler, kept with the job, and those of the last attempt alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import trio
import trio.testing

from prorld.domain.outcome import OutcomeKind
from prorld.errors import GraderError, HandlerError, SandboxError
from prorld.handlers import Grade, JobContext, RunResult
from prorld.handlers.measures import METRICS_MAX, put_measure
from prorld.testing.fake_backend import FakeBackend
from prorld.testing.handlers import FakeHandler, FakeInstance
from prorld.testing.jobs import run_handler
from prorld.testing.scripted_engine.script import Script
from prorld.wire.looks import ReevaluateJob
from tests.http.live import live_world
from tests.rollout.support import Room, room


class Measuring(FakeHandler):
    """Measures in every stage; its first attempt fails where the test says so."""

    name = "measuring"
    data_sources: ClassVar[tuple[str, ...]] = ()
    eval_s_min: ClassVar[float] = 1.0

    def __init__(self, *, fails: Exception | None = None, attempts: int = 1) -> None:
        super().__init__()
        self.fails = fails
        self.attempts = attempts
        self.during: list[dict[str, float]] = []
        self.here: Room | None = None

    async def init(self, job: JobContext[FakeInstance]) -> None:
        job.measure("attempt", job.attempt)
        job.measure(f"only.{job.attempt}", 1)

    async def evaluate(self, job: JobContext[FakeInstance], result: RunResult) -> Grade:
        job.measure("files", 2.5)
        job.measure("files", 3)
        if self.here is not None:
            self.during.append((await self.here.supervisor.get("a", "tests")).metrics)
        if self.fails is not None and job.attempt <= self.attempts:
            raise self.fails
        await trio.sleep(job.instance.seconds.get("eval", 5.0))
        return Grade(reward=1.0, parts={"part": 0.5})


def talkative() -> list[FakeBackend]:
    return [FakeBackend(Script(turns=["42"]))]


async def measured(here: Room, handler: Measuring, **fields: Any):
    here.registry.add(handler)
    handler.here = here
    return await here.finish("a", handler="measuring", **fields)


async def test_they_are_in_the_record_and_in_no_reward(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    """As floats, the last of each name; shown when the job is done, wherever its record is, and after a restart."""
    expected = {"attempt": 1.0, "only.1": 1.0, "files": 3.0}
    async with room(state=tmp_path, backends=talkative()) as here:
        handler = Measuring()
        record = await measured(here, handler)
        assert (record.metrics, record.reward, record.reward_parts) == (expected, 1.0, {"part": 0.5})
        assert handler.during == [{}]
    async with room(state=tmp_path, backends=talkative()) as there:
        there.registry.add(Measuring())
        assert await there.supervisor.get("a", "tests") == record
        assert (await there.supervisor.list("tests")).items[0].metrics == expected
        assert (await there.supervisor.trajectory("a", "tests")).job.metrics == expected
        begun = await there.looks.reevaluate("a", "tests", ReevaluateJob())
        await there.looks.wait_reevaluation("a", "tests", begun.n)
        assert (await there.supervisor.get("a", "tests")).metrics == expected


async def test_another_attempt_begins_with_none(autojump_clock: trio.testing.MockClock) -> None:
    """What an attempt measured that counts for nothing is gone with it."""
    async with room(backends=talkative()) as here:
        record = await measured(here, Measuring(fails=SandboxError("lost")), max_attempts=2)
        assert (len(record.attempts), record.metrics) == (2, {"attempt": 2.0, "only.2": 1.0, "files": 3.0})


async def test_they_are_there_without_a_grade(autojump_clock: trio.testing.MockClock) -> None:
    """A grader that fails leaves what was measured before."""
    async with room(backends=talkative()) as here:
        record = await measured(here, Measuring(fails=GraderError("no")), max_attempts=1)
        assert record.outcome is not None
        assert (record.outcome.kind, record.reward) == (OutcomeKind.GRADER_ERROR, None)
        assert record.metrics == {"attempt": 1.0, "only.1": 1.0, "files": 3.0}


async def test_a_grade_that_came_too_soon_is_told(autojump_clock: trio.testing.MockClock) -> None:
    """The handler says how long an honest one takes at least."""
    async with room(backends=talkative()) as here:
        record = await measured(here, Measuring(), instance={"seconds": {"eval": 0.5}})
        assert (record.reward, record.metrics["suspicious.short_eval"]) == (1.0, 1.0)


async def test_a_client_reads_them() -> None:
    """In the record over HTTP, and in the schema of it."""

    class Quick(Measuring):
        eval_s_min: ClassVar[float] = 0.0

    async with live_world(room_options={"backends": talkative()}) as world:
        world.room.registry.add(Quick())
        client = await world.connect()
        job = {"job_id": "a", "handler": "measuring", "instance": {"seconds": {"eval": 0}}}
        await client.call("POST", "/v1/jobs", job)
        record = (await client.call("GET", "/v1/jobs/a?wait_s=10")).json
        assert record["metrics"] == {"attempt": 1.0, "only.1": 1.0, "files": 3.0}
        schemas = (await client.call("GET", "/openapi.json")).json["components"]["schemas"]
        assert schemas["JobRecord"]["properties"]["metrics"]["type"] == "object"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("", 1.0), ("Upper", 1.0), ("a b", 1.0), ("x" * 65, 1.0), ("é", 1.0), (1, 1.0), ("nan", float("nan")),
        ("inf", float("inf")), ("huge", 10**400), ("text", "one"), ("none", None),
    ],
)  # fmt: skip
async def test_what_is_no_figure_is_refused(name: Any, value: Any) -> None:
    """With a name that programs can match on; the daemon and tests alike."""
    metrics: dict[str, float] = {}
    with pytest.raises(HandlerError) as caught:
        put_measure(metrics, name, value)
    assert (caught.value.stable_code, metrics) == ("bad_metric", {})

    class Odd(Measuring):
        async def init(self, job: JobContext[FakeInstance]) -> None:
            job.measure(name, value)

    with pytest.RaisesGroup(HandlerError):
        await run_handler(Odd(), {}, turns=["42"])


def test_their_number_is_bounded() -> None:
    """One more name is refused, and those that are there may change."""
    metrics: dict[str, float] = {}
    for n in range(METRICS_MAX):
        put_measure(metrics, f"m{n}", True)
    with pytest.raises(HandlerError, match="at most 64"):
        put_measure(metrics, "another", 1)
    put_measure(metrics, "m0", 2)
    assert (len(metrics), metrics["m0"], metrics["m1"]) == (METRICS_MAX, 2.0, 1.0)
