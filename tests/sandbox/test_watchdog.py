"""The rounds that are made past all sandboxes, without sandboxes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import pytest
import trio
from trio.testing import MockClock

from prorld.errors import SandboxError
from prorld.kit.lanes import Lane
from prorld.sandbox.watchdog import LOOKS_AT_ONCE, Post, Rounds, over_memory

LIMIT = 100

T = TypeVar("T")


async def test_somebody_always_goes(autojump_clock: MockClock) -> None:
    """One that lives longer than its neighbours is looked at once a second, whoever of them ends when."""
    rounds, looks = Rounds(), list[float]()

    def look() -> int:
        looks.append(trio.current_time())
        return 0

    async def neighbour(start: float) -> None:
        await trio.sleep(start)
        with trio.move_on_after(0.7):
            await rounds.go()

    async with trio.open_nursery() as nursery:
        began = trio.current_time()
        with rounds.posted(Post(look, LIMIT)):
            for number in range(40):
                nursery.start_soon(neighbour, number / 2)
            await trio.sleep(20.2)
    # The first comes at once: nobody has looked before.
    assert [round(at - began) for at in looks] == list(range(21))


async def test_all_are_passed(autojump_clock: MockClock) -> None:
    """More than are looked at without a pause; one that has left in that pause is not asked again."""
    rounds, seen = Rounds(), list[int]()

    def look(number: int) -> int:
        seen.append(number)
        return 0

    async def post(number: int) -> None:
        with rounds.posted(Post(partial(look, number), LIMIT)):
            await trio.sleep(5)

    count = 2 * LOOKS_AT_ONCE + 3
    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(post, number)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(rounds.go)
        await trio.sleep(0.5)
        assert sorted(seen) == list(range(count))
        await trio.sleep(6)
        done = len(seen)
        await trio.sleep(3)
        assert len(seen) == done
        nursery.cancel_scope.cancel()


async def test_a_closer_look_that_takes_long_is_not_followed_by_another_at_once(autojump_clock: MockClock) -> None:
    """What the rounds said meanwhile is answered by it: one sandbox must not keep the lane for itself."""
    begun = list[float]()

    class Slow(Lane):
        async def run(self, job: Callable[[], T]) -> T:  # type: ignore[override]
            begun.append(trio.current_time())
            await trio.sleep(2.5)
            return job()

    rounds = Rounds()
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rounds.go)
        with trio.move_on_after(9.5):
            await over_memory(Slow("closer", 1), rounds, lambda: None, lambda: lambda: 0, LIMIT)
        nursery.cancel_scope.cancel()
    assert [round(at - began, 3) for at in begun] == [0, 3, 6, 9]


async def test_a_closer_look_decides() -> None:
    """What looks like too much is counted exactly, as often as it does."""
    rounds, exact = Rounds(), [LIMIT, LIMIT + 1]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rounds.go)
        with trio.fail_after(10):
            failure = await over_memory(
                Lane("closer", 1), rounds, lambda: LIMIT + 1, lambda: partial(exact.pop, 0), LIMIT
            )
        nursery.cancel_scope.cancel()
    assert isinstance(failure, SandboxError)
    assert failure.stable_code == "sandbox_out_of_memory"
    assert exact == []


async def test_too_many_to_look_at_is_no_answer() -> None:
    """Nor is it a reason to end a sandbox."""
    rounds = Rounds()
    exact = [0, LIMIT + 1]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rounds.go)
        with trio.fail_after(10):
            await over_memory(Lane("closer", 1), rounds, lambda: None, lambda: partial(exact.pop, 0), LIMIT)
        nursery.cancel_scope.cancel()
    assert exact == []


async def test_a_fault_is_one_sandbox_s(autojump_clock: MockClock) -> None:
    """A look that fails ends the wait of its own sandbox, and the rounds go on."""
    rounds, looks = Rounds(), list[float]()

    def fails() -> int:
        raise ZeroDivisionError("a fault")

    def look() -> int:
        looks.append(trio.current_time())
        return 0

    async with trio.open_nursery() as nursery:
        nursery.start_soon(rounds.go)
        with rounds.posted(Post(look, LIMIT)):
            with pytest.raises(ZeroDivisionError):
                await over_memory(Lane("closer", 1), rounds, fails, lambda: lambda: 0, LIMIT)
            looks.clear()
            await trio.sleep(3.5)
            assert len(looks) == 3
        nursery.cancel_scope.cancel()
