"""Who is next: the rule, over any history."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prorld.kit.turns import Turn, Turns

TENANTS = st.sampled_from("abcd")
PRIORITIES = st.integers(min_value=-1, max_value=1)


def admit_all(turns: Turns) -> list[Turn]:
    """Everybody who gets in now, in order."""
    admitted: list[Turn] = []
    while (turn := turns.admit()) is not None:
        admitted.append(turn)
    return admitted


class Walk(RuleBasedStateMachine):
    """Any history, against the rule said naively: the least of a list, looked for from scratch each time."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = Turns(2)
        self.line: list[Turn] = []
        self.inside: list[Turn] = []
        self.clock = 0
        self.since: dict[tuple[str, int], int] = {}

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def active(self, tenant: str) -> int:
        return sum(turn.tenant == tenant for turn in self.inside)

    def recount(self, tenant: str) -> None:
        for priority in sorted({turn.priority for turn in self.line if turn.tenant == tenant}):
            self.since[tenant, priority] = self.tick()

    def expected(self) -> Turn:
        top = max(turn.priority for turn in self.line)
        return min(
            (turn for turn in self.line if turn.priority == top),
            key=lambda turn: (self.active(turn.tenant), self.since[turn.tenant, top], self.line.index(turn)),
        )

    def admit(self) -> None:
        while len(self.inside) < self.turns.workers and self.line:
            expected = self.expected()
            assert self.turns.admit() is expected
            self.line.remove(expected)
            self.inside.append(expected)
            self.recount(expected.tenant)
        assert self.turns.admit() is None

    @rule(tenant=TENANTS, priority=PRIORITIES)
    def ask(self, tenant: str, priority: int) -> None:
        if not any((turn.tenant, turn.priority) == (tenant, priority) for turn in self.line):
            self.since[tenant, priority] = self.tick()
        self.line.append(self.turns.ask(priority, tenant))
        self.admit()

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        turn = data.draw(st.sampled_from(self.inside))
        self.inside.remove(turn)
        self.turns.leave(turn)
        self.recount(turn.tenant)
        self.admit()

    @precondition(lambda self: self.line)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        turn = data.draw(st.sampled_from(self.line))
        self.line.remove(turn)
        self.turns.leave(turn)
        self.turns.leave(turn)
        self.admit()

    @rule(workers=st.integers(min_value=0, max_value=4))
    def resize(self, workers: int) -> None:
        self.turns.set_workers(workers)
        self.admit()

    @invariant()
    def counts_are_true(self) -> None:
        assert self.turns.active == len(self.inside)
        assert self.turns.waiting == len(self.line)
        assert [turn.state for turn in self.inside] == ["active"] * len(self.inside)
        assert [turn.state for turn in self.line] == ["waiting"] * len(self.line)

    def teardown(self) -> None:
        """Nobody is lost: with room, all who still wait get in, and an empty gate remembers nobody."""
        self.turns.set_workers(1000)
        assert set(admit_all(self.turns)) == set(self.line)
        for turn in (*self.line, *self.inside):
            self.turns.leave(turn)
        assert (self.turns.active, self.turns.waiting) == (0, 0)
        assert not self.turns._tenants
        assert not self.turns._bands
        assert not self.turns._priorities


TestWalk = Walk.TestCase


@given(st.lists(st.tuples(TENANTS, PRIORITIES), max_size=40), st.integers(min_value=0, max_value=5))
def test_never_more_inside_than_workers(askers: list[tuple[str, int]], workers: int):
    """As many get in as there are workers, or all who ask."""
    turns = Turns(workers)
    for tenant, priority in askers:
        turns.ask(priority, tenant)
    assert len(admit_all(turns)) == turns.active == min(workers, len(askers))


def test_shrinking_throws_nobody_out():
    """Who is inside when the gate shrinks stays; nobody enters until there is room again."""
    turns = Turns(3)
    inside = [turns.ask(0, "a") for _ in range(3)]
    assert admit_all(turns) == inside
    waiting = turns.ask(0, "a")
    turns.set_workers(1)
    turns.leave(inside[0])
    turns.leave(inside[1])
    assert admit_all(turns) == []
    turns.leave(inside[2])
    assert admit_all(turns) == [waiting]


def test_a_tenant_with_a_long_line_does_not_starve_a_small_one():
    """With one worker, a tenant that asks now and then has every second turn, however long the other line is."""
    turns = Turns(1)
    for _ in range(100):
        turns.ask(0, "big")
    (current,) = admit_all(turns)
    seen: Counter[str] = Counter()
    for _ in range(20):
        if not any(turn.tenant == "small" for turn in (current,)):
            turns.ask(0, "small")
        turns.leave(current)
        (current,) = admit_all(turns)
        seen[current.tenant] += 1
    assert seen == {"big": 10, "small": 10}


@pytest.mark.parametrize("tenants", [1, 50, 2000])
def test_a_line_of_thousands_is_cheap(tenants: int):
    """The cost of a visit grows far slower than the line: 40 times as many waiters cost under 8 times as much each."""

    def cost_of_a_visit(waiters: int) -> float:
        turns = Turns(64)
        best = float("inf")
        for number in range(waiters + 64):
            turns.ask(number % 3, f"t{number % tenants}")
        inside = admit_all(turns)
        for _ in range(20):
            started = time.perf_counter()
            for _ in range(20):
                gone = inside.pop(0)
                turns.leave(gone)
                turns.ask(gone.priority, gone.tenant)
                inside.extend(admit_all(turns))
            best = min(best, time.perf_counter() - started)
        return best

    assert cost_of_a_visit(4000) < 8 * cost_of_a_visit(100)
