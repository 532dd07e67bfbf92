"""Results come in the order of the items, within the bound; the first failure ends the others."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_core.bounded_map import bounded_map
from stratalog_core.errors import Unavailable


@given(items=st.lists(st.integers(0, 3)), at_once=st.integers(1, 5))
def test_results_are_in_order_and_calls_within_the_bound(items: list[int], at_once: int) -> None:
    running, most = 0, 0

    async def call(item: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(item):
            await asyncio.sleep(0)
        running -= 1
        return item * 2

    assert asyncio.run(bounded_map(call, iter(items), at_once)) == [item * 2 for item in items]
    assert most <= at_once


async def test_the_first_failure_is_raised_and_ends_the_others() -> None:
    ended: list[int] = []

    async def call(item: int) -> None:
        if item == 3:
            raise Unavailable("three")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(item)

    with pytest.raises(Unavailable, match="three"):
        await bounded_map(call, range(100), 5)
    assert sorted(ended) == [0, 1, 2, 4]
