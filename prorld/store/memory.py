"""Ended jobs in memory: bounded by count and by bytes, oldest forgotten first, ids kept as tombstones.

It knows sizes and ages, never what a job is.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

__all__ = ["MemoryStore"]

T = TypeVar("T")

# An id takes about 200 bytes; a million of them is as much memory as the past should take.
TOMBSTONES_MAX = 1_000_000


class MemoryStore(Generic[T]):
    """A bounded map from id to an ended thing."""

    def __init__(self, *, count_max: int, bytes_max: int, tombstones_max: int = TOMBSTONES_MAX) -> None:
        if count_max < 1 or bytes_max < 1:
            raise AssertionError("a store keeps at least one thing")
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._tombstones_max = tombstones_max
        self._kept: OrderedDict[str, tuple[T, int]] = OrderedDict()
        self._forgotten: OrderedDict[str, None] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def bytes_kept(self) -> int:
        """The sizes of what is kept, added up."""
        return self._bytes

    def put(self, key: str, value: T, size_bytes: int) -> list[str]:
        """Keep a thing; returns the ids of which not even the tombstone is left.

        The newest thing is kept even when it alone is over the bound: somebody is about to read it.
        """
        if key in self._kept:
            raise AssertionError(f"{key} is kept already")
        self._kept[key] = (value, size_bytes)
        self._bytes += size_bytes
        while len(self._kept) > 1 and (len(self._kept) > self._count_max or self._bytes > self._bytes_max):
            old, (_, size) = self._kept.popitem(last=False)
            self._bytes -= size
            self._forgotten[old] = None
        lost: list[str] = []
        while len(self._forgotten) > self._tombstones_max:
            lost.append(self._forgotten.popitem(last=False)[0])
        return lost

    def get(self, key: str) -> T | None:
        """The thing, or ``None`` where it never was or is forgotten."""
        found = self._kept.get(key)
        return None if found is None else found[0]

    def forgot(self, key: str) -> bool:
        """Whether this id was kept once and is forgotten."""
        return key in self._forgotten

    def newest_first(self) -> list[T]:
        """Everything that is kept."""
        return [value for value, _ in reversed(self._kept.values())]
