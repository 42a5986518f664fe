"""The gate under trio: bounded, fair, and without a leak wherever a visitor is cancelled."""

from __future__ import annotations

from functools import partial

import pytest
import trio
import trio.testing

from prorld.kit.gate import Gate, GateStatistics
from prorld.testing.sweep import sweep


async def visit(gate: Gate, entered: list[str], who: str, *, priority: int = 0, tenant: str = "default") -> None:
    """Go in, note it, stay for a second."""
    async with gate.enter(priority=priority, tenant=tenant):
        entered.append(who)
        assert gate.statistics().active <= gate.statistics().workers
        await trio.sleep(1)


async def test_priority_first_then_fair_then_in_order(autojump_clock: trio.testing.MockClock):
    """A higher priority overtakes; tenants of one priority alternate; inside a tenant the order is that of asking."""
    gate = Gate("g", 1)
    entered: list[str] = []
    async with trio.open_nursery() as nursery:
        for who, priority, tenant in (
            ("a1", 0, "a"),
            ("a2", 0, "a"),
            ("a3", 0, "a"),
            ("b1", 0, "b"),
            ("b2", 0, "b"),
            ("c1", 5, "a"),
        ):
            nursery.start_soon(partial(visit, gate, entered, who, priority=priority, tenant=tenant))
            await trio.testing.wait_all_tasks_blocked()
    assert entered == ["a1", "c1", "b1", "a2", "b2", "a3"]


async def test_statistics(autojump_clock: trio.testing.MockClock):
    """Workers, who is in, who waits, and the seconds that those who entered have waited."""
    gate = Gate("g", 2)
    async with trio.open_nursery() as nursery:
        for who in "abc":
            nursery.start_soon(visit, gate, [], who)
        await trio.testing.wait_all_tasks_blocked()
        assert gate.statistics() == GateStatistics(workers=2, active=2, waiting=1, entered_total=2, waited_s_total=0.0)
    seen = gate.statistics()
    assert (seen.active, seen.waiting, seen.entered_total) == (0, 0, 3)
    assert seen.waited_s_total == pytest.approx(1.0)


async def test_zero_pauses_and_growing_opens(autojump_clock: trio.testing.MockClock):
    """A gate of zero lets nobody in; set_workers takes effect on those who wait already."""
    gate = Gate("g", 0)
    entered: list[str] = []
    async with trio.open_nursery() as nursery:
        for who in "abc":
            nursery.start_soon(visit, gate, entered, who)
        await trio.sleep(3600)
        assert entered == []
        gate.set_workers(2)
        await trio.testing.wait_all_tasks_blocked()
        assert len(entered) == 2
        gate.set_workers(0)
        await trio.sleep(3600)
        assert (gate.statistics().active, len(entered)) == (0, 2)
        gate.set_workers(1)


async def test_a_place_is_given_back_when_the_visitor_fails():
    """An error inside frees the place and comes out as it is."""
    gate = Gate("g", 1)
    with pytest.raises(KeyError):
        async with gate.enter():
            raise KeyError
    async with gate.enter():
        assert gate.statistics().active == 1


async def test_a_visitor_that_gives_up_frees_its_place_in_the_line(autojump_clock: trio.testing.MockClock):
    """A cancelled waiter is forgotten, and the next one gets in instead."""
    gate = Gate("g", 1)
    entered: list[str] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(visit, gate, entered, "first")
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(0.5):
            await visit(gate, entered, "gives up")
        assert gate.statistics().waiting == 0
        nursery.start_soon(visit, gate, entered, "second")
    assert entered == ["first", "second"]


async def test_cancelled_between_the_decision_and_the_wake_up():
    """A waiter that is let in and cancelled in the same step gives its place back."""
    gate = Gate("g", 0)
    entered: list[str] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(visit, gate, entered, "a")
        await trio.testing.wait_all_tasks_blocked()
        gate.set_workers(1)
        assert gate.statistics().active == 1
        nursery.cancel_scope.cancel()
    assert gate.statistics().active == 0
    async with gate.enter():
        pass


def test_sweep_no_cancel_leaks_a_place():
    """Wherever visitors are cancelled, the others all get in, and the gate is empty and full of room at the end."""

    async def scenario(victim: trio.CancelScope) -> None:
        gate = Gate("g", 1)
        entered: list[str] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(visit, gate, entered, "kept 1")
            with victim:
                async with trio.open_nursery() as victims:
                    victims.start_soon(visit, gate, entered, "victim 1")
                    victims.start_soon(visit, gate, entered, "victim 2")
                    await trio.sleep(0.5)
                    gate.set_workers(2)
            with trio.fail_after(60):
                await visit(gate, entered, "kept 2")
        assert {"kept 1", "kept 2"} <= set(entered)
        seen = gate.statistics()
        assert (seen.active, seen.waiting) == (0, 0)
        assert not gate._opened
        gate.set_workers(1)
        with trio.fail_after(1):
            async with gate.enter():
                pass

    report = sweep(scenario, seeds=range(8))
    assert report.runs > 100, report


async def test_thousands_wait_and_all_get_in(autojump_clock: trio.testing.MockClock):
    """2,000 waiters of 40 tenants go through 16 places, none is lost, and no tenant is left behind."""
    gate = Gate("g", 0)
    entered: list[str] = []
    async with trio.open_nursery() as nursery:
        for number in range(2000):
            tenant = f"t{number % 40}"
            nursery.start_soon(partial(visit, gate, entered, tenant, tenant=tenant))
        await trio.testing.wait_all_tasks_blocked()
        gate.set_workers(16)
        await trio.sleep(10.5)
        # A turn comes after at most 39 others and 16 begin while it lasts, so of 176 each tenant has 3 at least.
        assert len(entered) == 176
        assert min(entered.count(f"t{number}") for number in range(40)) >= 3
    assert len(entered) == 2000
