"""Results come in the order of the items, within the bound; the failure of the first item that fails is raised."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

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


@given(fates=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=12), at_once=st.integers(1, 5))
def test_the_failure_of_the_first_item_is_raised_whichever_call_ends_first(fates: list[tuple[int, bool]], at_once: int) -> None:
    """An error that named another item each time would be no use to a user, and a test could not expect it."""

    async def call(numbered: tuple[int, tuple[int, bool]]) -> int:
        number, (turns, fails) = numbered
        for _ in range(turns):
            await asyncio.sleep(0)
        if fails:
            raise Unavailable(str(number))
        return number

    mapped = bounded_map(call, enumerate(fates), at_once)
    failing = [number for number, (_, fails) in enumerate(fates) if fails]
    if failing:
        with pytest.raises(Unavailable, match=f"^{failing[0]}$"):
            asyncio.run(mapped)
    else:
        assert asyncio.run(mapped) == list(range(len(fates)))


async def test_a_failure_ends_the_calls_of_later_items_and_waits_for_those_of_earlier_ones() -> None:
    goes_on = asyncio.Event()
    ended: list[int] = []

    async def call(item: int) -> None:
        if item == 2:
            await asyncio.sleep(0)
            raise Unavailable("two")
        try:
            await goes_on.wait()
        finally:
            ended.append(item)

    mapping = asyncio.ensure_future(bounded_map(call, range(100), 5))
    while len(ended) < 2:  # noqa: ASYNC110 - turns of the loop
        await asyncio.sleep(0)
    assert (sorted(ended), mapping.done()) == ([3, 4], False)
    goes_on.set()
    with pytest.raises(Unavailable, match="two"):
        await mapping
    assert sorted(ended) == [0, 1, 3, 4]


async def test_a_cancellation_ends_all_calls() -> None:
    begun, ended = list[int](), list[int]()

    async def call(item: int) -> None:
        begun.append(item)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(item)

    mapping = asyncio.ensure_future(bounded_map(call, range(100), 5))
    while len(begun) < 5:  # noqa: ASYNC110 - turns of the loop
        await asyncio.sleep(0)
    mapping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await mapping
    assert (sorted(begun), sorted(ended)) == ([0, 1, 2, 3, 4],) * 2


async def test_a_failure_of_the_items_is_raised() -> None:
    def items() -> Iterator[int]:
        yield 0
        raise KeyError("no more")

    async def call(item: int) -> int:
        return item

    with pytest.raises(KeyError):
        await bounded_map(call, items(), 3)
