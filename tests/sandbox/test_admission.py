"""How many sandboxes may start at once: bounded, fair, and never a place lost to a cancel."""

from __future__ import annotations

import random
from functools import partial

import pytest
import trio
import trio.testing

from prorld.sandbox.admission import Admission, default_starts


async def start(admission: Admission, began: list[str], what: str, *, urgent: bool = True) -> None:
    """One start that takes a second."""
    async with admission.enter(what, urgent=urgent):
        began.append(what)
        await trio.sleep(1.0)


async def test_so_many_at_once(autojump_clock: trio.testing.MockClock) -> None:
    """Ten starts of a second each with three places take four."""
    admission, began = Admission(3), list[str]()
    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(start, admission, began, "x")
    assert trio.current_time() == pytest.approx(4.0)
    seen = admission.statistics()
    assert (seen.peak, seen.admitted_total, seen.starting, seen.waiting, len(began)) == (3, 10, 0, 0, 10)


async def test_the_waited_for_go_first_and_take_turns(autojump_clock: trio.testing.MockClock) -> None:
    """One that a job waits for passes those made in advance, and one image does not wait behind a crowd of another."""
    admission, began = Admission(1), list[str]()
    async with trio.open_nursery() as nursery:
        for what, urgent in (("first", True), *[("refill", False)] * 3, *[("crowd", True)] * 3, ("single", True)):
            nursery.start_soon(partial(start, admission, began, what, urgent=urgent))
            await trio.testing.wait_all_tasks_blocked()
    assert set(began[1:3]) == {"crowd", "single"}
    assert began[-3:] == ["refill"] * 3


async def test_a_place_can_be_left_early(autojump_clock: trio.testing.MockClock) -> None:
    """What has come up holds no place, however long it lives, and giving it back twice gives one back."""
    admission, began = Admission(1), list[str]()

    async def long() -> None:
        async with admission.enter("x", urgent=True) as leave:
            leave()
            leave()
            await trio.sleep(100.0)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(long)
        nursery.start_soon(long)
        await trio.testing.wait_all_tasks_blocked()
        await start(admission, began, "y")
        assert trio.current_time() == pytest.approx(1.0)
        assert admission.statistics().peak == 1


@pytest.mark.parametrize("seed", range(20))
async def test_cancels_lose_no_place(seed, autojump_clock: trio.testing.MockClock) -> None:
    """Starts that are given up at any moment: the bound holds, and in the end all places are free."""
    draw = random.Random(seed)
    admission, began = Admission(2), list[str]()

    async def impatient() -> None:
        with trio.move_on_after(draw.random() * 5):
            await start(admission, began, draw.choice("abc"), urgent=draw.random() < 0.5)

    async with trio.open_nursery() as nursery:
        for _ in range(30):
            nursery.start_soon(impatient)
            await trio.sleep(draw.random() / 4)
    seen = admission.statistics()
    assert (seen.peak, seen.starting, seen.waiting) == (2, 0, 0)
    await start(admission, began, "last")


def test_the_default_is_of_this_machine() -> None:
    """Some at least, and more with more cores."""
    assert default_starts() >= 4
