"""Which sandboxes are worth making in advance: the decision over plain numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prorld.sandbox.warm_plan import BYTES_EACH_MIN, EXPECTED_S, Demand, WarmRules, allot, room


def asked(rules: WarmRules, *times: float, fixed: int = 0) -> Demand:
    """A spec that has come up once and was asked for at these times."""
    demand = Demand(rules, now=0.0, fixed=fixed)
    demand.came_up()
    for time in times:
        demand.ask(time)
    return demand


def test_a_crowd_is_no_habit() -> None:
    """What is asked for before the first has come up is not asked for again; what comes later is."""
    rules = WarmRules(per_spec=3)
    demand = Demand(rules, now=0.0)
    for _ in range(10):
        demand.ask(1.0)
    assert demand.wanted(1.0) == 0
    demand.came_up()
    demand.ask(2.0)
    assert demand.wanted(2.0) == 1
    for _ in range(10):
        demand.ask(3.0)
    assert demand.wanted(3.0) == 3


def test_a_habit_is_forgotten() -> None:
    """One by one, as long after each ask as the rules say."""
    demand = asked(WarmRules(idle_s=10.0), 1.0, 5.0)
    assert [demand.wanted(at) for at in (5.0, 10.9, 11.0, 14.9, 15.0)] == [2, 2, 1, 1, 0]


def test_an_announcement_is_believed_for_a_while() -> None:
    """It counts at once and beside a habit, until somebody comes or its time is over."""
    demand = asked(WarmRules(), 0.0)
    demand.expect(1.0)
    assert demand.is_pressing(1.0)
    assert [demand.wanted(at) for at in (1.0, EXPECTED_S, EXPECTED_S + 1.0)] == [2, 2, 1]
    demand.expect(2.0)
    demand.ask(3.0)
    demand.ask(3.0)
    assert demand.wanted(4.0) == 1
    demand.ask(4.0)
    assert demand.wanted(4.0) == 2
    assert not demand.is_pressing(4.0)


def test_failures_wait_longer_each_time() -> None:
    """A spec that does not come up is not made in a loop, and one success forgets the failures."""
    demand = asked(WarmRules())
    waits = []
    for _ in range(8):
        demand.failed(100.0)
        waits.append(demand.retry_at - 100.0)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    demand.served()
    demand.failed(100.0)
    assert demand.retry_at == 101.0


def test_who_comes_first() -> None:
    """The operator's images and announced wants go before habits, and of those the latest goes first."""
    rules = WarmRules(total=4, per_spec=4)
    demands = {
        "old habit": asked(rules, 1.0, 1.0),
        "new habit": asked(rules, 2.0, 2.0),
        "announced": asked(rules),
        "named": asked(rules, fixed=1),
    }
    demands["announced"].expect(0.0)
    assert allot(demands, rules, now=3.0, bytes_each=0) == {"named": 1, "announced": 1, "new habit": 2}


def test_memory_is_a_bound() -> None:
    """As many as fit, by what the largest so far has taken; and never none of the bytes."""
    rules = WarmRules(total=100, memory_bytes=10 * BYTES_EACH_MIN)
    assert [room(rules, each) for each in (0, BYTES_EACH_MIN, 4 * BYTES_EACH_MIN, 11 * BYTES_EACH_MIN)] == [
        10,
        10,
        2,
        0,
    ]


@given(
    total=st.integers(0, 20),
    per_spec=st.integers(1, 5),
    specs=st.integers(1, 5),
    wants=st.lists(st.tuples(st.integers(0, 3), st.lists(st.floats(0, 100), max_size=8), st.integers(0, 5))),
)
def test_no_bound_is_passed(total, per_spec, specs, wants) -> None:
    """Whatever is asked for and announced: the shares are wanted, and within every bound."""
    rules = WarmRules(total=total, per_spec=per_spec, specs=specs, memory_bytes=12 * BYTES_EACH_MIN)
    demands = {}
    for number, (fixed, times, announced) in enumerate(wants):
        demands[number] = asked(rules, *sorted(times), fixed=fixed)
        for _ in range(announced):
            demands[number].expect(90.0)
    shares = allot(demands, rules, now=100.0, bytes_each=0)
    assert sum(shares.values()) <= min(total, 12)
    assert len(shares) <= specs
    assert all(0 < share <= demands[key].wanted(100.0) for key, share in shares.items())
