"""A kill at every commit of a story of batches: before it is on the disk, and after it, before anybody hears.

Whatever the moment: what was shown stays, each group has one end, and nothing hangs.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import trio

from prorld.errors import Conflict, Overloaded
from prorld.store.batch_lookups import all_rows
from prorld.testing.inline_lane import InlineLane
from tests.rollout.batches.support import FakePolicies, Life, life, prompts, settled

T = TypeVar("T")

COMMITS_MAX = 400
# How often a disk fails that recovers.
FAILS = 3


class Story(msgspec.Struct, frozen=True):
    """What trainers do. ``groups`` are all that there will be; ``appends`` are of the first batch, a stream then."""

    batches: list[dict[str, Any]]
    groups: list[str]
    appends: list[int] = []


STORIES = {
    "carried from batch to batch": Story(
        [
            {"batch_id": "b", "instances": prompts(6), "target_groups": 2, "max_running_groups": 3},
            {"batch_id": "c", "instances": prompts(2), "target_groups": 2, "max_running_groups": 3, "carry_from": "b"},
            {"batch_id": "d", "instances": prompts(1), "target_groups": 20, "carry_from": "c"},
        ],
        [*(f"b:{n}" for n in range(6)), "c:0", "c:1", "d:0"],
    ),
    "stragglers are cut": Story(
        [
            {
                "batch_id": "b", "instances": prompts(5), "target_groups": 3, "samples_per_group": 3,
                "max_running_groups": 2, "leftovers": "cancel", "quorum": {"min_usable": 1},
                "informative": {"rule": "all"},
            }
        ],
        [f"b:{n}" for n in range(5)],
    ),
    "a stream that is fed and acknowledged": Story(
        [{"batch_id": "b", "max_running_groups": 2, "max_ready_groups": 1, "informative": {"rule": "all"}}],
        [f"b:{n}" for n in range(5)],
        [2, 3],
    ),
}  # fmt: skip


class Dying:
    """A disk that dies at its n-th call: that call is made or not, and nobody ever hears of it."""

    def __init__(self, n: int, *, is_made: bool) -> None:
        self._left = n
        self._is_made = is_made
        self.is_dead = trio.Event()

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        self._left -= 1
        if self._left >= 0:
            return await InlineLane().run(fn, *args)
        if not self.is_dead.is_set():
            self.is_dead.set()
            if self._is_made:
                fn(*args)
        await trio.sleep_forever()
        raise AssertionError


class Failing:
    """A disk that fails a few times from its n-th call on: the first of those calls is made or not."""

    def __init__(self, n: int, *, is_made: bool) -> None:
        self._left = n
        self._is_made = is_made

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        self._left -= 1
        if self._left >= 0 or self._left < -FAILS:
            return await InlineLane().run(fn, *args)
        if self._left == -1 and self._is_made:
            fn(*args)
        raise OSError(5, "Input/output error")


async def patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """As clients do: what is refused for now is asked for again."""
    with trio.fail_after(1000):
        while True:
            try:
                return await ask()
            except Overloaded as refused:
                await trio.sleep(refused.retry_after_s)


def reward(job_id: str) -> float:
    """The same in every life."""
    return float(hashlib.sha256(job_id.encode()).digest()[0] % 2)


async def tell(one: Life, story: Story, told: dict[str, int]) -> None:
    """The story, from wherever it is, to its end. ``told`` is what was answered of acknowledgements."""
    for body in story.batches:
        await patiently(partial(one.submitted, **body))
    offset = 0
    for count in story.appends:
        offset += count
        # Refused where the answer to the last one was lost, and all of it has come to its end.
        with suppress(Conflict):
            append = partial(one.append, offset - count, count, last=offset == len(story.groups))
            assert (await patiently(append)).next_offset >= offset
    while True:
        await settled()
        if one.jobs.live:
            _, job_id = next(iter(one.jobs.live))
            await one.jobs.finish(job_id, reward=reward(job_id))
        elif not (story.appends and await acknowledged(one, told)):
            if not one.floor.actors and not one.floor.leftovers:
                return
            await trio.sleep(1)


async def acknowledged(one: Life, told: dict[str, int]) -> bool:
    """The oldest accepted group is, where there is one."""
    ready = (await one.batches.groups("b", "default", after=told.get("b", 0), limit=1)).items
    if ready:
        told["b"] = (await patiently(partial(one.ack, ready[0].seq))).through
    return bool(ready)


async def seen(one: Life, story: Story) -> dict[str, list[Any]]:
    """All events that a client could read now."""
    found: dict[str, list[Any]] = {}
    names = {row.batch_id for row in (await one.batches.list("default")).items}
    for name in [str(body["batch_id"]) for body in story.batches]:
        if name in names:
            found[name] = list(await one.batches.events(name, "default", after=0, limit=1000))
    return found


async def check(one: Life, story: Story, before: dict[str, list[Any]], acked: dict[str, int]) -> None:
    """The laws."""
    after = await seen(one, story)
    for batch_id, events in before.items():
        assert after[batch_id][: len(events)] == events, batch_id
    ends: Counter[str] = Counter()
    for batch_id, events in after.items():
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        assert [event.event for event in events].count("batch.end") == 1
        assert events[-1].event == "batch.end"
        told = [str(event.group_id) for event in events if event.event.startswith("group.")]
        assert len(told) == len(set(told)), batch_id
        indexes = [event.index for event in events if event.event.startswith("group.")]
        assert sorted(indexes) == list(range(len(indexes))), batch_id
        ends.update(str(e.group_id) for e in events if e.event.startswith("group.") and e.event != "group.carried")
        assert (await one.batches.get(batch_id, "default")).acknowledged >= acked.get(batch_id, 0)
    # Each group has one end of its own; the last batch wants more than there is, so nothing is left over.
    assert ends == Counter(story.groups)
    for serial in range(1, len(story.batches) + 1):
        rows = await one.reader.ask(all_rows, serial)
        assert all(row.end is not None for row in rows), rows
    assert len(one.room.members) == 0
    assert not one.floor.leftovers


async def calls_of_a_whole_story(path: Path, story: Story) -> int:
    async with life(path) as one:
        lane = Dying(10**9, is_made=False)
        one.journal._lane = lane
        told: dict[str, int] = {}
        await tell(one, story, told)
        await check(one, story, {}, told)
        return 10**9 - lane._left


@pytest.mark.parametrize("is_made", [False, True])
@pytest.mark.parametrize("name", STORIES)
async def test_a_kill_at_every_commit(tmp_path: Path, autojump_clock, name: str, is_made: bool) -> None:
    story = STORIES[name]
    calls = await calls_of_a_whole_story(tmp_path, story)
    assert 10 < calls < COMMITS_MAX
    for n in range(calls):
        place = tmp_path / str(n)
        place.mkdir()
        policies = FakePolicies()
        before: dict[str, list[Any]] = {}
        told: dict[str, int] = {}
        async with life(place, policies=policies) as one, trio.open_nursery() as nursery:
            lane = Dying(n, is_made=is_made)
            one.journal._lane = lane
            nursery.start_soon(tell, one, story, told)
            await lane.is_dead.wait()
            before = await seen(one, story)
            nursery.cancel_scope.cancel()
        async with life(place, policies=policies) as one:
            with trio.fail_after(100_000):
                await tell(one, story, told)
                await check(one, story, before, told)


@pytest.mark.slow
@pytest.mark.parametrize("is_made", [False, True])
@pytest.mark.parametrize("name", STORIES)
async def test_a_disk_that_fails_for_a_while_at_every_commit(
    tmp_path: Path, autojump_clock, name: str, is_made: bool
) -> None:
    """In one life, and as the next one finds it: what was in doubt is there once, or not at all."""
    story = STORIES[name]
    calls = await calls_of_a_whole_story(tmp_path, story)
    for n in range(calls):
        place = tmp_path / str(n)
        place.mkdir()
        told: dict[str, int] = {}
        async with life(place) as one:
            one.journal._lane = Failing(n, is_made=is_made)
            with trio.fail_after(100_000):
                await tell(one, story, told)
                await check(one, story, {}, told)
                before = await seen(one, story)
        async with life(place) as one:
            await check(one, story, before, told)
