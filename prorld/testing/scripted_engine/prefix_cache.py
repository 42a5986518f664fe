"""A prefix cache that counts like the real one: whole blocks, shared by whoever has the same beginning and salt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["PrefixCache"]

BLOCK_TOKENS = 16
BLOCKS_MAX = 100_000


class PrefixCache:
    """Hashes of blocks, each chained to all before it."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.queries_total = 0
        self.hits_total = 0

    def lookup(self, ids: Sequence[int], salt: str | None) -> int:
        """How many tokens of this prompt are cached; never all of them, since the last one must be computed."""
        found = 0
        for link in self._chain(ids, salt):
            if link not in self._blocks or found + BLOCK_TOKENS >= len(ids):
                break
            found += BLOCK_TOKENS
        self.queries_total += len(ids)
        self.hits_total += found
        return found

    def store(self, ids: Sequence[int], salt: str | None) -> None:
        """Keep the whole blocks of a context."""
        for link in self._chain(ids, salt):
            self._blocks[link] = None
            self._blocks.move_to_end(link)
        while len(self._blocks) > BLOCKS_MAX:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()

    def _chain(self, ids: Sequence[int], salt: str | None) -> list[int]:
        links: list[int] = []
        link = hash(salt)
        for start in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            link = hash((link, *ids[start : start + BLOCK_TOKENS]))
            links.append(link)
        return links
