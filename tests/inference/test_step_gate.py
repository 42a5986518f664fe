"""Pauses between the steps of calls: who ends, who is held, and when a pause is done."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from prorld.errors import EngineBusy
from prorld.inference.step_gate import StepGate


async def stepping(gate: StepGate, steps: int, ended: list[int]) -> None:
    """A call of steps of a second each; how many it took is its end."""
    async with gate.call("here"):
        for number in range(steps):
            if await gate.must_end():
                ended.append(number)
                return
            await trio.sleep(1)
    ended.append(steps)


async def test_an_abort_ends_calls_between_two_steps(autojump_clock: MockClock) -> None:
    """The pause is done when the step that runs has ended; nobody new comes in until it is over."""
    gate, ended = StepGate(), list[int]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stepping, gate, 10, ended)
        nursery.start_soon(stepping, gate, 10, ended)
        await trio.sleep(2.5)
        await gate.pause("abort")
        assert (ended, trio.current_time()) == ([3, 3], 3)
        with pytest.raises(EngineBusy):
            await stepping(gate, 1, ended)
        await gate.resume()
        await stepping(gate, 1, ended)
    assert ended == [3, 3, 1]


async def test_a_wait_lets_calls_end(autojump_clock: MockClock) -> None:
    """They take all their steps."""
    gate, ended = StepGate(), list[int]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stepping, gate, 4, ended)
        await trio.sleep(0.5)
        await gate.pause("wait")
        assert (ended, trio.current_time()) == ([4], 4)


async def test_a_keep_holds_calls_until_it_is_over(autojump_clock: MockClock) -> None:
    """The pause is done when all are held, and a call that is given up meanwhile is not waited for."""
    gate, ended = StepGate(), list[int]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stepping, gate, 4, ended)
        given_up = trio.CancelScope()
        nursery.start_soon(_under, given_up, gate, ended)
        await trio.sleep(1.5)
        given_up.cancel()
        await gate.pause("keep")
        await trio.sleep(100)
        assert ended == []
        await gate.resume()
    assert ended == [4]
    assert trio.current_time() == pytest.approx(104)


async def test_an_abort_after_a_keep_ends_who_is_held(autojump_clock: MockClock) -> None:
    """The later pause counts."""
    gate, ended = StepGate(), list[int]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stepping, gate, 4, ended)
        await wait_all_tasks_blocked()
        await gate.pause("keep")
        await gate.pause("abort")
        assert ended == [1]


async def _under(scope: trio.CancelScope, gate: StepGate, ended: list[int]) -> None:
    with scope:
        await stepping(gate, 4, ended)
