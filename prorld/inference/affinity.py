"""Which engine the members of a group should share, so that their common prompt is computed once. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from prorld.domain.backends import BackendRow, BackendState

__all__ = ["GROUPS_MAX", "GROUP_SLACK", "GroupHomes", "shared_home"]

# Groups whose engines are remembered. A forgotten one costs its next member a cold prompt.
GROUPS_MAX = 8192

# How many more leases than the least loaded engine a group's engine may have and still get its members. A whole group
# of a common size fits onto an engine as idle as the others: half of one would have its prompt computed twice.
GROUP_SLACK = 8.0
# The same for an engine with all its places taken: whoever waits there computes nothing, while another stands idle.
FULL_SLACK = 2.0


def shared_home(
    rows: Sequence[BackendRow], homes: Iterable[str], slack: float, avoid: Iterable[str] = ()
) -> str | None:
    """The first of the group's engines that is up and not busier than the least loaded one by more than ``slack``.

    One that has no place left for a call may be busier by ``FULL_SLACK`` only.
    """
    shunned = frozenset(avoid)
    up = {row.backend_id: row for row in rows if row.state is BackendState.UP}
    if not up:
        return None
    least = min(row.load for row in up.values())
    return next((home for home in homes if home not in shunned and home in up and _bears(up[home], least, slack)), None)


def _bears(row: BackendRow, least: float, slack: float) -> bool:
    is_full = row.max_inflight is not None and row.leases >= row.max_inflight
    return row.load <= least + (min(slack, FULL_SLACK) if is_full else slack)


class GroupHomes:
    """The engines of each group in the order it came to them; the groups used longest ago are forgotten."""

    def __init__(self, groups_max: int = GROUPS_MAX) -> None:
        self._groups_max = groups_max
        self._homes: OrderedDict[str, list[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def of(self, group: str) -> tuple[str, ...]:
        """The engines that hold this group's prefix."""
        return tuple(self._homes.get(group, ()))

    def note(self, group: str, backend_id: str) -> None:
        """A member went to this engine."""
        homes = self._homes.setdefault(group, [])
        self._homes.move_to_end(group)
        if backend_id not in homes:
            homes.append(backend_id)
        while len(self._homes) > self._groups_max:
            self._homes.popitem(last=False)

    def forget_backend(self, backend_id: str) -> None:
        """An engine is gone, and its cache with it."""
        for homes in self._homes.values():
            if backend_id in homes:
                homes.remove(backend_id)
