"""Who is next: the rule, over any history."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prorld.kit.turns import RESERVED, Turn, Turns

TENANTS = st.sampled_from("abcd")
PRIORITIES = st.integers(min_value=-1, max_value=1)


def admit_all(turns: Turns) -> list[Turn]:
    """Everybody who gets in now, in order."""
    admitted: list[Turn] = []
    while (turn := turns.admit()) is not None:
        admitted.append(turn)
    return admitted


FLOWS = st.sampled_from(["", "b1", "b2"])
WEIGHTS = {"a": 2.0, "b": 0.5}


class Walk(RuleBasedStateMachine):
    """Any history, against the rule said naively: the least of a list, looked for from scratch each time."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = Turns(2, WEIGHTS)
        self.line: list[Turn] = []
        self.inside: list[Turn] = []
        self.clock = 0
        # By party (a tenant, or a tenant's flow) and priority: since when it stands so, and what of its share it had.
        self.since: dict[tuple[str, ...], dict[int, int]] = {}
        self.had: dict[tuple[str, ...], dict[int, float]] = {}
        self.begin_at: dict[tuple[str, ...], dict[int, float]] = {}
        self.passed_over = 0
        self.reserved = 0

    @staticmethod
    def parties(turn: Turn) -> list[tuple[str, ...]]:
        return [(turn.tenant,), (turn.tenant, turn.flow)]

    def of(self, turns: list[Turn], party: tuple[str, ...]) -> list[Turn]:
        return [turn for turn in turns if (turn.tenant, turn.flow)[: len(party)] == party]

    def weight(self, party: tuple[str, ...]) -> float:
        return WEIGHTS.get(party[0], 1.0) if len(party) == 1 else 1.0

    def recount(self, turn: Turn) -> None:
        for party in self.parties(turn):
            for priority in {one.priority for one in self.of(self.line, party)}:
                self.clock += 1
                self.since.setdefault(party, {})[priority] = self.clock

    def forget(self, turn: Turn) -> None:
        for party in self.parties(turn):
            if not self.of(self.line, party) and not self.of(self.inside, party):
                self.had.pop(party, None)
                for below in [known for known in self.begin_at if known == party]:
                    del self.begin_at[below]
        if not self.line and not self.inside:
            self.begin_at.clear()

    def rank(self, party: tuple[str, ...], priority: int) -> tuple[float, float, int]:
        active = len(self.of(self.inside, party)) / self.weight(party)
        return (active, self.had[party][priority], self.since[party][priority])

    def expected(self) -> Turn:
        oldest = self.line[0]
        top = max(turn.priority for turn in self.line)
        if self.passed_over == RESERVED - 1:
            self.passed_over, self.reserved = 0, self.reserved + 1
            below = [turn for turn in self.line if turn.priority < top]
            return below[0] if below and self.reserved % 2 == 0 else oldest
        turns = [turn for turn in self.line if turn.priority == top]
        for size in (1, 2):
            best = min({(turn.tenant, turn.flow)[:size] for turn in turns}, key=lambda party: self.rank(party, top))
            turns = self.of(turns, best)
        self.passed_over += turns[0] is not oldest
        return turns[0]

    def admit(self) -> None:
        while len(self.inside) < self.turns.workers and self.line:
            expected = self.expected()
            assert self.turns.admit() is expected
            for party in self.parties(expected):
                clocks, had = self.begin_at.setdefault(party[:-1], {}), self.had[party]
                clocks[expected.priority] = max(clocks.get(expected.priority, 0.0), had[expected.priority])
                had[expected.priority] += 1 / self.weight(party)
            self.line.remove(expected)
            self.inside.append(expected)
            self.recount(expected)
        assert self.turns.admit() is None

    @rule(tenant=TENANTS, priority=PRIORITIES, flow=FLOWS)
    def ask(self, tenant: str, priority: int, flow: str) -> None:
        turn = self.turns.ask(priority, tenant, flow)
        for party in self.parties(turn):
            if not any(one.priority == priority for one in self.of(self.line, party)):
                self.clock += 1
                self.since.setdefault(party, {})[priority] = self.clock
                begin_at = self.begin_at.get(party[:-1], {}).get(priority, 0.0)
                had = self.had.setdefault(party, {})
                had[priority] = max(had.get(priority, 0.0), begin_at)
        self.line.append(turn)
        self.admit()

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        turn = data.draw(st.sampled_from(self.inside))
        self.inside.remove(turn)
        self.turns.leave(turn)
        self.recount(turn)
        self.forget(turn)
        self.admit()

    @precondition(lambda self: self.line)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        turn = data.draw(st.sampled_from(self.line))
        self.line.remove(turn)
        self.turns.leave(turn)
        self.turns.leave(turn)
        self.forget(turn)
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
        assert not self.turns._rows
        assert not self.turns._priorities
        assert not self.turns._everybody
        assert not self.turns._lines


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


def in_turn(turns: Turns, inside: list[Turn]) -> Turn:
    """The one who has been inside longest goes and asks again; who gets in instead."""
    gone = inside.pop(0)
    turns.leave(gone)
    turns.ask(gone.priority, gone.tenant, gone.flow)
    (turn,) = admit_all(turns)
    inside.append(turn)
    return turn


@pytest.mark.parametrize("workers", [1, 12, 60])
def test_tenants_share_by_weight(workers: int):
    """Where all of them always wait, each has its share of the admissions, but for what is reserved."""
    weights = {"a": 1.0, "b": 2.0, "c": 3.0}
    turns = Turns(workers, weights)
    for number in range(3 * 100):
        turns.ask(0, "abc"[number % 3])
    inside = admit_all(turns)
    seen = Counter(in_turn(turns, inside).tenant for _ in range(3000))
    for tenant, weight in weights.items():
        assert seen[tenant] / 3000 == pytest.approx(weight / 6, abs=0.04)


def test_weights_change_while_they_wait():
    """What a tenant weighs counts from the next admission on."""
    turns = Turns(12)
    for number in range(200):
        turns.ask(0, "ab"[number % 2])
    inside = admit_all(turns)
    assert Counter(turn.tenant for turn in inside) == {"a": 6, "b": 6}
    turns.set_weights({"a": 3.0})
    for _ in range(100):
        in_turn(turns, inside)
    assert abs(Counter(turn.tenant for turn in inside)["a"] - 9) <= 1


def test_a_batch_of_thousands_does_not_keep_a_single_job_waiting():
    """Flows of one tenant share its places; inside a flow the order is that of asking."""
    turns = Turns(4)
    batch = [turns.ask(0, "a", "batch") for _ in range(5000)]
    inside = admit_all(turns)
    single = [turns.ask(0, "a") for _ in range(2)]
    turns.leave(inside.pop())
    assert admit_all(turns) == [single[0]]
    turns.leave(inside.pop())
    assert admit_all(turns) == [single[1]]
    turns.leave(inside.pop())
    assert admit_all(turns) == [batch[4]]


@given(st.lists(st.tuples(TENANTS, st.integers(0, 3), FLOWS), min_size=1, max_size=25), st.data())
def test_nobody_starves(others: list[tuple[str, int, str]], data: st.DataObject):
    """Whoever came before, and whatever keeps coming with a higher priority: there is a bound until one gets in."""
    turns = Turns(1, {"z": 1000.0})
    before = [turns.ask(priority, tenant, flow) for tenant, priority, flow in others]
    waits = turns.ask(data.draw(st.integers(-1, 3)), "q")
    bound = 2 * RESERVED * (len(before) + 1)
    for number in range(bound):
        # New ones of the highest priority, heavy, each of a flow of its own.
        turns.ask(5, "z", f"flow {number}")
        (inside,) = admit_all(turns)
        if inside is waits:
            return
        turns.leave(inside)
    pytest.fail("it starves")


def test_what_is_reserved_is_a_small_share():
    """A lower priority gets one in sixteen while a higher one keeps coming, and no more."""
    turns = Turns(1)
    for _ in range(500):
        turns.ask(0, "a")
    seen: Counter[int] = Counter()
    for _ in range(1600):
        turns.ask(5, "b")
        (inside,) = admit_all(turns)
        seen[inside.priority] += 1
        turns.leave(inside)
    assert seen[0] == 1600 // RESERVED
