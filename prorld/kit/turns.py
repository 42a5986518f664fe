"""Who enters a gate next: the decision alone, over plain state.

It owns the line of those who wait and the count of those who are in. It never awaits, reads no clock and draws no
random number, so a test can walk it through any history.

The rule: a higher priority goes first. Among tenants that wait with equal priority, the one with the fewest turns
active goes first; among those, the one that has stood at that count longest. Inside a tenant, first come, first served.
So no tenant waits for ever behind another of its priority; a lower priority does wait while a higher one keeps coming.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from typing import Literal

__all__ = ["Turn", "Turns"]


class Turn:
    """One visitor's place: first in the line, then inside, then gone."""

    __slots__ = ("priority", "state", "tenant")

    def __init__(self, priority: int, tenant: str) -> None:
        self.priority = priority
        self.tenant = tenant
        self.state: Literal["waiting", "active", "gone"] = "waiting"


class _Tenant:
    """What one tenant has inside, and its lines by priority."""

    __slots__ = ("active", "lines")

    def __init__(self) -> None:
        self.active = 0
        self.lines: dict[int, OrderedDict[Turn, None]] = {}


class _Band:
    """The tenants that wait with one priority, in rows by how many turns they have active.

    The counts in one band are distinct and add up to at most the number of workers, so there are few rows (under 50 for
    1,000 workers) and looking for the lowest is cheap. Everything else is a step in an ordered dict.
    """

    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows: dict[int, OrderedDict[str, None]] = {}

    def add(self, tenant: str, active: int) -> None:
        self.rows.setdefault(active, OrderedDict())[tenant] = None

    def remove(self, tenant: str, active: int) -> None:
        row = self.rows[active]
        del row[tenant]
        if not row:
            del self.rows[active]

    def first(self) -> str:
        return next(iter(self.rows[min(self.rows)]))


class Turns:
    """The line before a gate and the count behind it.

    Every change is followed by ``admit`` until that returns ``None``; only ``admit`` lets anybody in.
    """

    def __init__(self, workers: int) -> None:
        self.active = 0
        self.waiting = 0
        self._workers = 0
        self._tenants: dict[str, _Tenant] = {}
        self._bands: dict[int, _Band] = {}
        self._priorities: list[int] = []
        self.set_workers(workers)

    @property
    def workers(self) -> int:
        """How many may be inside."""
        return self._workers

    def set_workers(self, workers: int) -> None:
        """Change how many may be inside. Those who are inside stay, so ``active`` may be above it for a while."""
        assert workers >= 0, workers
        self._workers = workers

    def ask(self, priority: int, tenant: str) -> Turn:
        """Stand in line."""
        turn = Turn(priority, tenant)
        record = self._tenants.setdefault(tenant, _Tenant())
        line = record.lines.get(priority)
        if line is None:
            line = record.lines[priority] = OrderedDict()
            self._band(priority).add(tenant, record.active)
        line[turn] = None
        self.waiting += 1
        return turn

    def admit(self) -> Turn | None:
        """Let in whoever is next, if there is room and somebody waits."""
        if self.active >= self._workers or not self.waiting:
            return None
        priority = self._priorities[-1]
        tenant = self._bands[priority].first()
        turn = next(iter(self._tenants[tenant].lines[priority]))
        self._leave_line(turn)
        turn.state = "active"
        self.active += 1
        self._recount(tenant, +1)
        return turn

    def leave(self, turn: Turn) -> None:
        """Give up a place, in the line or inside. Harmless when it is given up already."""
        if turn.state == "waiting":
            self._leave_line(turn)
        elif turn.state == "active":
            self.active -= 1
            self._recount(turn.tenant, -1)
        turn.state = "gone"
        self._forget_if_idle(turn.tenant)

    def _leave_line(self, turn: Turn) -> None:
        record = self._tenants[turn.tenant]
        line = record.lines[turn.priority]
        del line[turn]
        self.waiting -= 1
        if line:
            return
        del record.lines[turn.priority]
        band = self._bands[turn.priority]
        band.remove(turn.tenant, record.active)
        if not band.rows:
            del self._bands[turn.priority]
            del self._priorities[bisect_left(self._priorities, turn.priority)]

    def _recount(self, tenant: str, change: int) -> None:
        record = self._tenants[tenant]
        for priority in record.lines:
            self._bands[priority].remove(tenant, record.active)
            self._bands[priority].add(tenant, record.active + change)
        record.active += change

    def _band(self, priority: int) -> _Band:
        band = self._bands.get(priority)
        if band is None:
            band = self._bands[priority] = _Band()
            insort(self._priorities, priority)
        return band

    def _forget_if_idle(self, tenant: str) -> None:
        record = self._tenants.get(tenant)
        if record is not None and not record.active and not record.lines:
            del self._tenants[tenant]
