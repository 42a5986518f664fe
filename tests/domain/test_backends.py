"""The table of engines: the fewest live leases for the weight, and never one that takes none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prorld.domain.backends import BackendRow, BackendState, BackendTable

OFFERED = (BackendState.UP, BackendState.SUSPECT)


class TableMachine(RuleBasedStateMachine):
    """Any order of adds, removals, state changes, leases and releases."""

    def __init__(self) -> None:
        super().__init__()
        self.table = BackendTable()
        self.held: list[str] = []
        self.made = 0

    @rule(weight=st.sampled_from([0.5, 1.0, 2.0]))
    def add(self, weight: float) -> None:
        """A new engine."""
        self.made += 1
        self.table.add(BackendRow(backend_id=f"b{self.made}", weight=weight))

    @precondition(lambda self: len(self.table) > 0)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        """An engine goes; its leases are void."""
        gone = data.draw(st.sampled_from([row.backend_id for row in self.table.rows()]))
        self.table.remove(gone)
        self.held = [held for held in self.held if held != gone]

    @precondition(lambda self: len(self.table) > 0)
    @rule(data=st.data(), state=st.sampled_from(BackendState))
    def change(self, data: st.DataObject, state: BackendState) -> None:
        """An engine changes its state."""
        self.table.set_state(data.draw(st.sampled_from([row.backend_id for row in self.table.rows()])), state)

    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        """A lease goes to an engine with the least load among those that take leases and are not avoided."""
        rows = self.table.rows()
        avoid = data.draw(st.sets(st.sampled_from([row.backend_id for row in rows]))) if rows else set()
        offered = [row for row in rows if row.state in OFFERED and row.backend_id not in avoid]
        well = [row for row in offered if row.state is BackendState.UP] or offered
        least = min((row.leases / row.weight for row in well), default=None)
        chosen = self.table.lease(avoid)
        assert (chosen is None) is (least is None)
        if chosen is not None:
            row = self.table.row(chosen)
            assert chosen in {row.backend_id for row in well}
            assert (row.leases - 1) / row.weight == least
            self.held.append(chosen)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """A lease comes back."""
        back = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.table.release(back)

    @invariant()
    def counts_are_of_live_leases(self) -> None:
        """Every row counts exactly the leases that are held."""
        for row in self.table.rows():
            assert row.leases == self.held.count(row.backend_id)


TestTable = TableMachine.TestCase


@given(st.integers(1, 200))
def test_a_late_engine_fills_up_fairly(jobs: int) -> None:
    """It gets leases until it has as many as the others, and then its share."""
    table = BackendTable()
    table.add(BackendRow(backend_id="old"))
    for _ in range(jobs):
        table.lease()
    table.add(BackendRow(backend_id="new"))
    for _ in range(jobs):
        table.lease()
    assert abs(table.row("old").leases - table.row("new").leases) <= 1


def test_a_release_too_many_is_a_bug_that_shows() -> None:
    """Counts never go below zero unseen."""
    table = BackendTable()
    table.add(BackendRow(backend_id="b"))
    with pytest.raises(AssertionError, match="no lease"):
        table.release("b")
