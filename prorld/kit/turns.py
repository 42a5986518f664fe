"""Who enters a gate next: the decision alone, over plain state.

It owns the line of those who wait and the count of those who are in. It never awaits, reads no clock and draws no
random number, so a test can walk it through any history.

The rule: a higher priority goes first. Among tenants that wait with equal priority, the one with the fewest turns
active for its weight goes first; among equal ones the one that has been let in least for its weight since it came; then
the one that has stood so longest. Inside a tenant the same holds between its flows, which all weigh the same: a flow is
a batch, or all single jobs together. Inside a flow, first come, first served.

Whoever is passed over does not wait for ever: one admission in ``RESERVED`` that passed somebody over goes to who has
waited longest, in turns of those below the highest priority that waits and of all. So anybody gets in after at most
``2 * RESERVED`` admissions for each of those who stood in line before, whatever comes later.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Mapping
from typing import Literal

from prorld.kit.ranks import Ranks

__all__ = ["RESERVED", "Turn", "Turns"]

# One admission in so many is for who has waited longest.
RESERVED = 16


class Turn:
    """One visitor's place: first in the line, then inside, then gone."""

    __slots__ = ("flow", "number", "priority", "state", "tenant")

    def __init__(self, priority: int, tenant: str, flow: str, number: int) -> None:
        self.priority = priority
        self.tenant = tenant
        self.flow = flow
        self.number = number
        self.state: Literal["waiting", "active", "gone"] = "waiting"


class _Party:
    """A tenant or a flow: what it has inside, its weight, and by priority how much of its share it has had."""

    __slots__ = ("active", "tags", "weight")

    def __init__(self, weight: float) -> None:
        self.active = 0
        self.weight = weight
        self.tags: dict[int, float] = {}


class _Row:
    """Parties that wait with one priority. Its clock is what the one let in last had had of its share.

    Who comes later begins at the clock, so that nobody saves turns up by staying away.
    """

    __slots__ = ("clock", "priority", "ranks")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.clock = 0.0
        self.ranks = Ranks()

    def enter(self, name: str, party: _Party) -> None:
        party.tags[self.priority] = max(party.tags.get(self.priority, 0.0), self.clock)
        self.rank(name, party)

    def rank(self, name: str, party: _Party) -> None:
        self.ranks.put(name, (party.active / party.weight, party.tags[self.priority]))

    def served(self, party: _Party) -> None:
        self.clock = max(self.clock, party.tags[self.priority])
        party.tags[self.priority] += 1 / party.weight


class _Flow(_Party):
    """Its lines by priority."""

    __slots__ = ("lines",)

    def __init__(self) -> None:
        super().__init__(1.0)
        self.lines: dict[int, OrderedDict[Turn, None]] = {}


class _Tenant(_Party):
    """Its flows, and by priority those of them that wait. Rows stay as long as the tenant: they know who had what.

    ``waits_at`` are the priorities at which some of them do.
    """

    __slots__ = ("flows", "rows", "waits_at")

    def __init__(self, weight: float) -> None:
        super().__init__(weight)
        self.flows: dict[str, _Flow] = {}
        self.rows: dict[int, _Row] = {}
        self.waits_at: set[int] = set()


class Turns:
    """The line before a gate and the count behind it.

    Every change is followed by ``admit`` until that returns ``None``; only ``admit`` lets anybody in.
    """

    def __init__(self, workers: int, weights: Mapping[str, float] | None = None) -> None:
        self.active = 0
        self.waiting = 0
        self._workers = 0
        self._weights: dict[str, float] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._rows: dict[int, _Row] = {}
        # All who wait in the order of their coming, and the same by priority.
        self._everybody: OrderedDict[Turn, None] = OrderedDict()
        self._priorities: list[int] = []
        self._lines: dict[int, OrderedDict[Turn, None]] = {}
        self._asked = 0
        self._passed_over = 0
        self._for_all = False
        self.set_workers(workers)
        self.set_weights(weights or {})

    @property
    def workers(self) -> int:
        """How many may be inside."""
        return self._workers

    def set_workers(self, workers: int) -> None:
        """Change how many may be inside. Those who are inside stay, so ``active`` may be above it for a while."""
        assert workers >= 0, workers
        self._workers = workers

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Change what tenants weigh; one that is not named weighs 1."""
        assert all(weight > 0 for weight in weights.values()), weights
        self._weights = dict(weights)
        for name, tenant in self._tenants.items():
            tenant.weight = self._weights.get(name, 1.0)
            self._rank(name, tenant)

    def ask(self, priority: int, tenant: str, flow: str = "") -> Turn:
        """Stand in line."""
        self._asked += 1
        turn = Turn(priority, tenant, flow, self._asked)
        party = self._tenants.get(tenant)
        if party is None:
            party = self._tenants[tenant] = _Tenant(self._weights.get(tenant, 1.0))
        stream = party.flows.get(flow)
        if stream is None:
            stream = party.flows[flow] = _Flow()
        self._enter_rows(turn, party, stream)
        stream.lines[priority][turn] = None
        if priority not in self._lines:
            self._lines[priority] = OrderedDict()
            insort(self._priorities, priority)
        self._lines[priority][turn] = self._everybody[turn] = None
        self.waiting += 1
        return turn

    def admit(self) -> Turn | None:
        """Let in whoever is next, if there is room and somebody waits."""
        if self.active >= self._workers or not self.waiting:
            return None
        turn = self._next()
        tenant = self._tenants[turn.tenant]
        flow = tenant.flows[turn.flow]
        self._rows[turn.priority].served(tenant)
        tenant.rows[turn.priority].served(flow)
        self._leave_line(turn)
        turn.state = "active"
        self.active += 1
        self._recount(turn, +1)
        return turn

    def leave(self, turn: Turn) -> None:
        """Give up a place, in the line or inside. Harmless when it is given up already."""
        if turn.state == "waiting":
            self._leave_line(turn)
        elif turn.state == "active":
            self.active -= 1
            self._recount(turn, -1)
        if turn.state != "gone":
            turn.state = "gone"
            self._forget_if_idle(turn)

    # --- who is next --------------------------------------------------------------------------------------------------

    def _next(self) -> Turn:
        oldest = next(iter(self._everybody))
        if self._passed_over >= RESERVED - 1:
            self._passed_over = 0
            self._for_all = not self._for_all
            below = [next(iter(self._lines[priority])) for priority in self._priorities[:-1]]
            return oldest if self._for_all or not below else min(below, key=lambda turn: turn.number)
        priority = self._priorities[-1]
        tenant = self._tenants[self._rows[priority].ranks.first()]
        flow = tenant.flows[tenant.rows[priority].ranks.first()]
        turn = next(iter(flow.lines[priority]))
        self._passed_over += turn is not oldest
        return turn

    # --- the lines ----------------------------------------------------------------------------------------------------

    def _enter_rows(self, turn: Turn, tenant: _Tenant, flow: _Flow) -> None:
        priority = turn.priority
        if priority in flow.lines:
            return
        row = tenant.rows.get(priority)
        if row is None:
            row = tenant.rows[priority] = _Row(priority)
        if not len(row.ranks):
            band = self._rows.get(priority)
            if band is None:
                band = self._rows[priority] = _Row(priority)
            band.enter(turn.tenant, tenant)
            tenant.waits_at.add(priority)
        flow.lines[priority] = OrderedDict()
        row.enter(turn.flow, flow)

    def _leave_line(self, turn: Turn) -> None:
        priority, tenant = turn.priority, self._tenants[turn.tenant]
        everybody = self._lines[priority]
        del everybody[turn], self._everybody[turn]
        if not everybody:
            del self._lines[priority]
            del self._priorities[bisect_left(self._priorities, priority)]
        self.waiting -= 1
        flow = tenant.flows[turn.flow]
        line = flow.lines[priority]
        del line[turn]
        if line:
            return
        del flow.lines[priority]
        row = tenant.rows[priority]
        row.ranks.drop(turn.flow)
        if not len(row.ranks):
            self._rows[priority].ranks.drop(turn.tenant)
            tenant.waits_at.discard(priority)

    def _recount(self, turn: Turn, change: int) -> None:
        tenant = self._tenants[turn.tenant]
        flow = tenant.flows[turn.flow]
        tenant.active += change
        flow.active += change
        self._rank(turn.tenant, tenant)
        for priority in flow.lines:
            tenant.rows[priority].rank(turn.flow, flow)

    def _rank(self, name: str, tenant: _Tenant) -> None:
        for priority in tenant.waits_at:
            self._rows[priority].rank(name, tenant)

    def _forget_if_idle(self, turn: Turn) -> None:
        tenant = self._tenants[turn.tenant]
        flow = tenant.flows[turn.flow]
        if not flow.active and not flow.lines:
            del tenant.flows[turn.flow]
        if not tenant.flows:
            del self._tenants[turn.tenant]
        if not self._tenants:
            self._rows.clear()
