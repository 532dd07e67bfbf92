"""Runs one call for each of many items, a bounded number at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from itertools import takewhile
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


async def bounded_map(call: Callable[[Item], Awaitable[Result]], items: Iterable[Item], at_once: int) -> list[Result]:
    """Return the results of ``call`` in the order of ``items``; at most ``at_once`` calls and tasks exist at a time.

    If calls fail, the failure of the first item in this order is raised, whichever call ended first, so that an error names the
    same item each time. A failure cancels the calls of later items and waits for those of earlier ones.
    """
    results: dict[int, Result] = {}
    failures: dict[int, BaseException] = {}
    running: dict[int, asyncio.Task[None]] = {}
    numbered = takewhile(lambda _: not failures, enumerate(items))

    async def work(place: int) -> None:
        for number, item in numbered:
            running[number] = workers[place]
            try:
                results[number] = await call(item)
            except (Exception, asyncio.CancelledError) as failure:
                # Kept, not raised: a task that failed would stand there with its failure until those before it have ended.
                failures[number] = failure
                for later in (each for each in running if each > number):
                    running[later].cancel()
            finally:
                del running[number]

    workers = [asyncio.ensure_future(work(place)) for place in range(at_once)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    if failures:
        raise failures[min(failures)]
    return [results[number] for number in range(len(results))]
