"""The store in memory: bounded by count and bytes, and it remembers what it forgot."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prorld.store.memory import MemoryStore


@given(
    sizes=st.lists(st.integers(0, 100), max_size=60),
    count_max=st.integers(1, 10),
    bytes_max=st.integers(1, 300),
    tombstones_max=st.integers(0, 10),
)
def test_it_stays_within_its_bounds_and_forgets_the_oldest(
    sizes: list[int], count_max: int, bytes_max: int, tombstones_max: int
) -> None:
    """Count and bytes hold unless one thing alone is too large; what is kept is always the newest run."""
    store: MemoryStore[int] = MemoryStore(count_max=count_max, bytes_max=bytes_max, tombstones_max=tombstones_max)
    lost: set[str] = set()
    for i, size in enumerate(sizes):
        lost.update(store.put(str(i), i, size))
        assert store.get(str(i)) == i
        kept = store.newest_first()
        assert kept == list(range(i, i - len(kept), -1))
        assert store.bytes_kept == sum(sizes[k] for k in kept)
        assert len(kept) == 1 or (len(kept) <= count_max and store.bytes_kept <= bytes_max)
        for k in range(i + 1):
            there = k in kept
            assert (store.get(str(k)) is not None) is there
            assert store.forgot(str(k)) is (not there and str(k) not in lost)
    assert sum(store.forgot(str(k)) for k in range(len(sizes))) <= tombstones_max


def test_what_never_was_is_not_forgotten() -> None:
    """An unknown id is unknown, not gone."""
    store: MemoryStore[int] = MemoryStore(count_max=1, bytes_max=1)
    assert store.get("x") is None
    assert not store.forgot("x")
