"""Names in order of a rank that changes often: the first is found, one is ranked or dropped in O(log n) on average."""

from __future__ import annotations

import heapq
from typing import TypeAlias

__all__ = ["Rank", "Ranks"]

Rank: TypeAlias = tuple[float, float]

# Entries that may be out of date before the heap is built again.
_SLACK = 64


class Ranks:
    """A heap in which what is out of date stays until it comes to the top, or is the larger part.

    Among equal ranks, the one that was ranked first is first.
    """

    __slots__ = ("_heap", "_number", "_valid")

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, int, str]] = []
        self._valid: dict[str, tuple[Rank, int, str]] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._valid)

    def put(self, name: str, rank: Rank) -> None:
        """Give a name its rank, or another one."""
        self._number += 1
        entry = (rank, self._number, name)
        self._valid[name] = entry
        heapq.heappush(self._heap, entry)
        self._tidy()

    def drop(self, name: str) -> None:
        """Take a name out that is in."""
        del self._valid[name]
        self._tidy()

    def first(self) -> str:
        """The name with the lowest rank; there is at least one."""
        while self._valid.get(self._heap[0][2]) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def _tidy(self) -> None:
        if len(self._heap) > 2 * len(self._valid) + _SLACK:
            self._heap = list(self._valid.values())
            heapq.heapify(self._heap)
