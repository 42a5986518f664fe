"""The sweep finds what it is for, and what it needs of trio is still there."""

from __future__ import annotations

import random

import pytest
import trio

from prorld.testing.sweep import DETERMINISTIC, GENERATOR, seeded_schedule, sweep


def test_trio_still_has_the_two_private_names():
    """The names that make a schedule repeatable exist and are what they were."""
    assert isinstance(getattr(trio._core._run, GENERATOR), random.Random)
    assert isinstance(getattr(trio._core._run, DETERMINISTIC), bool)


def order(seed: int) -> str:
    """The order in which six tasks take their second step."""
    seen: list[str] = []

    async def note(letter: str) -> None:
        await trio.lowlevel.checkpoint()
        seen.append(letter)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for letter in "abcdef":
                nursery.start_soon(note, letter)

    with seeded_schedule(seed):
        trio.run(main)
    return "".join(seen)


def test_a_seed_stands_for_one_schedule():
    """The same seed gives the same order, and several seeds give several orders."""
    assert [order(seed) for seed in range(8)] == [order(seed) for seed in range(8)]
    assert len({order(seed) for seed in range(8)}) > 4


def test_a_seed_leaves_trio_as_it_was():
    """After the block, trio's generator goes on from where it stood, even when the block raised."""
    generator = getattr(trio._core._run, GENERATOR)
    before = generator.getstate()
    deterministic = getattr(trio._core._run, DETERMINISTIC)
    with pytest.raises(ValueError, match="x"), seeded_schedule(1):
        raise ValueError("x")
    assert generator.getstate() == before
    assert getattr(trio._core._run, DETERMINISTIC) is deterministic


def test_every_step_is_cancelled_once():
    """A scenario of n steps is run n times with a cancel and once without, for each seed, and the clock is virtual."""
    ended: list[bool] = []

    async def scenario(victim: trio.CancelScope) -> None:
        with victim:
            await trio.sleep(3600)
            await trio.sleep(3600)
        ended.append(not victim.cancelled_caught)

    report = sweep(scenario, seeds=range(2))
    assert report.runs == len(ended) == 2 * (report.steps_max + 1)
    assert True in ended
    assert False in ended


def test_a_leak_is_found_and_its_step_is_named():
    """Clean-up that awaits without a shield leaks at some step; the failure says at which, under which seed."""

    async def scenario(victim: trio.CancelScope) -> None:
        live = False
        with victim:
            await trio.sleep(1)
            live = True
            try:
                await trio.sleep(1)
            finally:
                await trio.lowlevel.checkpoint()  # noqa: ASYNC102  (the mistake that is to be found)
                live = False
        assert not live

    with pytest.raises(AssertionError) as caught:
        sweep(scenario)
    (note,) = caught.value.__notes__
    seed, step = note.removeprefix("sweep: seed ").split(", cancelled at step ")
    assert (seed, int(step) > 1) == ("0", True)


def test_a_scenario_without_end_is_refused():
    """A scenario that takes more steps than allowed fails, and does not run for ever."""

    async def scenario(victim: trio.CancelScope) -> None:
        for _ in range(50):
            await trio.sleep(1)

    with pytest.raises(AssertionError, match="more than 10 steps"):
        sweep(scenario, steps_max=10)
