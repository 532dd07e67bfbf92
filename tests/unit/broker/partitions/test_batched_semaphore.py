"""Waiting tasks are admitted together; none is forgotten, and never too many are inside."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from stratalog_broker.partitions.batched_semaphore import BatchedSemaphore


async def _turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_waiting_tasks_are_admitted_together() -> None:
    semaphore, entered = BatchedSemaphore(8), list[int]()
    ends = [asyncio.Event() for _ in range(20)]

    async def work(number: int) -> None:
        async with semaphore:
            entered.append(number)
            await ends[number].wait()

    tasks = [asyncio.ensure_future(work(number)) for number in range(20)]
    await _turn()
    assert entered == list(range(8))
    ends[0].set()
    await _turn()
    assert entered == list(range(8)), "one place alone is not given away"
    ends[5].set()
    await _turn()
    assert entered == list(range(10)), "two are, though the others take long"
    for end in ends[:12]:
        end.set()
    await _turn()
    assert entered == list(range(20)), "so many as fit, and the last ones though they are few"
    for end in ends:
        end.set()
    await asyncio.gather(*tasks)


@given(st.lists(st.sampled_from(["come", "end", "cancel"]), max_size=60), st.integers(1, 9))
def test_nobody_is_forgotten_and_never_too_many_are_inside(steps: list[str], at_once: int) -> None:
    asyncio.run(_live_through(steps, at_once))


async def _live_through(steps: list[str], at_once: int) -> None:
    semaphore, inside, come = BatchedSemaphore(at_once), list[asyncio.Event](), list[asyncio.Task[None]]()

    async def work() -> None:
        end = asyncio.Event()
        async with semaphore:
            inside.append(end)
            try:
                assert len(inside) <= at_once
                await end.wait()
            finally:
                inside.remove(end)

    for number, step in enumerate(steps):
        if step == "come":
            come.append(asyncio.ensure_future(work()))
        elif step == "end" and inside:
            inside[number % len(inside)].set()
        elif step == "cancel" and come:
            come[number % len(come)].cancel()
        if number % 3:
            await _turn()
    while not all(task.done() for task in come):
        await _turn()
        assert inside or all(task.done() for task in come), "places are free and somebody waits"
        for end in inside:
            end.set()
    await asyncio.gather(*come, return_exceptions=True)
    assert all(task.cancelled() or task.exception() is None for task in come)
