"""A cache in memory, bounded by count and by bytes: what was used longest ago goes first.

It knows sizes and uses, never what it holds. Whatever it lets go can be read again elsewhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["MemoryCache"]

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class MemoryCache(Generic[K, T]):
    """A bounded map."""

    def __init__(self, *, count_max: int, bytes_max: int) -> None:
        if count_max < 1 or bytes_max < 1:
            raise AssertionError("a cache keeps at least one thing")
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._kept: OrderedDict[K, tuple[T, int]] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def bytes_kept(self) -> int:
        """The sizes of what is kept, added up."""
        return self._bytes

    def put(self, key: K, value: T, size_bytes: int) -> None:
        """Keep a thing in the place of what was kept under its key.

        The newest thing is kept even when it alone is over the bound: somebody is about to read it.
        """
        self.drop(key)
        self._kept[key] = (value, size_bytes)
        self._bytes += size_bytes
        while len(self._kept) > 1 and (len(self._kept) > self._count_max or self._bytes > self._bytes_max):
            _, (_, size) = self._kept.popitem(last=False)
            self._bytes -= size

    def get(self, key: K) -> T | None:
        """The thing, which counts as a use, or ``None``."""
        found = self._kept.get(key)
        if found is None:
            return None
        self._kept.move_to_end(key)
        return found[0]

    def drop(self, key: K) -> None:
        """Keep it no longer; fine for what is not there."""
        found = self._kept.pop(key, None)
        if found is not None:
            self._bytes -= found[1]
