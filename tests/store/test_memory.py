"""The cache in memory: bounded by count and bytes, and what was used longest ago goes first."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from prorld.store.memory import MemoryCache


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(0, 12), st.integers(0, 100)),
            st.tuples(st.sampled_from(["get", "drop"]), st.integers(0, 12), st.just(0)),
        ),
        max_size=80,
    ),
    count_max=st.integers(1, 10),
    bytes_max=st.integers(1, 300),
)
def test_it_stays_within_its_bounds_and_lets_the_least_used_go(
    steps: list[tuple[str, int, int]], count_max: int, bytes_max: int
) -> None:
    """Count and bytes hold unless one thing alone is too large; the order is that of use."""
    cache: MemoryCache[int, int] = MemoryCache(count_max=count_max, bytes_max=bytes_max)
    model: OrderedDict[int, int] = OrderedDict()
    for what, key, size in steps:
        if what == "put":
            cache.put(key, size, size)
            model.pop(key, None)
            model[key] = size
            while len(model) > 1 and (len(model) > count_max or sum(model.values()) > bytes_max):
                model.popitem(last=False)
        elif what == "drop":
            cache.drop(key)
            model.pop(key, None)
        else:
            assert cache.get(key) == model.get(key)
            if key in model:
                model.move_to_end(key)
        assert (len(cache), cache.bytes_kept) == (len(model), sum(model.values()))
