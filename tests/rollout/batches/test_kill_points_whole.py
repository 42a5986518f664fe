"""A kill at every commit of real jobs, alone and in groups: what was told stays, and each of them has one end."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from prorld.domain.job import JobState
from prorld.errors import RequestError
from prorld.rollout.batches.service import Batches
from prorld.wire.jobs import SubmitJob
from tests.rollout.batches.test_kill_points import Dying
from tests.rollout.batches.test_on_supervisor import batches, over, submit
from tests.rollout.support import Room

pytestmark = pytest.mark.slow

PROMPTS: list[dict[str, Any]] = [
    {"prompt": f"q{n}", "sandbox": n == 1, "seconds": {"run": float(3 * n)}} for n in range(4)
]
SINGLES = {"plain": {}, "retried": {"fail": {"init": "sandbox"}}, "cancelled": {"seconds": {"run": 500.0}}}


async def tell(here: Room, made: Batches, told: dict[str, Any]) -> None:
    """Hand everything in, as often as it takes, and wait for all of it."""
    for name, instance in SINGLES.items():
        body = {"job_id": name, "handler": "fake", "instance": instance}
        await here.supervisor.submit(msgspec.convert(body, SubmitJob), "tests", digest=name)
        told.setdefault("accepted", set()).add(name)
    await submit(made, PROMPTS, target_groups=3, max_running_groups=2, leftovers="drain")
    told["accepted"].add("b")
    await trio.sleep(4)
    await here.supervisor.cancel("cancelled", "tests", "enough")
    await over(made)
    for name in SINGLES:
        told[name] = await here.supervisor.wait_done(name, "tests")


async def seen(here: Room, made: Batches, told: dict[str, Any]) -> dict[str, Any]:
    """What a client could read now of what was told to be accepted."""
    found: dict[str, Any] = {}
    for name in told.get("accepted", set()):
        if name == "b":
            found["b"] = list(await made.events("b", "tests", after=0, limit=1000))
            continue
        record = await here.supervisor.get(name, "tests")
        found[name] = record if record.state is JobState.DONE else None
        found[f"{name} events"] = list(await here.supervisor.events(name, "tests"))
        found[f"{name} attempts"] = record.attempts
    return found


def check(before: dict[str, Any], after: dict[str, Any]) -> None:
    for name, was in before.items():
        if isinstance(was, list):
            assert after[name][: len(was)] == was, name
        elif was is not None:
            assert after[name] == was, name
    for name in SINGLES:
        events = after[f"{name} events"]
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        assert [event.event for event in events].count("job.done") == 1
        assert [attempt.n for attempt in after[name].attempts] == list(range(1, len(after[name].attempts) + 1))
    events = after["b"]
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    ends = {str(event.group_id): event.event for event in events if event.event.startswith("group.")}
    assert len(ends) == len(PROMPTS)
    assert list(ends.values()).count("group.done") >= 3
    kinds = {name: after[name].outcome.kind.value for name in SINGLES}
    assert kinds["plain"] == "ok"
    assert kinds["retried"] == "env_error"


async def calls_of_a_whole_story(place: Path) -> int:
    async with batches(state=place) as (here, made):
        lane = Dying(10**9, is_made=False)
        here.journal._lane = lane
        told: dict[str, Any] = {}
        await tell(here, made, told)
        check({}, await seen(here, made, told))
        return 10**9 - lane._left


@pytest.mark.parametrize("is_made", [False, True])
async def test_a_kill_at_every_commit(tmp_path: Path, autojump_clock, is_made: bool) -> None:
    calls = await calls_of_a_whole_story(tmp_path)
    for n in range(calls):
        place = tmp_path / str(n)
        place.mkdir()
        told: dict[str, Any] = {}
        async with batches(state=place) as (here, made):
            lane = Dying(n, is_made=is_made)
            here.journal._lane = lane
            async with trio.open_nursery() as nursery:
                nursery.start_soon(attempted, here, made, told)
                await lane.is_dead.wait()
                before = await seen(here, made, told)
                nursery.cancel_scope.cancel()
        async with batches(state=place) as (here, made):
            with trio.fail_after(100_000):
                await tell(here, made, told)
            after = await seen(here, made, told)
            check(before, after)
            outcome = after["cancelled"].outcome
            assert (outcome.kind.value, "enough" in outcome.message) == ("cancelled", True)


async def attempted(here: Room, made: Batches, told: dict[str, Any]) -> None:
    """Until the disk dies; the daemon's own end answers whoever waits."""
    with suppress(RequestError):
        await tell(here, made, told)
