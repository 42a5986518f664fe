"""Held requests: how long they wait, and how the end of the room reaches them."""

from __future__ import annotations

import pytest
import trio

from prorld.errors import Overloaded
from prorld.http.holds import Holds


async def test_a_hold_gives_what_it_waited_for(autojump_clock):
    """The value comes through, and nothing is kept."""
    holds = Holds()

    async def answer() -> str:
        await trio.sleep(5)
        return "yes"

    assert await holds.hold(60, answer) == "yes"
    assert await holds.hold(2, answer) is None
    assert len(holds) == 0


async def test_a_hold_lasts_as_long_as_was_asked(autojump_clock):
    """Not shorter, not longer."""
    began = trio.current_time()
    await Holds().hold(7, trio.sleep_forever)
    assert trio.current_time() - began == pytest.approx(7)


async def test_the_end_reaches_every_hold_and_every_later_one(nursery):
    """Closing refuses all that wait, once, and all that come after."""
    holds, refusals = Holds(), []

    async def one() -> None:
        try:
            await holds.hold(1000, trio.sleep_forever)
        except Overloaded as exc:
            refusals.append((exc.stable_code, exc.retry_after_s))

    async with trio.open_nursery() as inner:
        for _ in range(50):
            inner.start_soon(one)
        await trio.testing.wait_all_tasks_blocked()
        assert len(holds) == 50
        holds.close()
    await one()
    assert refusals == [("closing", 2.0)] * 51


async def test_work_has_no_deadline_here_and_ends_with_the_room(nursery, autojump_clock):
    """What bounds itself may take longer than any hold; the end of the room reaches it all the same."""
    holds, refusals = Holds(longest_s=1.0), []

    async def slow() -> str:
        await trio.sleep(100)
        return "done"

    async def one() -> None:
        try:
            await holds.work(slow)
        except Overloaded as exc:
            refusals.append(exc.stable_code)

    assert await holds.work(slow) == "done"
    assert len(holds) == 0
    nursery.start_soon(one)
    await trio.testing.wait_all_tasks_blocked()
    holds.close()
    await trio.testing.wait_all_tasks_blocked()
    assert refusals == ["closing"]
    await one()
    assert refusals == ["closing"] * 2


async def test_an_error_and_a_cancel_pass_through(autojump_clock):
    """A hold changes nothing of how its wait ends."""
    holds = Holds()

    async def broken() -> None:
        await trio.lowlevel.checkpoint()
        raise KeyError("x")

    with pytest.raises(KeyError):
        await holds.hold(9, broken)
    with trio.move_on_after(1) as scope:
        await holds.hold(9, trio.sleep_forever)
    assert scope.cancelled_caught
    assert len(holds) == 0
