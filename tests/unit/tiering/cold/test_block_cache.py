"""The LRU cache stays within its bound and keeps the latest entry."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stratalog_tiering.cold.block_cache import LruCache


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 7)), max_size=60))
def test_the_cache_never_exceeds_its_bound_and_keeps_the_latest(puts: list[tuple[int, int]]) -> None:
    evicted: list[int] = []
    cache: LruCache[int, int] = LruCache(20, lambda weight: weight, lambda key, _: evicted.append(key))
    for key, weight in puts:
        cache.put(key, weight)
        assert cache.weight <= 20
        assert cache.get(key) == weight
